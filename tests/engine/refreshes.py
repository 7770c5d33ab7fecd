"""A partition that is embedded again and again, and a pool that counts the rows that it gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surge_dagster.engine.encoder.arena import Slot
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.schedule import EncodeCall
from surge_dagster.engine.files.formats import file_name
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.report import Receipt
from surge_dagster.engine.run.thresholds import Thresholds
from tests.engine.runs import SMALL, finish, make_run, receipts
from tests.small_catalogs import Rows, assert_embedded, numbered_rows, partition_of


class CountingPool:
    """Wraps a pool, and counts the rows that are encoded."""

    def __init__(self, pool: EncoderPool) -> None:
        self._pool = pool
        self.rows = 0
        self.precision = pool.precision

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def submit(
        self, slot: Slot, borders: np.ndarray | None = None, rows: np.ndarray | None = None
    ) -> EncodeCall:
        self.rows += len(slot) if rows is None else len(rows)
        return self._pool.submit(slot, borders, rows)


class Output:
    """One partition `k` that is embedded again and again, each time with another source version.

    Attributes:
        encoded: rows that the last run gave to the pool.
    """

    def __init__(self, pool: EncoderPool, root: Path) -> None:
        self.root = root
        self.pool = CountingPool(pool)
        self.encoded = 0
        self._version = 0

    def embed(
        self, rows: Rows, batch_rows: int = 7, thresholds: Thresholds = SMALL, **options: Any
    ) -> Receipt:
        """Embed these rows, check the file, and return the receipt."""
        self._version += 1
        self.pool.rows = 0
        partition = partition_of("k", rows, version=f"v{self._version}", batch_rows=batch_rows)
        self.run: EmbeddingRun = make_run(self.pool, [partition], self.root, thresholds, **options)
        [receipt] = receipts(finish(self.run))
        self.encoded = self.pool.rows
        return receipt

    def check(self, rows: Rows) -> None:
        """Row i of the file is row i of the source, with its own vector."""
        assert_embedded(self.root, self.run.space.name, "k", rows)

    @property
    def path(self) -> Path:
        """The partition's file."""
        return self.root / file_name(self.run.space.name, "k")


ROWS = numbered_rows("k", 60)


@pytest.fixture
def output(hash_pool: EncoderPool, tmp_path: Path) -> Output:
    return Output(hash_pool, tmp_path)
