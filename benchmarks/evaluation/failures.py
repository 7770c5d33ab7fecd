"""Table 10: what a failure costs, each made on purpose in a run of its own that is checked row by
row afterwards.

The encoder is simulated, and everything that fails is real: a process and a worker get SIGKILL, a
file is cut short, and a bucket (moto) answers through a proxy that breaks 5 % of the requests.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.evaluation.scales import Scale
from benchmarks.harness import Document, say, temporary_folder
from benchmarks.paced_runs import paced_pool
from benchmarks.synthetic import build_synthetic_catalog
from surge_dagster import EmbeddingRun, EncoderPool, Receipt, open_source, verify
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.verify.verification import Violation

_WORKERS = 2
_DIMENSION = 64
_TEXTS_PER_SECOND = 20_000.0
_FAULT_RATE = 0.05
_PARTITION_TEXTS = 200
_SUPERBATCHES = 40

AtHalf = Callable[[int, EmbeddingRun], None]  # called with the texts that are published


def failures(scale: Scale) -> Iterator[Document]:
    """Table 10: run without a failure, then with each.

    Yields:
        - published_before: texts in files when it happened; None if it had no moment.
        - encoded_after: texts encoded by the run that completed the output.
        - in_flight: most texts that were admitted and not published: what a kill can lose.
        - repeated: portions that another worker encoded again.
        - refused: partitions.
        - wrong: partitions that are missing or differ from the source, without the refused ones.
    """
    with temporary_folder("/dev/shm") as folder, _pool() as pool:
        catalog = folder / "catalog"
        output = folder / "output"
        texts = scale.failures
        build_synthetic_catalog(catalog, texts=texts, partitions=texts // _PARTITION_TEXTS)

        def kill_worker(*_: object) -> None:
            os.kill(pool.worker_pids[0], signal.SIGKILL)

        yield _run("none", pool, catalog, LocalStore(output))
        shutil.rmtree(output)
        yield _run("a worker is killed at half", pool, catalog, LocalStore(output), kill_worker)
        shutil.rmtree(output)
        yield _killed_and_resumed(pool, catalog, output)
        shutil.rmtree(output)
        yield _with_faults(pool, catalog)
        damaged = max(catalog.rglob("*.parquet"), key=lambda path: path.stat().st_size)
        os.truncate(damaged, damaged.stat().st_size // 2)
        yield _run("a partition cannot be read", pool, catalog, LocalStore(output))


def _run(
    name: str,
    pool: EncoderPool,
    catalog: Path,
    store: Store,
    at_half: AtHalf | None = None,
) -> Document:
    say(f"  {name}")
    source = open_source(str(catalog))
    texts = sum(partition.rows or 0 for partition in source)
    b_min = max(1, texts // _SUPERBATCHES)
    run = EmbeddingRun(source, store, pool, Thresholds(b_min=b_min, b_max=5 * b_min))
    published = 0
    published_before = None
    for event in run.events():
        if isinstance(event, Receipt) and event.action == "encoded":
            published += event.rows
        if at_half is not None and published_before is None and published >= texts / 2:
            published_before = published
            at_half(published, run)

    report = run.report
    refused = {failure.key for failure in report.partitions_failed}
    wrong = 0
    for result in verify(source, store, run.space):
        if isinstance(result, Violation) and result.key not in refused:
            wrong += 1
    return {
        "name": name,
        "texts": texts,
        "published_before": published_before,
        "encoded_after": report.texts_encoded,
        "in_flight": report.max_in_flight_texts,
        "repeated": report.costs.replays,
        "refused": len(refused),
        "wrong": wrong,
    }


def _killed_and_resumed(pool: EncoderPool, catalog: Path, output: Path) -> Document:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    mortal = context.Process(target=_die_at_half, args=(catalog, output, sender))
    mortal.start()
    published, in_flight = receiver.recv()
    mortal.join()
    assert mortal.exitcode == -signal.SIGKILL
    resumed = _run("the run is killed at half", pool, catalog, LocalStore(output))
    return resumed | {"published_before": published, "in_flight": in_flight}


def _die_at_half(catalog: Path, output: Path, sender: Connection) -> None:
    def die(published: int, run: EmbeddingRun) -> None:
        sender.send((published, run.memory.in_flight.texts))
        os.kill(os.getpid(), signal.SIGKILL)

    with _pool() as pool:
        _run("", pool, catalog, LocalStore(output), die)


def _with_faults(pool: EncoderPool, catalog: Path) -> Document:
    # imports of some seconds
    from tests.engine.store.object_server import ObjectServer, RandomFaults, open_bucket

    with ObjectServer() as server:
        server.reset()
        server.plan = RandomFaults(_FAULT_RATE, seed=1, stalls=0)
        return _run("requests fail", pool, catalog, open_bucket(server, part_bytes=8 << 20))


def _pool() -> contextlib.AbstractContextManager[EncoderPool]:
    return paced_pool(_TEXTS_PER_SECOND / _WORKERS, _DIMENSION, workers=_WORKERS)
