"""HashBackend: vectors from a hash of the text, without a model, at over 100,000 texts per second.

It replaces a model where only the path of the texts matters. SHAKE-128 of the text gives a 16-bit
value per dimension, none of them zero once a half is added; they are scaled to length 1.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable

import numpy as np

from surge_dagster.engine.encoder.metrics import Costs
from surge_dagster.engine.encoder.worker.backends.base import BackendSettings, Progress, Rows
from surge_dagster.engine.model.spec import Space

_ROWS_PER_STEP = 512
_BYTES_PER_TOKEN = 4


def hash_vectors(texts: Iterable[str], dimension: int) -> np.ndarray:
    """Return float32 [texts, dimension]; the texts include the prompt."""
    return _vectors([text.encode() for text in texts], dimension)


def _vectors(encoded: list[bytes], dimension: int) -> np.ndarray:
    drawn = b"".join([hashlib.shake_128(text).digest(2 * dimension) for text in encoded])
    values = np.frombuffer(drawn, "<i2").reshape(-1, dimension).astype(np.float32)
    values += 0.5
    values /= np.sqrt(np.einsum("ij,ij->i", values, values))[:, None]
    return values


def hash_tokens(sizes: np.ndarray) -> np.ndarray:
    """Return the tokens of texts of these bytes, prompt included, before they are cut."""
    return 1 + sizes // _BYTES_PER_TOKEN


class HashBackend:
    name = "hash"
    detail = "shake128"

    def __init__(self, space: Space, settings: BackendSettings) -> None:
        self._prompt = space.prompt.encode()
        self._max_length = space.max_length

    def prepare(self, texts: list[str]) -> list[bytes]:
        return [self._prompt + text.encode() for text in texts]

    def forward(self, prepared: list[bytes], rows: Rows, progress: Progress) -> Costs:
        started = time.perf_counter()
        for start in range(0, len(prepared), _ROWS_PER_STEP):
            piece = prepared[start : start + _ROWS_PER_STEP]
            rows.matrix[rows.places[start : start + len(piece)]] = _vectors(
                piece, rows.matrix.shape[1]
            )
            progress()
        tokens = hash_tokens(np.fromiter(map(len, prepared), np.int64, len(prepared)))
        rows.truncated[rows.places] = tokens > self._max_length
        kept = int(np.minimum(tokens, self._max_length).sum())
        return Costs(tokens=kept, padded_tokens=kept, forward_seconds=time.perf_counter() - started)
