"""The demo: embeds this machine's docstrings through Dagster, checks the result and searches it, in
two minutes.

`catalog_refresh` and `catalog_check` are executed in this process, as runs of the instance that
`make ui` opens: no daemon has to be running.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
from rich.console import Console

from surge_dagster.catalogs.demo import build_demo_catalog
from surge_dagster.config.settings import Settings, load_settings
from surge_dagster.definitions import embedding_catalog
from surge_dagster.engine.readers.search import search
from surge_dagster.engine.support.counts import counted
from surge_dagster.engine.support.urls import local_path
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.terminal import one_line, progress_bar

DEFAULT_LIMIT = 6_000
QUERIES = ("parse a date string", "retry after an error")
_HITS = 3
_NAMES = CatalogNames()
_INSTANCE_SETTINGS = Path(__file__).with_name("dagster.yaml")


def run_demo(*, catalog: str | None, output: str | None, limit: int | None = None) -> int:
    """Build the demo catalog, embed, check and search it; return the exit code."""
    settings = load_settings(source=catalog, output=output)
    begun = time.perf_counter()
    with progress_bar("bytes of sources") as report:
        folder = local_path(settings.source, what="folder")
        summary = build_demo_catalog(folder, limit=limit or DEFAULT_LIMIT, progress=report)
    with _kept_output() as out, local_instance() as instance:
        content = (
            f"{counted(summary.texts, 'docstring')} of {counted(summary.partitions, 'package')}"
        )
        out.print(f"Catalog     {content}, in {folder}")
        if not _embed_and_check(instance, settings, out):
            return 1
        _search(settings, out)
        out.print(f"Done in {time.perf_counter() - begun:.0f} s")
        return 0


@contextmanager
def local_instance() -> Iterator[dg.DagsterInstance]:
    """Open the instance of DAGSTER_HOME, or of `.dagster` here; create it if it is missing."""
    home = Path(os.environ.get("DAGSTER_HOME") or ".dagster").absolute()
    home.mkdir(parents=True, exist_ok=True)
    if not (home / "dagster.yaml").exists():
        (home / "dagster.yaml").write_text(_INSTANCE_SETTINGS.read_text())
    os.environ["DAGSTER_HOME"] = str(home)
    with dg.DagsterInstance.get() as instance:
        yield instance


def execute(
    instance: dg.DagsterInstance,
    job: dg.JobDefinition,
    on_event: Callable[[dg.DagsterEvent], None],
) -> dg.ExecuteInProcessResult:
    """Execute a job in this process, as a run of the instance."""
    run_id = str(uuid.uuid4())

    def listen(entry: dg.EventLogEntry) -> None:
        if entry.dagster_event is not None:
            on_event(entry.dagster_event)

    instance.add_event_listener(run_id, listen)
    return job.execute_in_process(
        instance=instance,
        run_config={"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}},
        run_id=run_id,
        raise_on_error=False,
        # The operator decides, and not a daemon that starts days later.
        tags={"dagster/max_retries": "0"},
    )


def _embed_and_check(instance: dg.DagsterInstance, settings: Settings, out: Console) -> bool:
    """Execute both jobs; return whether they succeeded and all checks passed."""
    definitions = embedding_catalog(settings)
    show = _superbatch_lines(out)
    refreshed = execute(instance, definitions.resolve_job_def(_NAMES.refresh_job), show)
    if not refreshed.success:
        _print_failure(refreshed, out)
        return False
    evaluations = refreshed.get_asset_check_evaluations()
    [run_check] = [check for check in evaluations if check.asset_check_key == _NAMES.run_check]
    metrics: dict[str, Any] = {name: value.value for name, value in run_check.metadata.items()}
    run = str(run_check.description).removeprefix("Last run: ")
    line = f"Embedded    {run}"
    if "texts_per_second" in metrics:
        line += f"; {metrics['texts_per_second']:,.0f} texts/s on {metrics['device']}"
    out.print(line)
    if metrics.get("truncated"):
        texts = counted(metrics["truncated"], "text")
        out.print(
            f"Cut off     {texts} at what the model reads; the setting chunks keeps all of it"
        )

    checked = execute(instance, definitions.resolve_job_def(_NAMES.check_job), show)
    wrong: list[str] = []
    for check in checked.get_asset_check_evaluations():
        if not check.passed and check.severity == dg.AssetCheckSeverity.ERROR:
            wrong.append(check.check_name)
    passed = checked.success and not wrong
    verdict = f"NOT all right: {', '.join(wrong)}"
    if passed:
        verdict = "rows and ids are those of the source, vectors are finite and of length 1"
    out.print(f"Checked     {verdict}")
    out.print(f"Files       {settings.open_store().location(str(metrics['space']))}")
    out.print(f"Dagster     run {refreshed.run_id}; open it with: make ui")
    return passed


def _superbatch_lines(out: Console) -> Callable[[dg.DagsterEvent], None]:
    """Return what prints a line for each event of a SuperBatch."""
    texts = 0

    def show(event: dg.DagsterEvent) -> None:
        nonlocal texts
        if not event.is_step_materialization or event.asset_key != _NAMES.superbatches:
            return
        metadata = event.step_materialization_data.materialization.metadata
        metrics: dict[str, Any] = {name: value.value for name, value in metadata.items()}
        texts += metrics["texts"]
        out.print(
            f"  SuperBatch {metrics['superbatch']}: {counted(metrics['texts'], 'text')} of "
            f"{counted(metrics['partitions'], 'partition')}, {texts:,} so far"
        )

    return show


def _print_failure(refreshed: dg.ExecuteInProcessResult, out: Console) -> None:
    out.print(f"Failed      Dagster run {refreshed.run_id}:")
    for event in refreshed.filter_events(lambda event: event.is_step_failure):
        data = event.step_failure_data
        described = data.user_failure_data and data.user_failure_data.description
        out.print(described or (data.error_display_string or "").strip(), markup=False)


def _search(settings: Settings, out: Console) -> None:
    with settings.encoder_pool(task="query") as pool:
        found = search(settings.open_store(), pool, QUERIES, _HITS)
        for query, hits in zip(QUERIES, found, strict=True):
            out.print(f"Search      {query!r}", markup=False)
            for hit in hits:
                line = f"{hit.score:.2f}  {hit.id}: {one_line(hit.text, 80)}"
                out.print(f"            {line}", markup=False)


@contextmanager
def _kept_output() -> Iterator[Console]:
    """Open a console on this process's own output: Dagster redirects descriptor 1 during a run."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w", buffering=1, errors="backslashreplace") as stream:
        yield Console(file=stream, highlight=False, soft_wrap=True)
