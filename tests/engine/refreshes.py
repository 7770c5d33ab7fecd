"""A partition that is embedded again and again, and a pool that counts the rows that it gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from surge_dagster.engine.encoder.arena import Slot
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.schedule import EncodeCall
from surge_dagster.engine.files.facts import FileFacts
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.report import Receipt
from surge_dagster.engine.run.thresholds import Thresholds
from tests.engine.runs import SMALL, Output, Wrapped, finish, receipts
from tests.small_catalogs import Rows, numbered_rows, partition_of

ROWS = numbered_rows("k", 60)


class CountingPool(Wrapped):
    """A pool that counts the rows that are encoded."""

    def __init__(self, pool: EncoderPool) -> None:
        super().__init__(pool)
        self.rows = 0
        self.precision = pool.precision

    def submit(
        self, slot: Slot, borders: np.ndarray | None = None, rows: np.ndarray | None = None
    ) -> EncodeCall:
        self.rows += len(slot) if rows is None else len(rows)
        return self.inner.submit(slot, borders, rows)


class Refreshed:
    """One partition `k` that is embedded again and again, each time with another source version.

    Attributes:
        path: the partition's file.
    """

    def __init__(self, output: Output) -> None:
        self.root = output.root
        self.path: Path = output.path("k")
        self.pool = CountingPool(output.pool)
        self._output = output
        self._version = 0

    def embed(
        self, rows: Rows, batch_rows: int = 7, thresholds: Thresholds = SMALL, **options: Any
    ) -> Receipt:
        """Embed these rows and return the receipt."""
        self._version += 1
        self.pool.rows = 0
        partition = partition_of("k", rows, version=f"v{self._version}", batch_rows=batch_rows)
        self.run: EmbeddingRun = self._output.run(
            [partition], thresholds, pool=self.pool, **options
        )
        [receipt] = receipts(finish(self.run))
        return receipt

    def check(self, rows: Rows) -> FileFacts:
        """Row i of the file is row i of the source, with its own vector."""
        return self._output.check("k", rows)
