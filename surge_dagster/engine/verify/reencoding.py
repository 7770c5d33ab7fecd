"""Vectors that a verification makes again: encoded, or computed from a parent space."""

from __future__ import annotations

import random
from collections.abc import Container
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import pyarrow as pa

from surge_dagster.engine.derived.conversion import convert, cut
from surge_dagster.engine.derived.parent_files import parent_rows
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import DataError, SurgeError
from surge_dagster.engine.files.facts import FileFacts
from surge_dagster.engine.files.formats import usable_file
from surge_dagster.engine.files.rows import matrix_of
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.current_space import named_space
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.cosines import LOWEST_COSINE, cosines
from surge_dagster.engine.support.values import value_lengths

_MAX_TEXTS = 4096
_MAX_BYTES = 64 * 1024 * 1024
_DERIVE_AGAIN = "Run `surge-dagster derive` again."


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
        space.require_probes(pool.space.probes)
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


class DerivedRows:
    """Computes the vectors of a derived space again and compares them bit for bit.

    It is used like `SampledRows`. Rows come file by file and in order. Both files are read in a
    stream, so their bytes are compared by a digest.
    """

    def __init__(self, store: Store, space: Space) -> None:
        assert space.derived
        self.compared = 0
        self.seed = None
        self._store = store
        self._space = space
        self._parent = named_space(store, space.derived.parent)
        self._files = OutputState(store, self._parent.name)
        self._wrong: dict[str, str] = {}
        self._digest = blake2b()

    def add(self, facts: FileFacts, first_row: int, texts: pa.Array, matrix: np.ndarray) -> None:
        """Take the stored vectors (`matrix`) of consecutive rows; the last ones are compared."""
        if first_row == 0:
            self._digest = blake2b()
        self._digest.update(np.ascontiguousarray(matrix).data)
        if first_row + len(matrix) < facts.rows:
            return
        try:
            expected = self._digest_of_parent(facts)
        except DataError as error:
            self._wrong[facts.partition_key] = error.finding
            return
        self.compared += facts.rows
        if self._digest.digest() != expected:
            finding = f"its vectors do not follow from {self._parent.name}. {_DERIVE_AGAIN}"
            self._wrong[facts.partition_key] = finding

    def compare(self) -> None:
        """Do nothing: rows are compared as they come."""

    def wrong(self) -> dict[str, str]:
        """Return what was found since the last call, by partition."""
        wrong = self._wrong
        self._wrong = {}
        return wrong

    def _digest_of_parent(self, facts: FileFacts) -> bytes:
        """Return the digest of the vectors that the file should have."""
        key = facts.partition_key
        listed = self._files.files([key])
        if not listed:
            raise DataError(key, f"the parent {self._parent.name} has no file of it", _DERIVE_AGAIN)
        [(name, found)] = listed.items()
        file = usable_file(self._store, self._parent, name, found)
        if file.facts.rows_version != facts.rows_version:
            reason = f"it was derived from earlier rows of {self._parent.name}. {_DERIVE_AGAIN}"
            raise DataError(key, reason, "")
        digest = blake2b()
        for batch in parent_rows(self._store, self._parent, file, ["embedding"]):
            vectors = convert(cut(matrix_of(batch), self._space), self._space)
            digest.update(np.ascontiguousarray(vectors).data)
        return digest.digest()
