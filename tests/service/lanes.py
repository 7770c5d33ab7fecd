"""Lanes over real pools of the hash model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.worker.backends import hash_vectors
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.service.lane import Encoded, Lane, Promise

SPEC = EncodingSpec("hash://16")
BACKEND = "faults:FaultyBackend"


@contextmanager
def open_lane(
    *, pass_tokens: int = 64, promise: Promise | None = None, **options: Any
) -> Iterator[Lane]:
    """Yield a lane with a faulty backend, see `faults.py`; closed without draining."""
    pool = EncoderPool(SPEC, devices="cpu", backend=BACKEND, **options)
    lane = Lane(pool, pool.start(), pass_tokens, promise, recorded=pool.space)
    try:
        yield lane
    finally:
        lane.close()


def assert_encoded(encoded: Encoded, texts: list[str]) -> None:
    assert encoded.vectors.dtype == np.float32
    assert np.array_equal(encoded.vectors, hash_vectors(texts, 16))


def texts_of(name: str, count: int) -> list[str]:
    """Return texts of four tokens each."""
    return [f"{name:<8.8} {row:05}" for row in range(count)]
