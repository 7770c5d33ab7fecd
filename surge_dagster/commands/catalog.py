"""The commands that build a catalog; what they need is imported by them, for no other command does."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from surge_dagster.engine.support.counts import counted
from surge_dagster.terminal import Json, print_json, progress_bar

if TYPE_CHECKING:
    from surge_dagster.catalogs.folder import CatalogSummary

catalog_app = typer.Typer(help="Build a catalog to try things on.", no_args_is_help=True)


@catalog_app.command("demo")
def catalog_demo(
    out: Annotated[Path, typer.Option(help="Folder of the catalog.")],
    limit: Annotated[int | None, typer.Option(help="Texts, about; default: all.", min=1)] = None,
    as_json: Json = False,
) -> None:
    """Build a real catalog: the docstrings of the installed Python packages, a partition each."""
    from surge_dagster.catalogs.demo import build_demo_catalog

    with progress_bar("bytes of sources") as report:
        summary = build_demo_catalog(out, limit=limit, progress=report)
    _print_catalog(summary, out, as_json)


@catalog_app.command("synthetic")
def catalog_synthetic(
    out: Annotated[Path, typer.Option(help="Folder of the catalog.")],
    texts: Annotated[int, typer.Option(help="Texts in all.", min=1)] = 100_000,
    partitions: Annotated[int, typer.Option(help="Partitions.", min=1)] = 40,
    sigma: Annotated[float, typer.Option(help="Spread of the log-normal sizes.", min=0)] = 1.72,
    mean_bytes: Annotated[int, typer.Option(help="Mean size of a text.", min=1)] = 47,
    seed: Annotated[int, typer.Option(help="The same seed gives the same catalog.")] = 0,
    as_json: Json = False,
) -> None:
    """Build the papers' workload: log-normal partition sizes, short product-like texts."""
    from surge_dagster.catalogs.synthetic import build_synthetic_catalog

    with progress_bar("texts") as report:
        summary = build_synthetic_catalog(
            out,
            texts=texts,
            partitions=partitions,
            sigma=sigma,
            mean_bytes=mean_bytes,
            seed=seed,
            progress=report,
        )
    _print_catalog(summary, out, as_json)


def _print_catalog(summary: CatalogSummary, out: Path, as_json: bool) -> None:
    print(f"{counted(summary.partitions, 'partition')}, {counted(summary.texts, 'text')} in {out}")
    if as_json:
        print_json(asdict(summary) | {"out": str(out)})
