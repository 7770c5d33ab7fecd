"""`surge-dagster catalog`: catalogs to try things on."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from surge_dagster.catalogs.demo import build_demo_catalog
from surge_dagster.engine.support.counts import counted
from surge_dagster.terminal import Json, print_json, progress_bar

catalog = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


@catalog.callback()
def _group() -> None:
    """Build a catalog to try things on."""


@catalog.command("demo")
def catalog_demo(
    out: Annotated[Path, typer.Option(help="Folder of the catalog.")],
    limit: Annotated[int | None, typer.Option(help="About this many texts.", min=1)] = None,
    as_json: Json = False,
) -> None:
    """Build a catalog from the docstrings of the installed packages, one partition per package."""
    with progress_bar("bytes of sources") as report:
        summary = build_demo_catalog(out, limit=limit, progress=report)

    print(f"{counted(summary.partitions, 'partition')}, {counted(summary.texts, 'text')} in {out}")
    if as_json:
        print_json(asdict(summary) | {"out": str(out)})
