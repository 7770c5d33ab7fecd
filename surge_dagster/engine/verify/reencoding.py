"""Rows that a verification encodes again, to compare the stored vectors with new ones."""

from __future__ import annotations

import random
from collections.abc import Container
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import SurgeError
from surge_dagster.engine.files.facts import FileFacts
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.support.columns import value_lengths
from surge_dagster.engine.support.cosines import LOWEST_COSINE, cosines

_MAX_TEXTS = 4096
_MAX_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _SampledRow:
    key: str
    row: int
    lowest: float
    text: pa.LargeStringArray
    vector: np.ndarray


class SampledRows:
    """Rows that wait until they are encoded again, thousands of texts at a time.

    Args:
        pool: of the same space.
        rows: number of rows to draw from each partition; None is all.
        seed: the same seed draws the same rows; the attribute is None if all rows are compared.
    """

    def __init__(self, pool: EncoderPool, space: Space, rows: int | None, seed: int) -> None:
        if pool.space.spec_sha256 != space.spec_sha256:
            raise SurgeError(f"the pool encodes into {pool.space.name}, not into {space.name}")
        pool.require_documents()
        self._pool = pool
        self._space = space
        self._rows = rows
        self.seed = None if rows is None else seed
        self.compared = 0
        self._drawn: tuple[str, frozenset[int]] | None = None
        self._waiting: list[_SampledRow] = []
        self._bytes = 0
        self._wrong: dict[str, str] = {}

    def add(
        self, facts: FileFacts, first_row: int, texts: pa.LargeStringArray, matrix: np.ndarray
    ) -> None:
        """Keep the drawn rows among consecutive rows of a file, with their stored vectors."""
        drawn = self._drawn_rows(facts)
        lowest = min(LOWEST_COSINE[facts.precision], LOWEST_COSINE[self._pool.precision])
        for offset in range(len(matrix)):
            if first_row + offset not in drawn:
                continue
            text = texts[offset : offset + 1]
            size = int(value_lengths(text)[0])
            if len(self._waiting) == _MAX_TEXTS or self._bytes + size > _MAX_BYTES:
                self.compare()
            row = _SampledRow(
                facts.partition_key, first_row + offset, lowest, text, matrix[offset].copy()
            )
            self._waiting.append(row)
            self._bytes += size

    def compare(self) -> None:
        """Encode the waiting rows again and compare their vectors."""
        waiting = self._waiting
        self._waiting = []
        self._bytes = 0
        if not waiting:
            return
        self._space.require_tokenizer(self._pool.start().tokenizer)
        again = self._pool.vectors(pa.concat_arrays([row.text for row in waiting]))  # pyright: ignore[reportArgumentType]
        stored = np.stack([row.vector for row in waiting])
        self.compared += len(waiting)
        for row, cosine in zip(waiting, cosines(stored, again), strict=True):
            is_near = cosine >= row.lowest  # not if it is not a number
            if not is_near and row.key not in self._wrong:
                self._wrong[row.key] = (
                    f"row {row.row}: its vector has cosine {cosine:.6f} to its text encoded again; "
                    f"expected at least {row.lowest}."
                )

    def wrong(self) -> dict[str, str]:
        """Return what was found since the last call: the first wrong row of each partition."""
        wrong = self._wrong
        self._wrong = {}
        return wrong

    def _drawn_rows(self, facts: FileFacts) -> Container[int]:
        if self._rows is None or self._rows >= facts.rows:
            return range(facts.rows)
        if self._drawn is None or self._drawn[0] != facts.partition_key:
            draw = random.Random(f"{self.seed}:{facts.partition_key}")
            drawn = frozenset(draw.sample(range(facts.rows), self._rows))
            self._drawn = (facts.partition_key, drawn)
        return self._drawn[1]
