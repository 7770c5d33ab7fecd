"""`surge-dagster switch`: the space that readers use."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from surge_dagster.commands.compare import QueriesFile
from surge_dagster.commands.settings import (
    CATALOG,
    SPACE,
    Yes,
    existing_space,
    recorded_source,
    takes_settings,
)
from surge_dagster.config.query_pool import query_pool
from surge_dagster.config.settings import Settings
from surge_dagster.engine.compare.comparison import compare
from surge_dagster.engine.compare.queries import read_queries
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.current_space import named_space, space_of_readers
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.verify.verification import switch_space
from surge_dagster.terminal import Json, complain, print_json


@takes_settings("source", "output", *SPACE, *CATALOG)
def switch(
    settings: Settings,
    space_name: Annotated[
        str | None,
        typer.Option(
            "--space", help="Name of the space. Default: the one that the settings describe."
        ),
    ] = None,
    queries_file: QueriesFile = None,
    min_ndcg_ratio: Annotated[
        float | None,
        typer.Option(
            help="Refuse a space whose nDCG@10 for the queries is less than this ratio of the "
            "current space's.",
            min=0,
        ),
    ] = None,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Make another space the current one, if it is complete and every file in it is valid."""
    if (queries_file is None) != (min_ndcg_ratio is None):
        raise ConfigError("--min-ndcg-ratio and --queries go together. Give both, or none.")
    store = settings.open_store()
    space = named_space(store, space_name) if space_name else existing_space(settings, store)
    if queries_file is not None and min_ndcg_ratio is not None:
        _require_ndcg(settings, store, space, queries_file, min_ndcg_ratio, yes=yes)
    catalog = recorded_source(settings, store, space)
    switched = switch_space(catalog, store, space)
    change = "is now" if switched.changed else "was already"
    previous = switched.current.previous
    before = f"; before it, {previous}" if previous else ""
    print(f"{space.name} {change} the current space of {store.url}{before}")
    if as_json:
        print_json(asdict(switched))


def _require_ndcg(
    settings: Settings, store: Store, space: Space, queries: Path, min_ratio: float, *, yes: bool
) -> None:
    """End the command if a space gives worse results than the current one."""
    open_pool = partial(query_pool, settings, store, yes=yes)
    current = space_of_readers(store)
    found = compare(store, current, space, read_queries(queries), open_pool)
    shortfall = found.shortfall(min_ratio)
    if shortfall:
        complain(shortfall)
        raise typer.Exit(1)
    print(found.in_words())
