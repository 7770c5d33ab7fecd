"""The demo: this machine's docstrings through Dagster, from start to end, in two minutes.

Everything is real: the catalog is built, `catalog_refresh` and `catalog_check` are executed as runs of the instance
that `make ui` opens, and the result is searched.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import dagster as dg
from dagster._core.events import DagsterEvent
from rich.console import Console

from surge_dagster.assets.superbatches import figures_of
from surge_dagster.catalogs.demo import build_demo_catalog
from surge_dagster.definitions import embedding_catalog
from surge_dagster.engine.search import search
from surge_dagster.engine.support.urls import local_path
from surge_dagster.in_process import execute, local_instance
from surge_dagster.orchestration.active_runs import active_runs
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.settings import Settings, load_settings
from surge_dagster.terminal import one_line, progress_bar

DEFAULT_LIMIT = 6_000
QUERIES = ("parse a date string", "retry after an error")
_HITS = 3
_NAMES = CatalogNames()


def run_demo(*, catalog: str | None = None, output: str | None = None, limit: int | None = None) -> int:
    """Build the demo catalog, embed it through Dagster, check the result and search it.

    Args:
        catalog, output: where from and where to; None is the setting.
        limit: texts of the catalog, about; None is what two cores finish in two minutes.

    Returns:
        An exit code: 0 when everything is embedded and checked, 1 when something is wrong.

    Raises:
        SurgeError: a setting, the catalog's folder or the model cannot be used.
    """
    settings = load_settings(source=catalog, output=output)
    begun = time.perf_counter()
    with progress_bar("texts") as report:
        folder = local_path(settings.source, what="catalog")
        summary = build_demo_catalog(folder, limit=limit or DEFAULT_LIMIT, progress=report)
    with _kept_output() as say, local_instance() as instance:
        say.print(f"Catalog     {summary.texts:,} docstrings of {summary.partitions:,} packages, in {folder}")
        return _embed_and_search(instance, settings, say, begun)


def _embed_and_search(instance: dg.DagsterInstance, settings: Settings, say: Console, begun: float) -> int:
    for _ in active_runs(instance, lambda run: run.job_name == _NAMES.refresh_job):
        pass  # declares a run failed that was killed and looks as if it were going on
    definitions = embedding_catalog(settings)
    # The run may be launched again from the UI, whose settings can be others; it shall mean the same folders.
    resources = {
        _NAMES.catalog_resource: {"config": {"url": settings.source}},
        _NAMES.output_resource: {"config": {"url": settings.output}},
    }
    progress = _Progress(say)

    refresh = definitions.resolve_job_def(_NAMES.refresh_job)
    refreshed = execute(instance, refresh, {"resources": resources}, progress.hear)
    figures = {name: value.value for check in refreshed.checks for name, value in check.metadata.items()}
    if not refreshed.success:
        say.print(f"Failed      Dagster run {refreshed.run_id}:")
        for error in refreshed.errors:
            say.print(error, markup=False)
        return 1
    _tell_figures(figures, say)

    check = definitions.resolve_job_def(_NAMES.check_job)
    checked = execute(instance, check, {"resources": resources}, lambda event: None)
    wrong = [result.check_name for result in checked.checks if not result.passed and _is_error(result)]
    passed = checked.success and not wrong
    verdict = (
        "rows and ids are those of the source, vectors are finite and of length 1"
        if passed
        else f"NOT all right: {', '.join(wrong)}"
    )
    say.print(f"Checked     {verdict}")
    store = settings.open_store()
    say.print(f"Files       {store.location(str(figures['space']))}")
    say.print(f"Dagster     run {refreshed.run_id}; open it with: make ui")
    with settings.start_pool() as pool:
        for query, hits in zip(QUERIES, search(store, pool, QUERIES, _HITS), strict=True):
            say.print(f"Search      {query!r}", markup=False)
            for hit in hits:
                say.print(f"            {hit.score:.2f}  {hit.id}: {one_line(hit.text, 80)}", markup=False)
    say.print(f"Done in {time.perf_counter() - begun:.0f} s")
    return 0 if passed else 1


def _tell_figures(figures: dict[str, Any], say: Console) -> None:
    if figures["texts_encoded"]:
        say.print(
            f"Embedded    {figures['texts_encoded']:,} texts in {figures['partitions_written']:,} partitions in "
            f"{figures['wall_seconds']:.1f} s: {figures['texts_per_second']:,.0f} texts/s on {figures['device']} "
            f"({figures['precision']}), the first file after {figures['time_to_first_output_seconds']:.1f} s"
        )
    if figures["partitions_skipped"]:
        rest = "" if figures["texts_encoded"] else "; nothing was encoded again"
        say.print(f"Up to date  {figures['partitions_skipped']:,} partitions were already{rest}")


@dataclass(slots=True)
class _Progress:
    """A line per SuperBatch, from the events that Dagster stores."""

    say: Console
    texts: int = 0

    def hear(self, event: DagsterEvent) -> None:
        """Take the next event of the run."""
        if event.is_step_materialization and event.asset_key == _NAMES.superbatches:
            figures = figures_of(event.step_materialization_data.materialization)
            if figures is None:
                return
            self.texts += figures["texts"]
            self.say.print(
                f"  SuperBatch {figures['superbatch']}: {figures['texts']:,} texts of {figures['partitions']:,} "
                f"partitions, {figures['texts_per_second']:,.0f} texts/s, {self.texts:,} so far"
            )


def _is_error(result: dg.AssetCheckEvaluation) -> bool:
    return result.severity == dg.AssetCheckSeverity.ERROR


@contextmanager
def _kept_output() -> Iterator[Console]:
    """A console on this process's own output: during a run Dagster points descriptor 1 at the run's log file."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w", buffering=1) as stream:
        yield Console(file=stream, highlight=False, soft_wrap=True)
