"""The events of a run: milliseconds per partition, their effect on the encoder, and the memory that they need.

Every measurement is a process with its own instance and an op that reports what a run reports for each new partition:
materializations of the source and, with the tags of its lineage, of the embedding. *Event by event* is the public
`context.log_event`.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import psutil

from benchmarks.harness import Document, Target, at_most, say
from benchmarks.paced_runs import embed, paced_pool, ready_partitions
from benchmarks.postgres_server import NoPostgres, PostgresServer, postgres_server
from surge_dagster.engine.run.report import Event, Receipt
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.orchestration.events import EventWriter, report_events

SIDES = ("sqlite event by event", "sqlite batched", "postgres event by event", "postgres batched")
BATCHED = SIDES[1::2]
_BATCHED_SQLITE = "event_log_storage:\n  module: surge_dagster.event_storage\n  class: BatchingSqliteEventLogStorage\n"
_SOURCE, _EMBEDDINGS = dg.AssetKey("source_partitions"), dg.AssetKey("embeddings")
_SPACE = "bench-000000000000"
_TEXTS_PER_SECOND = 10_000.0  # of the encoder beside which events are stored
_TEXTS = 100  # of its partitions


def events_document(events: int, single_events: int, many: int, rounds: int) -> Document:
    """Measure every side by turns, then a run with and without events, then the memory of many events.

    Without Postgres its sides are left out, and `missing` says what to install.
    """
    with contextlib.ExitStack() as stack:
        server, missing = None, ""
        try:
            server = stack.enter_context(postgres_server())
        except NoPostgres as error:
            missing = str(error)
        sides = SIDES if server else SIDES[:2]
        found: dict[str, list[Document]] = {side: [] for side in sides}
        for index in range(rounds):
            say(f"  round {index + 1} of {rounds}")
            for side in sides[:: -1 if index % 2 else 1]:
                found[side].append(_measure(server, "cost", side, events if side in BATCHED else single_events))
        say("  beside an encoder")
        beside = _measure(None, "beside", SIDES[1], max(20, events // 4), 2 * rounds + 1)
        say("  memory")
        memory = _measure(None, "cost", SIDES[1], many)
    return {
        "postgres": server.version if server else None,
        "missing": missing,
        "sides": {
            side: {
                "partitions": rows[0]["partitions"],
                "milliseconds": statistics.median(row["milliseconds"] for row in rows),
                "cpu_milliseconds": statistics.median(row["cpu_milliseconds"] for row in rows),
            }
            for side, rows in found.items()
        },
        "beside_encoder": beside,
        "memory": memory,
    }


def _measure(server: PostgresServer | None, kind: str, side: str, count: int, turns: int = 1) -> Document:
    url = server.create_database(f"round_{time.monotonic_ns()}") if server and side.startswith("postgres") else ""
    command = [sys.executable, "-m", "benchmarks.dagster_events", kind, side, str(count), str(turns), url]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


def event_targets(found: Document) -> Iterator[Target]:
    """The aims of the scenario."""
    for side in BATCHED:
        row = found["sides"].get(side, {})
        yield at_most(f"{side}, ms per partition", 1.0, row.get("milliseconds"), note=found["missing"])
    yield Target("encode throughput with events over without", 0.97, found["beside_encoder"]["ratio"])
    memory = found["memory"]
    name = f"memory growth over {memory['partitions']:,} partitions in MB"
    yield at_most(name, 50.0, memory["growth_bytes"] / 1e6)


def event_lines(found: Document) -> Iterator[str]:
    """The table."""
    yield ""
    title = f"two events, Postgres {found['postgres'] or found['missing']}"
    yield f"{title:26}{'partitions':>12}{'ms each':>10}{'CPU ms':>10}"
    for side, row in found["sides"].items():
        yield f"{side:26}{row['partitions']:>12,}{row['milliseconds']:>10.2f}{row['cpu_milliseconds']:>10.2f}"
    rates = found["beside_encoder"]["texts_per_second"]
    yield f"encoder of a fixed speed, texts/s: {rates['off']:,.0f} without events, {rates['on']:,.0f} with events"


def main() -> None:
    """The process of one measurement."""
    kind, side, count, turns, url = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    with tempfile.TemporaryDirectory(prefix="surge-bench-") as folder:
        postgres = f"storage:\n  postgres:\n    postgres_url: {url}\n"
        (Path(folder) / "dagster.yaml").write_text(postgres if url else _BATCHED_SQLITE if side in BATCHED else "")
        with dg.DagsterInstance.from_config(folder) as instance:
            if kind == "cost":
                found = _in_an_op(instance, lambda context: _report_all(context, side, count))
            else:
                found = _in_an_op(instance, lambda context: _beside_encoder(context, count, turns, Path(folder)))
    print(json.dumps({"partitions": count, **found}))


def _in_an_op(instance: dg.DagsterInstance, work: Callable[[dg.OpExecutionContext], Document]) -> Document:
    found: Document = {}

    @dg.op
    def op(context) -> None:
        found.update(work(context))

    @dg.job(executor_def=dg.in_process_executor)
    def job() -> None:
        op()

    quiet = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
    job.execute_in_process(instance=instance, run_config=quiet)
    return found


def _report_all(context: dg.OpExecutionContext, side: str, count: int) -> Document:
    process = psutil.Process()
    begun, cpu = time.perf_counter(), time.process_time()
    settled = 0
    with contextlib.ExitStack() as stack:
        events = stack.enter_context(_writer(context)) if side in BATCHED else None
        for number in range(count):
            _report(context if events is None else events, f"p{number:06}")
            if number == count // 10:  # the code is loaded and the queue is as full as it gets
                settled = process.memory_info().rss
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    return {
        "milliseconds": seconds / count * 1_000,
        "cpu_milliseconds": cpu / count * 1_000,
        "growth_bytes": process.memory_info().rss - settled,
    }


def _beside_encoder(context: dg.OpExecutionContext, count: int, turns: int, folder: Path) -> Document:
    """Runs with and without events by turns, with one pool; a run's time ends when its last event is stored."""
    work = ready_partitions(count, _TEXTS)
    rates: dict[str, list[float]] = {"off": [], "on": []}
    with paced_pool(_TEXTS_PER_SECOND) as pool:
        for turn in range(turns + 1):
            for side in ("off", "on") if turn % 2 else ("on", "off"):
                begun = time.perf_counter()
                with _writer(context) as events:

                    def seen(event: Event, report: bool = side == "on", events: EventWriter[Any] = events) -> None:
                        if report and isinstance(event, Receipt):
                            _report(events, event.key)

                    store = LocalStore(folder / f"{side}-{turn}")
                    embed(pool, work, store, Thresholds(b_min=1_000, b_max=5_000), seen=seen)
                if turn:  # the first turn loads the code
                    rates[side].append(count * _TEXTS / (time.perf_counter() - begun))
                shutil.rmtree(folder / f"{side}-{turn}")
    return {
        "texts_per_second": {side: statistics.median(found) for side, found in rates.items()},
        "ratio": statistics.median(on / off for on, off in zip(rates["on"], rates["off"], strict=True)),
        "turns": rates,
    }


def _writer(context: dg.OpExecutionContext) -> EventWriter[dg.AssetMaterialization]:
    return EventWriter(context, lambda batch: report_events(context.instance, context, batch), 60)


def _report(to: EventWriter[dg.AssetMaterialization] | dg.OpExecutionContext, key: str) -> None:
    """Report the two events of a partition."""
    metadata = {"key": key, "source_version": "v1", "removed": False, "dagster/partition_row_count": 10}
    source = dg.AssetMaterialization(_SOURCE, partition=key, metadata=metadata, tags={"dagster/data_version": "v1"})
    if isinstance(to, EventWriter):
        to.put(source)
        to.put(_materialization(key))
        return
    to.log_event(source)
    to.log_event(_materialization(key))


def _materialization(key: str) -> dg.AssetMaterialization:
    upstream = f"{_SOURCE.to_user_string()}"
    return dg.AssetMaterialization(
        _EMBEDDINGS,
        partition=key,
        metadata={
            "path": dg.MetadataValue.path(f"data/embeddings/{_SPACE}/{key}.parquet"),
            "space": _SPACE,
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


if __name__ == "__main__":
    main()
