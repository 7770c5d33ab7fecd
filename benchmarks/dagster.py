"""What Dagster costs: the record of each partition, a whole refresh, a tick of the sensor, and the
page of the UI.

    python -m benchmarks.dagster [--scenarios events,refresh,sensor,pages] [--quick]

- events: an op reports what a run reports for each new partition: materializations of the source
  and, with the tags of its lineage, of the embedding. *Event by event* is the public
  `context.log_event`. Each round has its own instance and process. Without Postgres its sides are
  left out.
- refresh: the job `catalog_refresh` over partitions of two texts, with a hash in place of a model.
  Memory is read from outside whenever another quarter of the files exists.
- sensor: CPU seconds of ticks with nothing to do.
- pages: Chromium opens the partition page of `embeddings` until it shows the partitions; its
  GraphQL queries are then sent again, one at a time. Without Chromium only the query for the
  statuses of all partitions is measured.

The scenarios sensor and pages look at the instance that the refresh has filled, so they include it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import dagster as dg
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import (
    Document,
    Options,
    Target,
    at_most,
    in_own_process,
    in_turns,
    print_document,
    say,
    seconds_of,
    serving,
    start_document,
    temporary_folder,
)
from surge_dagster import embedding_catalog
from surge_dagster.orchestration.events import EventWriter, report_events
from surge_dagster.orchestration.names import CatalogNames
from tests.dagster.browser import NoBrowser, browser_page
from tests.dagster.postgres_server import NoPostgres, PostgresServer, postgres_server

_ROOT = Path(__file__).parent.parent
_SCENARIOS = ("events", "refresh", "sensor", "pages")
_NAMES = CatalogNames()
_SOURCE = dg.AssetKey("source_partitions")
_EMBEDDINGS = dg.AssetKey("embeddings")
_QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
_BATCHED_SQLITE = """event_log_storage:
  module: surge_dagster.event_storage
  class: BatchingSqliteEventLogStorage
"""
_QUARTERS = 4
_LOOK_SECONDS = 0.5
_GROWTH_MB = 40.0
_IDLE_TICKS = 3
_QUERY_SECONDS = 2.0
_LOAD_MILLISECONDS = 180_000
_KNOWN_QUERY = """
query KnownPartitionQuery { assetNodeOrError(assetKey: {path: ["embeddings"]}) { ... on AssetNode {
    partitionStats { numPartitions numMaterialized numFailed numMaterializing }
    partitionKeysByDimension { name partitionKeys }
    assetPartitionStatuses { ... on DefaultPartitionStatuses {
        materializedPartitions failedPartitions
        materializingPartitions unmaterializedPartitions } } } } }"""


def measure_events(arguments: argparse.Namespace) -> Document:
    """Return the milliseconds per partition of every side; `missing` says what to install for
    Postgres."""
    missing = ""
    server = None
    with contextlib.ExitStack() as stack:
        try:
            server = stack.enter_context(postgres_server())
        except NoPostgres as error:
            missing = str(error)
        sides = {}
        for database in ("sqlite", "postgres") if server else ("sqlite",):
            report = partial(report_in_an_instance, server if database == "postgres" else None)
            sides[f"{database} event by event"] = partial(report, arguments.single_events, False)
            sides[f"{database} batched"] = partial(report, arguments.events, True)
        turns = in_turns(sides, arguments.rounds)
    milliseconds = {side: 1_000 * median(seconds) for side, seconds in turns.items()}
    return {"missing": missing, "milliseconds": milliseconds}


def report_in_an_instance(server: PostgresServer | None, partitions: int, batched: bool) -> float:
    """Return the seconds per partition in a new instance."""
    with temporary_folder() as folder:
        settings = _BATCHED_SQLITE if batched else ""
        if server is not None:
            url = server.create_database(f"round_{time.monotonic_ns()}")
            settings = f"storage:\n  postgres:\n    postgres_url: {url}\n"
        (folder / "dagster.yaml").write_text(settings)
        return in_own_process(report_in_an_op, folder, partitions, batched) / partitions


def report_in_an_op(home: Path, partitions: int, batched: bool) -> float:
    """Return the seconds of an op that reports these partitions."""
    seconds = []

    @dg.op
    def op(context) -> None:
        begun = time.perf_counter()
        with contextlib.ExitStack() as stack:
            put: Callable[[dg.AssetMaterialization], None] = context.log_event
            if batched:
                report = partial(report_events, instance, context)
                writer = EventWriter[dg.AssetMaterialization](report, 60)
                put = stack.enter_context(writer.opened()).put
            for number in range(partitions):
                for event in _events_of(f"p{number:06}"):
                    put(event)
        seconds.append(time.perf_counter() - begun)

    @dg.job(executor_def=dg.in_process_executor)
    def job() -> None:
        op()

    with dg.DagsterInstance.from_config(str(home)) as instance:
        job.execute_in_process(instance=instance, run_config=_QUIET)
    return seconds[0]


def _events_of(key: str) -> Iterator[dg.AssetMaterialization]:
    """Yield the two events of a partition."""
    yield dg.AssetMaterialization(
        _SOURCE,
        partition=key,
        metadata={
            "key": key,
            "source_version": "v1",
            "removed": False,
            "dagster/partition_row_count": 10,
        },
        tags={"dagster/data_version": "v1"},
    )
    space = "bench-000000000000"
    upstream = _SOURCE.to_user_string()
    yield dg.AssetMaterialization(
        _EMBEDDINGS,
        partition=key,
        metadata={
            "path": dg.MetadataValue.path(f"data/embeddings/{space}/{key}.parquet"),
            "space": space,
            "dimension": 384,
            "dagster/partition_row_count": 10,
            "bytes": 20_000,
            "truncated": 0,
            "texts_per_second": 1_000.0,
        },
        tags={
            "dagster/data_version": "0" * 32,
            "dagster/code_version": "1",
            f"dagster/input_data_version/{upstream}": "v1",
            f"dagster/input_event_pointer/{upstream}": "1",
        },
    )


@contextlib.contextmanager
def project(partitions: int) -> Iterator[Path]:
    """Yield a folder with a catalog and an empty Dagster instance, which the environment names
    until the end."""
    with temporary_folder() as folder:
        say(f"  a catalog of {partitions:,} partitions")
        _write_catalog(folder / "catalog", partitions)
        (folder / "home").mkdir()
        shutil.copy(_ROOT / "surge_dagster" / "dagster.yaml", folder / "home")
        shutil.copy(_ROOT / "workspace.yaml", folder)
        environment = {
            "DAGSTER_HOME": str(folder / "home"),
            "DAGSTER_EMIT_PARTITION_SUBSET_IN_PLANNED_EVENTS": "true",
            "PYTHONPATH": str(_ROOT),
            "SURGE_CACHE_DIR": str(folder / "cache"),
            "SURGE_SOURCE": str(folder / "catalog"),
            "SURGE_OUTPUT": str(folder / "output"),
            "SURGE_MODEL": "hash://384",
        }
        with patch.dict(os.environ, environment):
            for name in set(os.environ).difference(environment):
                if name.startswith(("SURGE_", "DAGSTER_")):
                    del os.environ[name]
            yield folder


def _write_catalog(catalog: Path, partitions: int) -> None:
    first = catalog / "file.parquet"
    catalog.mkdir()
    rows = pa.table({"id": ["id-0", "id-1"], "text": ["a short text", "another one"]})
    pq.write_table(rows.replace_schema_metadata({b"surge.source_version": b"v1"}), first)
    for index in range(partitions):
        folder = catalog / f"partition=category%20{index:05d}"
        folder.mkdir()
        (folder / "part-0.parquet").hardlink_to(first)
    first.unlink()


def measure_refresh(folder: Path, partitions: int) -> Document:
    """Fill a project, and return also the memory of the run's process after each quarter."""
    marks = []
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        process = psutil.Process(fresh.submit(os.getpid).result())
        running = fresh.submit(refresh, folder)
        while not wait([running], _LOOK_SECONDS).done:
            published = sum(1 for _ in (folder / "output").glob("*/*.parquet"))
            if len(marks) < _QUARTERS and published * _QUARTERS >= partitions * (len(marks) + 1):
                marks.append(_own_bytes(process))
        measured = running.result()
    marks += [measured["own_bytes"]] * (_QUARTERS - len(marks))
    return measured | {"partitions": partitions, "own_bytes_at_quarters": marks}


def refresh(folder: Path) -> Document:
    """Execute the job in this process."""
    os.chdir(folder)
    job = embedding_catalog().resolve_job_def(_NAMES.refresh_job)
    with dg.DagsterInstance.get() as instance:
        begun = time.perf_counter()
        job.execute_in_process(run_config=_QUIET, instance=instance)
        return {
            "seconds": time.perf_counter() - begun,
            "own_bytes": _own_bytes(psutil.Process()),
        }


def _own_bytes(process: psutil.Process) -> int:
    """Return the bytes of a process that no other process shares."""
    memory: Any = process.memory_info()
    return memory.rss - memory.shared


def measure_ticks(folder: Path) -> list[float]:
    """Return the CPU seconds of ticks, evaluated as a code server does; the first tick reads
    everything."""
    os.chdir(folder)
    definitions = embedding_catalog()
    repository = definitions.get_repository_def()
    sensor = repository.get_sensor_def(_NAMES.sensor)
    seconds = []
    with dg.DagsterInstance.get() as instance:
        for _ in range(1 + _IDLE_TICKS):
            begun = time.process_time()
            with dg.build_sensor_context(
                instance, repository_def=repository, resources=definitions.resources
            ) as context:
                result = sensor.evaluate_tick(context)
            seconds.append(time.process_time() - begun)
            say(f"  {seconds[-1]:.2f} s: {result.skip_message or 'runs were requested'}")
    return seconds


def measure_pages(folder: Path, partitions: int, rounds: int) -> Document:
    """Open the page, then send its queries again."""
    known = {
        "operationName": "KnownPartitionQuery",
        "query": _KNOWN_QUERY,
        "variables": {},
    }
    queries: dict[str, Document] = {known["operationName"]: known}
    measured: Document = {"partitions": partitions, "page_seconds": [], "missing": ""}
    command = [
        sys.executable,
        "-m",
        "dagster",
        "dev",
        "-w",
        "workspace.yaml",
        "-h",
        "127.0.0.1",
    ]
    with serving([*command, "-p"], "/server_info", cwd=folder) as (url, _):
        say("  the page")
        try:
            for _ in range(rounds):
                page = f"{url}/assets/embeddings?view=partitions"
                measured["page_seconds"].append(_load(page, partitions, queries))
        except NoBrowser as error:
            measured["missing"] = str(error)
        say(f"  its {len(queries)} queries")
        measured["queries"] = [_query(url, query, rounds) for query in queries.values()]
    return measured


def _load(url: str, partitions: int, queries: dict[str, Document]) -> float:
    """Return the seconds until the page shows the partitions, and add the queries that it sends."""

    def note(request: Any) -> None:
        if "/graphql" in request.url:
            query = json.loads(request.post_data or "{}")
            if "operationName" in query:
                queries[query["operationName"]] = query

    with browser_page() as page:
        page.on("request", note)
        begun = time.perf_counter()
        page.goto(url, wait_until="commit")
        page.get_by_text(f"{partitions:,}").first.wait_for(timeout=_LOAD_MILLISECONDS)
        seconds = time.perf_counter() - begun
        page.wait_for_load_state("networkidle", timeout=_LOAD_MILLISECONDS)
    return seconds


def _query(url: str, query: Document, rounds: int) -> Document:
    name = query["operationName"]
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/graphql", json.dumps(query).encode(), headers)
    content = b""

    def send() -> None:
        nonlocal content
        with urllib.request.urlopen(request, timeout=300) as response:
            content = response.read()

    seconds = [seconds_of(send) for _ in range(rounds)]
    if b'"errors"' in content[:200]:
        raise RuntimeError(f"{name}: {content[:500].decode(errors='replace')}")
    return {"name": name, "seconds": median(seconds), "bytes": len(content)}


def lines(document: Document) -> Iterator[str]:
    """Yield the tables of the scenarios that were measured."""
    events = document.get("events", {"milliseconds": {}})
    for side, milliseconds in events["milliseconds"].items():
        yield f"two events, {side}: {milliseconds:.2f} ms"

    if "refresh" in document:
        refresh = document["refresh"]
        partitions = refresh["partitions"]
        own = ", ".join(f"{mark / 1e6:,.0f}" for mark in refresh["own_bytes_at_quarters"])
        seconds = refresh["seconds"]
        yield f"refresh of {partitions:,}: {seconds:.1f} s; own memory at quarters, MB: {own}"

    if "sensor" in document:
        ticks = ", ".join(f"{seconds:.2f}" for seconds in document["sensor"])
        yield f"sensor, CPU seconds of a first tick and of ticks with nothing to do: {ticks}"

    if "pages" in document:
        pages = document["pages"]
        shown = ", ".join(f"{seconds:.1f}" for seconds in pages["page_seconds"])
        yield f"page with {pages['partitions']:,} partitions, s: {shown or pages['missing']}"
        for row in sorted(pages["queries"], key=lambda row: -row["seconds"]):
            yield f"{row['name']:40}{row['seconds']:>8.2f} s{row['bytes'] / 1e3:>10,.1f} kB"


def targets(document: Document) -> Iterator[Target]:
    """Yield the aims of the scenarios that were measured."""
    if "events" in document:
        events = document["events"]
        for side in ("sqlite batched", "postgres batched"):
            milliseconds = events["milliseconds"].get(side)
            yield at_most(f"{side}, ms per partition", 1.0, milliseconds, note=events["missing"])

    if "refresh" in document:
        marks = document["refresh"]["own_bytes_at_quarters"]
        growth = (marks[-1] - marks[0]) / 1e6
        yield at_most("growth of own memory, last three quarters, MB", _GROWTH_MB, growth)

    if "sensor" in document:
        idle = median(document["sensor"][1:])
        yield at_most("CPU seconds of a tick with nothing to do", 2.0, idle)

    if "pages" in document:
        pages = document["pages"]
        seconds = [row["seconds"] for row in pages["queries"]]
        yield at_most("s for all statuses of the page", _QUERY_SECONDS, seconds[0])
        missing = pages["missing"]
        slowest = None if missing else max(seconds)
        yield at_most("s for the page's slowest query", _QUERY_SECONDS, slowest, note=missing)


def main() -> None:
    options = Options(__doc__)
    options.add_names("--scenarios", _SCENARIOS)
    options.add_size("--rounds", 3, 1, "times that the sides take turns")
    options.add_size("--events", 2_000, 20, "partitions of a batched round")
    options.add_size("--single-events", 200, 5, "partitions of a round event by event")
    options.add_size("--partitions", 40_000, 40, "of refresh, sensor and pages")
    arguments = options.parse_args()
    requested = set(arguments.scenarios)
    partitions = arguments.partitions
    document = start_document(
        "dagster",
        arguments,
        ("dagster", "dagster-postgres", "dagster-webserver", "SQLAlchemy"),
    )
    if "events" in requested:
        say("events")
        document["events"] = measure_events(arguments)
    if requested - {"events"}:
        with project(partitions) as folder:
            say("refresh")
            document["refresh"] = measure_refresh(folder, partitions)
            if "pages" in requested:
                say("pages")
                document["pages"] = measure_pages(folder, partitions, arguments.rounds)
            if "sensor" in requested:
                say("sensor")
                document["sensor"] = in_own_process(measure_ticks, folder)
    print_document(document, lines, targets)


if __name__ == "__main__":
    main()
