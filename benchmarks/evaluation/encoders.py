"""Calls of the two pools that the strategies are compared on: this engine's, and sentence-transformers' own.

sentence-transformers' multi-process pool is what people have without this engine; it gets and gives Python lists.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.inputs import short_workload
from benchmarks.peers import SentenceTransformersPool, Setting
from surge_dagster.engine.encoder.arena import Arena, Slot
from surge_dagster.engine.encoder.devices import usable_cores
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import Space

_PILOT_TEXTS = 200


class PoolTexts:
    """Calls of this engine's pool for texts that lie in no slot: they are copied into one, which grows as needed."""

    def __init__(self, pool: EncoderPool) -> None:
        self.space: Space = pool.space
        self.precision = pool.precision
        self.workers = pool.workers
        self._pool = pool
        self._arena: Arena | None = None
        self._slot: Slot | None = None

    def encode(self, texts: pa.LargeStringArray) -> np.ndarray:
        """The vectors of texts, [texts, dimension], over shared memory; valid until the next call."""
        slot = self._empty_slot(len(texts), texts.nbytes)
        slot.append(texts)
        if len(texts):
            self._pool.submit(slot).result()
        return slot.matrix(0, len(slot))

    def close(self) -> None:
        if self._arena is not None:
            self._arena.close()

    def _empty_slot(self, texts: int, text_bytes: int) -> Slot:
        if self._slot is not None:
            self._slot.truncate(0)
            free_texts, free_bytes = self._slot.room
            if texts <= free_texts and text_bytes <= free_bytes:
                return self._slot
            texts, text_bytes = max(texts, 2 * free_texts), max(text_bytes, 2 * free_bytes)
        self.close()
        self._arena = self._pool.arena(slots=1, max_texts=max(1, texts), max_bytes=max(1, text_bytes))
        self._slot = self._arena.acquire()
        return self._slot


class SentenceTransformersTexts:
    """Calls of sentence-transformers' multi-process pool, with the best of three batch sizes."""

    precision = "fp32"

    def __init__(self, space: Space) -> None:
        pilot, folder = short_workload(_PILOT_TEXTS, seed=0).texts, Path(space.model_path)
        self.space = space
        self.workers = usable_cores()
        self._peer = SentenceTransformersPool(Setting(space, folder, folder, "cpu", pilot))

    def encode(self, texts: pa.LargeStringArray) -> np.ndarray:
        """The vectors of texts, float32 [texts, dimension]."""
        return self._peer.encode(texts.to_pylist())

    def close(self) -> None:
        self._peer.close()
