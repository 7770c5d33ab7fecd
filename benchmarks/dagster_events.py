"""The events of a run: milliseconds per partition, what they take from the encoder, and the memory that they need.

Every measurement is a process of its own, with an instance of its own and an op that logs what a run logs: a SuperBatch
per hundred partitions, and an observation and a materialization per partition. *Event by event* is the public
`context.log_event` in Dagster's own storage. A partition's milliseconds are those of its two events together.
"""

from __future__ import annotations

import json
import os
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

from benchmarks.output_runs import embed, paced_pool, ready_partitions
from benchmarks.postgres_server import postgres_server
from benchmarks.rounds import say
from benchmarks.targets import Target
from surge_dagster.assets import superbatches
from surge_dagster.assets.source_partitions import observation
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.report import Receipt, SuperBatchReport
from surge_dagster.engine.run import Event
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.engine.thresholds import Thresholds
from surge_dagster.orchestration import event_batches, lineage
from surge_dagster.orchestration.event_writer import EventWriter
from surge_dagster.orchestration.names import CatalogNames

Document = dict[str, Any]

_NAMES = CatalogNames()

_BATCHED = "event_log_storage:\n  module: surge_dagster.event_storage\n  class: BatchingSqliteEventLogStorage\n"
SIDES = ("sqlite stock", "sqlite batched", "postgres stock", "postgres batched")
_PER_SUPERBATCH = 100
_TEXTS_PER_SECOND = 10_000.0  # of the paced encoder
# Texts of a partition, and partitions of a turn per hundred of the batched rounds. The paced encoder leaves the events
# the processor and does a hundred partitions per second. The model leaves them nothing, and its partitions are tiny.
_ENCODERS = {"paced": (100, 25), "model": (10, 40)}


def events_document(events: int, stock_events: int, many: int, rounds: int) -> Document:
    """Every side by turns; ratios are within a round."""
    found: dict[str, list[Document]] = {side: [] for side in SIDES}
    with postgres_server() as server:

        def run(kind: str, side: str, count: int, turns: int = 1) -> Document:
            url = ""
            if side.startswith("postgres"):
                name = f"round_{time.monotonic_ns()}"
                url = server.create_database(name)
            command = [sys.executable, "-m", "benchmarks.dagster_events", kind, side, str(count), str(turns), url]
            ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            return json.loads(ran.stdout.splitlines()[-1])

        for index in range(rounds):
            say(f"  round {index + 1} of {rounds}")
            for side in SIDES[:: -1 if index % 2 else 1]:
                found[side].append(run("cost", side, stock_events if side.endswith("stock") else events))
        encoders = {}
        for kind, (_, partitions) in _ENCODERS.items():
            say(f"  {kind} encoder")
            encoders[kind] = run(kind, SIDES[1], max(20, events * partitions // 100), 2 * rounds + 1)
        say("  memory")
        memory = run("cost", SIDES[1], many)
        version = server.version
    return {
        "postgres": version,
        "sides": [
            {
                "side": side,
                "partitions": rows[0]["partitions"],
                "milliseconds": statistics.median(row["milliseconds"] for row in rows),
                "cpu_milliseconds": statistics.median(row["cpu_milliseconds"] for row in rows),
            }
            for side, rows in found.items()
        ],
        "speedup": {
            name: statistics.median(
                slow["milliseconds"] / fast["milliseconds"]
                for slow, fast in zip(found[f"{name} stock"], found[f"{name} batched"], strict=True)
            )
            for name in ("sqlite", "postgres")
        },
        "encoders": encoders,
        "memory": memory,
    }


def event_targets(found: Document) -> Iterator[Target]:
    """The aims of this scenario."""
    for row in found["sides"]:
        if row["side"].endswith("batched"):
            yield Target(f"{row['side']}, ms per partition", 1.0, row["milliseconds"], at_least=False)
    for kind, measured in found["encoders"].items():
        yield Target(f"encode throughput with events over without, {kind} encoder", 0.97, measured["ratio"])
    yield Target(
        f"memory growth over {found['memory']['partitions']:,} partitions in MB",
        *(50.0, found["memory"]["growth_bytes"] / 1e6),
        at_least=False,
    )


def event_lines(found: Document) -> Iterator[str]:
    """The scenario for people."""
    yield ""
    yield f"{'two events per partition':26}{'partitions':>12}{'ms each':>10}{'CPU ms':>10}"
    for row in found["sides"]:
        yield f"{row['side']:26}{row['partitions']:>12,}{row['milliseconds']:>10.2f}{row['cpu_milliseconds']:>10.2f}"
    yield f"event by event over batched: SQLite {found['speedup']['sqlite']:.1f}, Postgres {found['postgres']} " + (
        f"{found['speedup']['postgres']:.1f}"
    )
    for kind, measured in found["encoders"].items():
        rates, shares = measured["texts_per_second"], measured["cpu_share"]
        yield (
            f"{kind} encoder, texts/s: {rates['off']:,.0f} without events, {rates['on']:,.0f} with; CPU of the run's "
            f"process, of a core: {shares['off']:.1%} and {shares['on']:.1%}"
        )


def main() -> None:
    """One measurement's process."""
    kind, side, count, turns, url = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
    with tempfile.TemporaryDirectory(prefix="surge-bench-") as folder:
        settings = f"storage:\n  postgres:\n    postgres_url: {url}\n" if url else _BATCHED
        (Path(folder) / "dagster.yaml").write_text("" if side == SIDES[0] else settings)
        if side.endswith("stock"):
            event_batches.CHECKED_VERSIONS = ()
        with dg.DagsterInstance.from_config(folder) as instance:
            if kind == "cost":
                found = _in_an_op(instance, lambda context: _log_all(context, count))
            else:
                found = _in_an_op(instance, lambda context: _beside_encoder(context, kind, count, turns, Path(folder)))
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


def _log_all(context: dg.OpExecutionContext, count: int) -> Document:
    process = psutil.Process()
    begun, cpu = time.perf_counter(), time.process_time()
    settled = 0
    with EventWriter(context, grace_seconds=60) as events:
        for number in range(count):
            if number % _PER_SUPERBATCH == 0:
                _tell(events, _superbatch(number), None)
            _tell(events, _receipt(f"p{number:06}", number), _partition(f"p{number:06}"))
            if number == count // 10:  # the code is loaded and the queue is as full as it gets
                settled = process.memory_info().rss
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    return {
        "milliseconds": seconds / count * 1_000,
        "cpu_milliseconds": cpu / count * 1_000,
        "growth_bytes": process.memory_info().rss - settled,
    }


def _beside_encoder(context: dg.OpExecutionContext, kind: str, count: int, turns: int, folder: Path) -> Document:
    """Runs with and without events by turns, with one pool; a run's time ends when its last event is stored."""
    texts, _ = _ENCODERS[kind]
    work = ready_partitions(count, texts)
    rates: dict[str, list[float]] = {"off": [], "on": []}
    shares: dict[str, list[float]] = {"off": [], "on": []}
    with paced_pool(384, _TEXTS_PER_SECOND) if kind == "paced" else EncoderPool() as pool:
        _run(context, pool, work[: count // 10], folder / "first", with_events=True)  # loads the code
        for turn in range(turns):
            for side in ("off", "on") if turn % 2 else ("on", "off"):
                begun, cpu = time.perf_counter(), time.process_time()
                _run(context, pool, work, folder / f"{side}-{turn}", with_events=side == "on")
                seconds = time.perf_counter() - begun
                rates[side].append(count * texts / seconds)
                shares[side].append((time.process_time() - cpu) / seconds)
                shutil.rmtree(folder / f"{side}-{turn}")
    medians = {side: statistics.median(found) for side, found in rates.items()}
    return {
        "texts_per_second": medians,
        "ratio": statistics.median(on / off for on, off in zip(rates["on"], rates["off"], strict=True)),
        "cpu_share": {side: statistics.median(found) for side, found in shares.items()},
        "turns": rates,
    }


def _run(
    context: dg.OpExecutionContext, pool: EncoderPool, work: list[Partition], output: Path, *, with_events: bool
) -> None:
    thresholds = Thresholds(b_min=1_000, b_max=5_000)
    with EventWriter(context, grace_seconds=60) as events:

        def seen(event: Event) -> None:
            if with_events and isinstance(event, SuperBatchReport | Receipt):
                _tell(events, event, _partition(event.key) if isinstance(event, Receipt) else None)

        embed(pool, work, LocalStore(output), thresholds, seen=seen)


def _tell(events: EventWriter, event: SuperBatchReport | Receipt, partition: Partition | None) -> None:
    if isinstance(event, SuperBatchReport):
        events.log(superbatches.materialization(_NAMES, event, "bench-000000000000"), lambda storage_id: None)
        return
    assert partition is not None
    observed: list[int] = []
    events.log(observation(_NAMES, partition), observed.append)
    events.log_after(lambda: lineage.materialization(_NAMES, event, observed[0], observed[0]))


def _partition(key: str) -> Partition:
    return Partition(key, "v1", lambda: iter(()), lambda: "v1")


def _superbatch(index: int) -> SuperBatchReport:
    figures = dict.fromkeys(("partitions", "texts", "text_bytes", "tokens", "padded_tokens", "truncated"), 100)
    seconds = ("encode", "tokenize", "forward", "serialize", "upload", "publish")
    rates = dict.fromkeys((*(f"{name}_seconds" for name in seconds), "fill_ratio", "overlap_ratio"), 1.0)
    return SuperBatchReport(index=index, texts_per_second=1_000.0, **figures, **rates)  # pyright: ignore[reportArgumentType]


def _receipt(key: str, number: int) -> Receipt:
    space, digest = "bench-000000000000", f"{number:032x}"
    path = os.path.join("data", "embeddings", space, f"{key}.parquet")  # noqa: PTH118
    return Receipt(key, "encoded", path, 10, 384, 20_000, digest, 0, "v1", digest, digest, space, 0, 1_000.0)


if __name__ == "__main__":
    main()
