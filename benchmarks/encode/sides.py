"""The sides of the encode benchmark: every peer, this engine's pool, and a whole run around the
pool.

The pool's side begins with the list of strings that every peer gets and ends with vectors in host
memory, so making the Arrow column and filling the slot count. A run's side goes from a Parquet
catalog to published files, which no peer does.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.encode.inputs import Workload
from benchmarks.encode.peers import (
    Daft,
    OnnxRuntime,
    Peer,
    Products,
    SentenceTransformers,
    SentenceTransformersPool,
    Setting,
)
from benchmarks.harness import Document, cpu_instructions, first_line, say, seconds_of
from benchmarks.paced_runs import embed
from surge_dagster import EncoderPool, EncodingSpec, open_source, open_store
from surge_dagster.engine.encoder.schedule import EncodeMetrics

REFERENCE = "sentence-transformers"
PEERS: dict[str, Callable[[Setting], Peer]] = {
    REFERENCE: SentenceTransformers,
    "sentence-transformers-pool": SentenceTransformersPool,
    "onnxruntime": OnnxRuntime,
    "daft": Daft,
    "products-fp32": partial(Products, precision="fp32"),
    "products-bf16": partial(Products, precision="bf16"),
}
_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}


@dataclass(slots=True)
class Side:
    """One side: facts from before the rounds, and what the rounds add.

    Attributes:
        kind: "peer", "pool" or "run".
        work: encodes the texts; returns vectors, or for a run its seconds.
        rates: texts per second of each round.
        missing: why the side cannot take part.
    """

    name: str
    kind: str
    work: Callable[[list[str]], np.ndarray | float] = lambda texts: 0.0
    facts: Document = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    vectors: np.ndarray | None = None
    missing: str = ""

    def take_turn(self, texts: list[str]) -> None:
        """Encode the texts once."""
        begun = time.perf_counter()
        result = self.work(texts)
        seconds = time.perf_counter() - begun
        if isinstance(result, np.ndarray):
            self.vectors = result
        else:
            seconds = result
        self.rates.append(len(texts) / seconds)


class PoolCall:
    """Calls of a pool with one slot that takes all the texts; `metrics` are those of the last
    call."""

    def __init__(self, pool: EncoderPool, texts: list[str]) -> None:
        self.pool = pool
        self.metrics = EncodeMetrics()
        self._workers = pool.workers
        text_bytes = len("".join(texts).encode())
        self._arena = pool.arena(slots=1, max_texts=len(texts), max_bytes=max(1, text_bytes))
        self._slot = self._arena.acquire()

    def encode(self, texts: list[str]) -> np.ndarray:
        self._slot.truncate(0)
        self._slot.append(pa.array(texts, pa.large_string()))  # pyright: ignore[reportArgumentType]
        self.metrics = self.pool.encode(self._slot)
        return self._slot.matrix(0, len(texts))

    def ratios(self) -> Document:
        """Return the share of computed tokens that were padding, and of the workers' time without a
        forward pass."""
        costs = self.metrics.costs
        idle_ratio = costs.worker_idle_ratio(self._workers, costs.encode_seconds)
        return {"padding_ratio": costs.padding_ratio, "worker_idle_ratio": idle_ratio}

    def close(self) -> None:
        self._slot.release()
        self._arena.close()


def open_peer(name: str, setting: Setting, stack: ExitStack) -> Side:
    """Return a peer that has loaded its model, or a side with the reason why it cannot."""
    say(f"  {name}")
    try:
        peer = PEERS[name](setting)
    except Exception as error:  # a library of others may fail in any way; the remaining sides go on
        return Side(name, "peer", missing=first_line(error))
    stack.callback(peer.close)
    return Side(name, "peer", peer.encode, {"batch_size": peer.batch_size})


def open_pool(
    precision: str, spec: EncodingSpec, texts: list[str], stack: ExitStack
) -> tuple[Side, PoolCall | None]:
    """Return a started pool after its first, timed pass over the texts; no call if the CPU lacks
    the precision."""
    name = f"pool {precision}"
    say(f"  {name}")
    if precision == "bf16" and not _BF16.intersection(cpu_instructions()):
        reason = "this CPU has no bf16 arithmetic; libraries emulate it there"
        return Side(name, "pool", missing=reason), None
    pool = stack.enter_context(EncoderPool(spec, precision=precision, devices="cpu"))
    started = pool.start()
    call = PoolCall(pool, texts)
    stack.callback(call.close)
    facts = {
        "precision": precision,
        "device_reason": started.device_reason,
        "cold_texts_per_second": len(texts) / seconds_of(lambda: call.encode(texts)),
    }
    return Side(name, "pool", call.encode, facts), call


def run_side(call: PoolCall, workload: Workload, scratch: Path) -> Side:
    """Return whole runs with the pool, each to an empty output; `idle_ratios` in the facts gets a
    value per run."""
    catalog = workload.write_catalog(scratch / "input")
    output = scratch / "output"
    idle: list[float] = []

    def work(_: list[str]) -> float:
        report = embed(call.pool, open_source(catalog), open_store(output))
        shutil.rmtree(output)
        idle.append(report.worker_idle_ratio)
        return report.wall_seconds

    return Side(f"run {call.pool.precision}", "run", work, {"idle_ratios": idle})
