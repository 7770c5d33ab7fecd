"""Small passes on a GPU: launched kernel by kernel, and from recordings."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.lanes import Lane
from benchmarks.gpu.passes import draw_tokens, vocabulary_of
from benchmarks.gpu.recorded_passes import record_passes
from benchmarks.harness import in_own_process
from surge_dagster import EncodingSpec
from surge_dagster.engine.encoder.worker import parity
from surge_dagster.engine.encoder.worker.backends import BackendSettings, Rows, encode_texts
from surge_dagster.engine.inference.packed_backend import (
    PackedBackend,
    load_packed,
)
from surge_dagster.engine.model.spec import Space

_TEXTS = ((1, 11), (1, 57), (1, 256), (6, 57), (32, 11))  # and their mean tokens


def load_recorded(space: Space, settings: BackendSettings) -> PackedBackend:
    """Load the backend of a worker whose small passes are recorded."""
    backend = load_packed(space, settings)
    record_passes(backend)
    return backend


def small(bench: Bench) -> None:
    """Milliseconds of passes of at most 512 tokens without and with recordings, their memory, and
    the lowest cosine between the two."""
    bench.close_encoders()
    for name in bench.first_if_quick(["minilm", "e5-large"]):
        if bench.has_time(40, f"small: {name}"):
            # torch before 2.12 cannot free memory any more in a process whose recording failed.
            in_own_process(_compare_backends, bench, name)
    if bench.has_time(60, "small: pools"):
        _compare_pools(bench)


def _compare_backends(bench: Bench, name: str) -> None:
    space = EncodingSpec(bench.model(name)).resolve()
    settings = BackendSettings(str(bench.device), bench.precision, threads=4)
    plain = load_packed(space, settings)
    held = _held_bytes(bench)
    began = time.perf_counter()
    recorded = load_packed(space, settings)
    recordings = len(record_passes(recorded))
    seconds = time.perf_counter() - began
    # The model itself, and the memory of the recordings.
    megabytes = (_held_bytes(bench) - held) / 1e6

    lowest = 1.0
    for text in parity.PARITY_TEXTS:
        found, expected = (encode_texts(each, [text], space)[0] for each in (recorded, plain))
        lowest = min(lowest, parity.lowest_cosine(found, expected))
    bench.say(
        "small",
        model=name,
        recordings=recordings,
        start_seconds=seconds,
        megabytes=megabytes,
        cosine_to_plain=lowest,
    )
    for texts, mean in _TEXTS:
        tokens = draw_tokens(texts, mean, space, vocabulary_of(space))
        matrix = np.empty((texts, space.dimension), np.float32)
        rows = Rows.of_all(matrix, np.empty(texts, np.uint8))
        times: dict[str, float] = {}
        for side, backend in (("plain", plain), ("recorded", recorded)):
            work = partial(backend.forward, tokens, rows, lambda: None)
            times[f"{side}_ms"] = 1e3 * bench.timed(work)
        bench.say("small", model=name, texts=texts, tokens=len(tokens.ids), **times)


def _held_bytes(bench: Bench) -> int:
    if not bench.on_cuda:
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(bench.device)


def _compare_pools(bench: Bench) -> None:
    """Milliseconds of a pool's call for one text."""
    texts = bench.texts(57, 64)
    loaders = {"plain": load_packed, "recorded": load_recorded}
    for side, load in loaders.items():
        backend = f"{load.__module__}:{load.__name__}"
        with bench.new_pool("minilm", backend=backend) as pool:
            pool.start()
            with contextlib.closing(Lane(pool, texts)) as lane:
                times = [lane.encode(1) for _ in range(bench.size(300, 5))]
        p50, p99 = 1e3 * np.percentile(times[len(times) // 5 :], [50, 99])
        facts: dict[str, Any] = {"model": "minilm", "passes": side, "texts": 1}
        bench.say("small", **facts, pool_p50_ms=p50, pool_p99_ms=p99)
