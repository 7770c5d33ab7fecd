"""Queries on a GPU during bulk work."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product

import numpy as np
import pyarrow as pa

from benchmarks.gpu.bench import Bench
from benchmarks.harness import seconds_of
from surge_dagster import EncoderPool


def lanes(bench: Bench) -> None:
    """Milliseconds of queries during bulk work of another process on the same card, as the encoder
    service has them."""
    for name, full in bench.first_if_quick([("minilm", 150_000), ("e5-large", 13_000)]):
        if not bench.has_time(70, f"lanes: {name}"):
            continue
        bulk = bench.encoders(name, "auto", 1)
        texts = bench.texts(57, bench.size(full, 300))
        queried = bench.texts(57, bench.size(1_150, 20))
        with bench.new_pool(name) as queries:
            queries.start()
            _measure_lanes(bench, name, Lane(bulk, texts), Lane(queries, queried))


class Lane:
    """A pool and the texts that it encodes."""

    def __init__(self, pool: EncoderPool, texts: pa.LargeStringArray) -> None:
        self.texts = texts
        self._pool = pool
        self._arena = pool.arena(slots=1, max_texts=len(texts), max_bytes=texts.nbytes)
        self._slot = self._arena.acquire()

    def encode(self, count: int) -> float:
        """Return the seconds of a call of the first texts."""
        if len(self._slot) != count:
            self._slot.truncate(0)
            self._slot.append(self.texts[:count])
        return seconds_of(partial(self._pool.encode, self._slot))

    def close(self) -> None:
        self._slot.release()
        self._arena.close()


def _measure_lanes(bench: Bench, name: str, bulk: Lane, queries: Lane) -> None:
    with contextlib.closing(bulk), contextlib.closing(queries):
        work = partial(bulk.encode, len(bulk.texts))
        work()
        undisturbed = work()
        for size, is_beside in product((1, 64, len(queries.texts)), (False, True)):
            bulk_work = work if is_beside else None
            times, calls = _ask_during(bench, partial(queries.encode, size), bulk_work)
            p50, p99 = 1e3 * np.percentile(times, [50, 99])
            kept = undisturbed / float(np.mean(calls)) if calls else 1.0
            facts = {"p50_ms": p50, "p99_ms": p99, "kept": kept}
            bench.say("lanes", model=name, texts=size, beside_bulk=is_beside, **facts)


def _ask_during(
    bench: Bench, ask: Callable[[], float], bulk_work: Callable[[], float] | None
) -> tuple[list[float], list[float]]:
    """Ask for four seconds; return the seconds of the queries and of the bulk calls."""
    times: list[float] = []
    calls: list[float] = []
    ended = threading.Event()

    def work_until_the_end(work: Callable[[], float]) -> None:
        while not ended.is_set():
            calls.append(work())

    with ThreadPoolExecutor(1) as threads:
        if bulk_work is not None:
            threads.submit(work_until_the_end, bulk_work)
        until = time.perf_counter() + (0.1 if bench.quick else 4.0)
        while time.perf_counter() < until or (bulk_work is not None and not calls):
            times.append(ask())
            time.sleep(0.02)
        ended.set()
    return times, calls
