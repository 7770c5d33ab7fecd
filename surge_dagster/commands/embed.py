"""`surge-dagster embed`: a run without Dagster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from surge_dagster.commands.plan import cost_text
from surge_dagster.commands.settings import CATALOG, RUN, SPACE, takes_settings
from surge_dagster.config.settings import Settings
from surge_dagster.engine.run.report import RunReport
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.counts import counted
from surge_dagster.local_run import run_catalog
from surge_dagster.terminal import (
    TERMINATED_CODE,
    Json,
    Quiet,
    Terminated,
    complain,
    print_json,
    terminable,
)


@takes_settings("source", "output", *CATALOG, *SPACE, *RUN, "removed_partitions")
def embed(
    settings: Settings,
    force: Annotated[bool, typer.Option("--force", help="Encode fresh partitions again.")] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Embed what is missing or stale, without Dagster. After a crash, run it again to continue."""
    catalog = settings.open_source()
    store = settings.open_store()
    with terminable():
        try:
            ended = run_catalog(settings, catalog, store, force=force, quiet=quiet)
        except (KeyboardInterrupt, Terminated) as stopped:
            complain("stopped; what was published stays, run the command again to continue")
            raise typer.Exit(TERMINATED_CODE if isinstance(stopped, Terminated) else 130) from None
    _print_report(ended.report, ended.removed, store, quiet, as_json)
    raise typer.Exit(1 if ended.report.partitions_failed or ended.refusal else 0)


def _print_report(
    report: RunReport, removed: Sequence[str], store: Store, quiet: bool, as_json: bool
) -> None:
    if not quiet:
        line = (
            f"{counted(report.partitions_written, 'partition')} written, "
            f"{report.partitions_skipped:,} up to date, {len(report.partitions_failed):,} failed"
        )
        if removed:
            line += f", {len(removed):,} removed from the source"
        print(f"{line}; {_encoded_in_words(report)}")
        print(f"files are in {store.location(report.space)}")
        cost = report.cost
        if cost is not None:
            print(f"cost {cost_text(cost, report.prices, report.cost_per_million_texts)}")
    if as_json:
        print_json(report.as_dict() | {"partitions_removed": removed})


def _encoded_in_words(report: RunReport) -> str:
    if not report.device:
        return "there was nothing to encode"
    speed = f"{report.texts_per_second:,.0f} texts/s"
    if report.predicted_wall_seconds is not None:
        speed += f"; {report.predicted_wall_seconds:.1f} s were predicted"
    parts = [
        f"{counted(report.texts_encoded, 'text')} encoded in {report.wall_seconds:.1f} s "
        f"({speed}) on {report.device} in {report.precision}"
    ]
    if report.costs.rows_reused:
        parts.append(f"{report.costs.rows_reused:,} kept their vectors")
    if report.costs.texts_deduplicated:
        parts.append(f"{report.costs.texts_deduplicated:,} equal to another text")
    parts.append(f"{report.truncated:,} truncated")
    if report.rejected_rows:
        parts.append(f"{counted(report.rejected_rows, 'row')} set aside")
    return ", ".join(parts)
