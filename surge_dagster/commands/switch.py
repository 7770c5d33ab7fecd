"""`surge-dagster switch`: the space that readers use."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from surge_dagster.commands.settings import (
    CATALOG,
    SPACE,
    existing_space,
    recorded_source,
    takes_settings,
)
from surge_dagster.config.settings import Settings
from surge_dagster.engine.output.current_space import named_space
from surge_dagster.engine.verify.verification import switch_space
from surge_dagster.terminal import Json, print_json


@takes_settings("source", "output", *SPACE, *CATALOG)
def switch(
    settings: Settings,
    space_name: Annotated[
        str | None,
        typer.Option(
            "--space", help="Name of the space. Default: the one that the settings describe."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make another space the current one, if it is complete and every file in it is valid."""
    store = settings.open_store()
    space = named_space(store, space_name) if space_name else existing_space(settings, store)
    catalog = recorded_source(settings, store, space)
    switched = switch_space(catalog, store, space)
    change = "is now" if switched.changed else "was already"
    previous = switched.current.previous
    before = f"; before it, {previous}" if previous else ""
    print(f"{space.name} {change} the current space of {store.url}{before}")
    if as_json:
        print_json(asdict(switched))
