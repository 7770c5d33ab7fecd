"""What Dagster costs: the record of each partition, a whole refresh, a tick of the sensor, and the
page of the UI.

    python -m benchmarks.dagster [--scenarios events,refresh,sensor,pages] [--quick]

- events: an op reports what a run reports for each new partition: materializations of the source
  and, with the tags of its lineage, of the embedding. *Event by event* is the public
  `context.log_event`. Each round has an instance and a process of its own. Without Postgres its
  sides are left out.
- refresh: the job `catalog_refresh` over partitions of two texts, with a hash in place of a model.
  Memory is read from outside whenever another quarter of the files exists.
- sensor: CPU seconds of ticks with nothing to do.
- pages: Chromium opens the partition page of `embeddings` until it shows the partitions; its
  GraphQL queries are then sent again, one at a time. Without Chromium only the query for the
  statuses of all partitions is measured.

The scenarios sensor and pages look at the instance that the refresh has filled, so they include it.
Prints a table and, as the last line of standard output, one JSON document.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import dagster as dg
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import (
    Document,
    Scenarios,
    Target,
    add_quick,
    at_most,
    command_line,
    in_own_process,
    names_of,
    print_scenarios,
    say,
    start_document,
)
from surge_dagster.definitions import embedding_catalog
from surge_dagster.orchestration.events import EventWriter, report_events
from surge_dagster.orchestration.names import CatalogNames
from tests.dagster.browser import NoBrowser, browser_page
from tests.dagster.postgres_server import NoPostgres, PostgresServer, postgres_server

ROOT = Path(__file__).parent.parent
GROWTH_MB = 40.0
_QUERY_SECONDS = 2.0
_SIDES = ("sqlite event by event", "sqlite batched", "postgres event by event", "postgres batched")
_BATCHED = _SIDES[1::2]
_BATCHED_SQLITE = "event_log_storage:\n  module: surge_dagster.event_storage\n  class: BatchingSqliteEventLogStorage\n"
_QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
_SOURCE, _EMBEDDINGS = dg.AssetKey("source_partitions"), dg.AssetKey("embeddings")
_NAMES = CatalogNames()
_QUARTERS, _LOOK_SECONDS = 4, 0.5
_IDLE_TICKS = 3
_START_SECONDS, _LOAD_MILLISECONDS = 120, 180_000
_KNOWN_QUERY = """query KnownPartitionQuery { assetNodeOrError(assetKey: {path: ["embeddings"]}) { ... on AssetNode {
    partitionStats { numPartitions numMaterialized numFailed numMaterializing }
    partitionKeysByDimension { name partitionKeys }
    assetPartitionStatuses { ... on DefaultPartitionStatuses {
        materializedPartitions failedPartitions materializingPartitions unmaterializedPartitions } } } } }"""


def measure(arguments: argparse.Namespace) -> Document:
    """Run the requested scenarios and give the document."""
    requested = set(arguments.scenarios)
    document = start_document(
        "dagster", arguments, ("dagster", "dagster-postgres", "dagster-webserver", "SQLAlchemy")
    )
    if "events" in requested:
        say("events")
        document["events"] = measure_events(arguments)
    if requested - {"events"}:
        say("refresh")
        with refreshed_project(arguments.partitions) as project:
            document["refresh"] = project.refreshed
            if "pages" in requested:
                say("pages")
                document["pages"] = measure_pages(project, arguments.rounds)
            if "sensor" in requested:
                say("sensor")
                document["sensor"] = {"partitions": arguments.partitions} | project.in_own_process(
                    "--part", "sensor"
                )
    return document


def measure_events(arguments: argparse.Namespace) -> Document:
    """Milliseconds per partition of every side, by turns; `missing` says what to install for
    Postgres."""
    with contextlib.ExitStack() as stack:
        server, missing = None, ""
        try:
            server = stack.enter_context(postgres_server())
        except NoPostgres as error:
            missing = str(error)
        sides = _SIDES if server else _SIDES[:2]
        turns: dict[str, list[Document]] = {side: [] for side in sides}
        for index in range(arguments.rounds):
            say(f"  round {index + 1} of {arguments.rounds}")
            for side in sides[:: -1 if index % 2 else 1]:
                count = arguments.events if side in _BATCHED else arguments.single_events
                turns[side].append(_one_round(server, side, count))
    rows = {
        side: {
            name: statistics.median(turn[name] for turn in its_rounds)
            for name in ("partitions", "milliseconds")
        }
        for side, its_rounds in turns.items()
    }
    return {"postgres": server.version if server else None, "missing": missing, "sides": rows}


def _one_round(server: PostgresServer | None, side: str, count: int) -> Document:
    url = (
        server.create_database(f"round_{time.monotonic_ns()}")
        if server and side.startswith("postgres")
        else ""
    )
    return in_own_process(
        "benchmarks.dagster", "--part", "events", "--side", side, "--events", count, "--url", url
    )


def report_in_an_op(arguments: argparse.Namespace) -> Document:
    """The process of one round."""
    cost: Document = {}

    @dg.op
    def op(context) -> None:
        begun = time.perf_counter()
        with contextlib.ExitStack() as stack:
            put: Callable[[dg.AssetMaterialization], None] = context.log_event
            if arguments.side in _BATCHED:
                writer = EventWriter[dg.AssetMaterialization](
                    context, partial(report_events, instance, context), 60
                )
                put = stack.enter_context(writer).put
            for number in range(arguments.events):
                for event in _events_of(f"p{number:06}"):
                    put(event)
        seconds = time.perf_counter() - begun
        cost.update(partitions=arguments.events, milliseconds=1_000 * seconds / arguments.events)

    @dg.job(executor_def=dg.in_process_executor)
    def job() -> None:
        op()

    with tempfile.TemporaryDirectory(prefix="surge-bench-") as folder:
        postgres = f"storage:\n  postgres:\n    postgres_url: {arguments.url}\n"
        batched = _BATCHED_SQLITE if arguments.side in _BATCHED else ""
        (Path(folder) / "dagster.yaml").write_text(postgres if arguments.url else batched)
        with dg.DagsterInstance.from_config(folder) as instance:
            job.execute_in_process(instance=instance, run_config=_QUIET)
    return cost


def _events_of(key: str) -> Iterator[dg.AssetMaterialization]:
    """The two events of a partition."""
    metadata = {
        "key": key,
        "source_version": "v1",
        "removed": False,
        "dagster/partition_row_count": 10,
    }
    tags = {"dagster/data_version": "v1"}
    yield dg.AssetMaterialization(_SOURCE, partition=key, metadata=metadata, tags=tags)
    space, upstream = "bench-000000000000", _SOURCE.to_user_string()
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


def event_lines(measured: Document) -> Iterator[str]:
    title = f"two events, Postgres {measured['postgres'] or measured['missing']}"
    yield f"{title:26}{'partitions':>12}{'ms each':>10}"
    for side, row in measured["sides"].items():
        yield f"{side:26}{row['partitions']:>12,}{row['milliseconds']:>10.2f}"


def event_targets(measured: Document) -> Iterator[Target]:
    for side in _BATCHED:
        milliseconds = measured["sides"].get(side, {}).get("milliseconds")
        yield at_most(f"{side}, ms per partition", 1.0, milliseconds, note=measured["missing"])


@dataclass(frozen=True, slots=True)
class Project:
    """A folder with a catalog, its output and a Dagster instance; `refreshed` is what the refresh
    measured."""

    folder: Path
    refreshed: Document

    def in_own_process(self, *words: object) -> Document:
        """Run a part of this benchmark in the project."""
        return in_own_process(
            "benchmarks.dagster", *words, env=_environment(self.folder), cwd=self.folder
        )


@contextlib.contextmanager
def refreshed_project(partitions: int) -> Iterator[Project]:
    """A project that a refresh has just filled."""
    with tempfile.TemporaryDirectory(prefix="surge-refresh-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        say(f"  a catalog of {partitions:,} partitions")
        _write_catalog(folder / "catalog", partitions)
        (folder / "home").mkdir()
        shutil.copy(ROOT / "surge_dagster" / "dagster.yaml", folder / "home")
        say("  its refresh")
        command = [
            sys.executable,
            "-m",
            "benchmarks.dagster",
            "--part",
            "refresh",
            "--partitions",
            str(partitions),
        ]
        process = subprocess.Popen(
            command, env=_environment(folder), cwd=folder, stdout=subprocess.PIPE, text=True
        )
        marks = _watch(process, folder / "output", partitions)
        printed = process.stdout.read() if process.stdout else ""
        if process.returncode:
            raise RuntimeError(
                f"the refresh failed with exit code {process.returncode}: {printed[-2000:]}"
            )
        measured: Document = json.loads(printed.splitlines()[-1])
        marks += [measured["own_bytes"]] * (_QUARTERS - len(marks))
        yield Project(folder, measured | {"own_bytes_at_quarters": marks})


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


def _environment(folder: Path) -> dict[str, str]:
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SURGE_", "DAGSTER_"))
    }
    return inherited | {
        "DAGSTER_HOME": str(folder / "home"),
        "DAGSTER_EMIT_PARTITION_SUBSET_IN_PLANNED_EVENTS": "true",
        "PYTHONPATH": str(ROOT),
        "SURGE_CACHE_DIR": str(folder / "cache"),
        "SURGE_SOURCE": str(folder / "catalog"),
        "SURGE_OUTPUT": str(folder / "output"),
        "SURGE_MODEL": "hash://384",
    }


def _watch(process: subprocess.Popen[str], output: Path, partitions: int) -> list[int]:
    """Wait for the run's process to end; gives its memory when each quarter of the partitions was
    published."""
    marks: list[int] = []
    watched = psutil.Process(process.pid)
    while True:
        try:
            process.wait(_LOOK_SECONDS)
            return marks
        except subprocess.TimeoutExpired:
            published = sum(1 for _ in output.glob("*/*.parquet"))
            if len(marks) < _QUARTERS and published * _QUARTERS >= partitions * (len(marks) + 1):
                with contextlib.suppress(psutil.Error):  # the process has just ended
                    marks.append(_memory_of(watched))


def _memory_of(process: psutil.Process) -> int:
    """Bytes of a process that no other process sees."""
    memory = process.memory_info()
    return memory.rss - memory.shared


def refresh(arguments: argparse.Namespace) -> Document:
    """The process of the run."""
    job = embedding_catalog().resolve_job_def(_NAMES.refresh_job)
    with dg.DagsterInstance.get() as instance:
        begun, cpu = time.perf_counter(), time.process_time()
        job.execute_in_process(run_config=_QUIET, instance=instance)
        seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    own_bytes = _memory_of(psutil.Process())
    return {
        "partitions": arguments.partitions,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "own_bytes": own_bytes,
    }


def refresh_lines(measured: Document) -> Iterator[str]:
    own = ", ".join(f"{mark / 1e6:,.0f}" for mark in measured["own_bytes_at_quarters"])
    seconds, cpu = measured["seconds"], measured["cpu_seconds"]
    yield f"refresh of {measured['partitions']:,} partitions: {seconds:.1f} s, {cpu:.1f} CPU seconds"
    yield f"its own memory at each quarter in MB: {own}"


def refresh_targets(measured: Document) -> Iterator[Target]:
    marks = measured["own_bytes_at_quarters"]
    name = f"growth of own memory, last three quarters of {measured['partitions']:,}, MB"
    yield at_most(name, GROWTH_MB, (marks[-1] - marks[0]) / 1e6)


def ticks(_: argparse.Namespace) -> Document:
    """The process that evaluates the sensor, as a code server does."""
    definitions = embedding_catalog()
    sensor = definitions.get_repository_def().get_sensor_def(_NAMES.sensor)

    def tick(instance: dg.DagsterInstance) -> float:
        begun = time.process_time()
        with dg.build_sensor_context(
            instance,
            repository_def=definitions.get_repository_def(),
            resources=definitions.resources,
        ) as context:
            result = sensor.evaluate_tick(context)
        seconds = time.process_time() - begun
        say(
            f"  a tick of {seconds:.2f} s: {result.skip_message or f'{len(result.run_requests or ())} runs requested'}"
        )
        return seconds

    with dg.DagsterInstance.get() as instance:
        first = tick(instance)
        return {"first_tick": first, "idle_ticks": [tick(instance) for _ in range(_IDLE_TICKS)]}


def sensor_lines(measured: Document) -> Iterator[str]:
    idle = ", ".join(f"{seconds:.2f}" for seconds in measured["idle_ticks"])
    title = f"sensor at {measured['partitions']:,} partitions, CPU seconds of a tick"
    yield f"{title}: {measured['first_tick']:.2f}, with nothing to do {idle}"


def sensor_targets(measured: Document) -> Iterator[Target]:
    yield at_most(
        "CPU seconds of a tick with nothing to do", 2.0, statistics.median(measured["idle_ticks"])
    )


def measure_pages(project: Project, rounds: int) -> Document:
    """Open the page, then send its queries again."""
    queries: list[Document] = [
        {"operationName": "KnownPartitionQuery", "query": _KNOWN_QUERY, "variables": {}}
    ]
    measured: Document = {"partitions": project.refreshed["partitions"]}
    with _webserver(project.folder) as url:
        say("  the page")
        try:
            loads = [
                _load(f"{url}/assets/embeddings?view=partitions", measured["partitions"])
                for _ in range(rounds)
            ]
            measured["page_seconds"] = [seconds for seconds, _ in loads]
            queries += loads[-1][1]
        except NoBrowser as error:
            measured["missing"] = str(error)
        say(f"  its {len(queries)} queries")
        measured["queries"] = [_query(url, query, rounds) for query in queries]
    return measured


@contextlib.contextmanager
def _webserver(folder: Path) -> Iterator[str]:
    """A real `dagster dev` on the project's instance; gives its URL."""
    shutil.copy(ROOT / "workspace.yaml", folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "dagster",
        "dev",
        "-w",
        "workspace.yaml",
        "-h",
        "127.0.0.1",
        "-p",
        str(port),
    ]
    with (folder / "dev.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=_environment(folder), stdout=log, stderr=log
        )
        try:
            url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + _START_SECONDS
            while not _answers(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError((folder / "dev.log").read_text()[-2000:])
                time.sleep(0.2)
            yield url
        finally:
            children = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGINT)
            for left in psutil.wait_procs([psutil.Process(process.pid), *children], timeout=20)[1]:
                left.kill()  # also where the parent process ignores interrupts
            process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/server_info", timeout=10):
            return True
    except OSError:
        return False


def _load(url: str, partitions: int) -> tuple[float, list[Document]]:
    """Seconds until the page shows the partitions, and the queries that it has sent by then."""
    sent: dict[str, Document] = {}
    with browser_page() as page:
        page.on(
            "request",
            lambda request: sent.update(
                _named(request.post_data) if "/graphql" in request.url else {}
            ),
        )
        begun = time.perf_counter()
        page.goto(url, wait_until="commit")
        page.get_by_text(f"{partitions:,}").first.wait_for(timeout=_LOAD_MILLISECONDS)
        seconds = time.perf_counter() - begun
        page.wait_for_load_state("networkidle", timeout=_LOAD_MILLISECONDS)
    return seconds, list(sent.values())


def _named(body: str | None) -> dict[str, Document]:
    query = json.loads(body or "{}")
    return {query["operationName"]: query} if "operationName" in query else {}


def _query(url: str, query: Document, rounds: int) -> Document:
    name, body = query["operationName"], json.dumps(query).encode()
    seconds, content = list[float](), b""
    for _ in range(rounds):
        request = urllib.request.Request(
            f"{url}/graphql", body, {"Content-Type": "application/json"}
        )
        begun = time.perf_counter()
        with urllib.request.urlopen(request, timeout=300) as response:
            content = response.read()
        seconds.append(time.perf_counter() - begun)
        if b'"errors"' in content[:200]:
            raise RuntimeError(f"{name}: {content[:500].decode(errors='replace')}")
    return {"name": name, "seconds": statistics.median(seconds), "bytes": len(content)}


def pages_lines(measured: Document) -> Iterator[str]:
    seconds = ", ".join(f"{seconds:.1f}" for seconds in measured.get("page_seconds", ()))
    page = (
        f"page with {measured['partitions']:,} partitions, seconds until they are shown: {seconds}"
    )
    yield measured.get("missing", page)
    yield f"{'query of the page':40}{'s':>8}{'kB':>10}"
    for row in sorted(measured["queries"], key=lambda row: -row["seconds"]):
        yield f"{row['name']:40}{row['seconds']:>8.2f}{row['bytes'] / 1e3:>10,.1f}"


def pages_targets(measured: Document) -> Iterator[Target]:
    partitions = f"{measured['partitions']:,} partitions"
    missing = measured.get("missing", "")
    slowest = None if missing else max(row["seconds"] for row in measured["queries"])
    yield at_most(
        f"s for all statuses of {partitions}", _QUERY_SECONDS, measured["queries"][0]["seconds"]
    )
    yield at_most(
        f"s for the page's slowest query, {partitions}", _QUERY_SECONDS, slowest, note=missing
    )


SCENARIOS: Scenarios = {
    "events": (event_lines, event_targets),
    "refresh": (refresh_lines, refresh_targets),
    "sensor": (sensor_lines, sensor_targets),
    "pages": (pages_lines, pages_targets),
}
PARTS = {"events": report_in_an_op, "refresh": refresh, "sensor": ticks}  # processes of their own


def main() -> None:
    parser = command_line(__doc__)
    add, quick = parser.add_argument, add_quick(parser)
    add(
        "--scenarios",
        type=names_of(SCENARIOS),
        default=list(SCENARIOS),
        help=f"of {','.join(SCENARIOS)}",
    )
    add("--rounds", type=int, default=1 if quick else 3, help="times that the sides take turns (3)")
    add(
        "--events",
        type=int,
        default=20 if quick else 2_000,
        help="partitions of a batched round (2,000)",
    )
    add(
        "--single-events",
        type=int,
        default=5 if quick else 200,
        help="partitions of a round event by event (200)",
    )
    add(
        "--partitions",
        type=int,
        default=40 if quick else 40_000,
        help="of refresh, sensor and pages (40,000)",
    )
    for hidden in ("--part", "--side", "--url"):
        add(hidden, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        print(json.dumps(PARTS[arguments.part](arguments)))
    else:
        print_scenarios(measure(arguments), SCENARIOS)


if __name__ == "__main__":
    main()
