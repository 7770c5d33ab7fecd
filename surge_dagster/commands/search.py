"""`surge-dagster search`: the texts that are nearest to a query."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from surge_dagster.commands.settings import (
    SPACE,
    SpaceName,
    Yes,
    describes_space,
    space_to_read,
    start_pool,
    takes_settings,
)
from surge_dagster.config.settings import Settings
from surge_dagster.config.settings_input import require_text
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.spaces import find_space, require_model
from surge_dagster.engine.readers.search import Hit
from surge_dagster.engine.readers.search import search as search_space
from surge_dagster.engine.store.store import Store
from surge_dagster.terminal import Json, complain, one_line, print_json


@takes_settings("output", *SPACE, "devices")
def search(
    settings: Settings,
    context: typer.Context,
    text: Annotated[str, typer.Argument(help="The text to search for.", metavar="TEXT")],
    k: Annotated[int, typer.Option("-k", help="Number of results.", min=1)] = 5,
    space_name: SpaceName = None,
    removed: Annotated[
        bool,
        typer.Option("--removed", help="Also search partitions removed from the source."),
    ] = False,
    documents: Annotated[
        bool,
        typer.Option("--documents", help="Print only the best chunk of each document."),
    ] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Print the texts whose vectors are nearest, equal texts once.

    Searches the current space, or the one that the options name or describe.
    """
    require_text("the text to search for", text)
    store = settings.open_store()
    described = any(context.params[name] is not None for name in SPACE)
    space, spec = space_to_read(
        settings, store, yes=yes, name=space_name, described=described, queries=True
    )
    if not described and space_name is None and describes_space(settings):
        _mention_other_space(settings, store, space)

    with start_pool(settings, spec, task="query") as pool:
        require_model(pool.space, space)
        [hits] = search_space(store, pool, [text], k, space, removed=removed, documents=documents)
    for hit in hits:
        _print_hit(hit)
    if as_json:
        print_json({"query": text, "space": space.name, "hits": [asdict(hit) for hit in hits]})


def _mention_other_space(settings: Settings, store: Store, space: Space) -> None:
    """Say that the current space is searched, if the settings describe another one."""
    asked = find_space(store, settings.encoding_spec())
    if asked is None or asked.spec_sha256 != space.encoder_sha256:
        complain(f"searching the current space {space.name}, which is not that of the settings")


def _print_hit(hit: Hit) -> None:
    mark = "  (truncated: the model reads only a part)" if hit.truncated else ""
    print(f"{hit.score:.3f}  {one_line(hit.key)}  {one_line(hit.id)}{mark}")
    print(f"       {one_line(hit.text)}")
