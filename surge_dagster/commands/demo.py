"""`surge-dagster demo`: the main road on a catalog that every machine has."""

from __future__ import annotations

from typing import Annotated

import typer

from surge_dagster.demo import run_demo


def demo(
    limit: Annotated[
        int | None, typer.Option(help="About this many texts of the demo catalog.", min=1)
    ] = None,
    catalog: Annotated[str | None, typer.Option(help="Folder of the demo catalog.")] = None,
    output: Annotated[str | None, typer.Option(help="Folder or bucket of the embeddings.")] = None,
) -> None:
    """Embed the docstrings of the installed Python packages through Dagster, and search them."""
    raise typer.Exit(run_demo(catalog=catalog, output=output, limit=limit))
