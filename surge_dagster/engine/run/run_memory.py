"""What a run holds: bytes and slots that stages take and give back, and texts in flight; and how
long the encoder waits for storage."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from surge_dagster.engine.encoder.arena import Arena, Slot
from surge_dagster.engine.errors import Cancelled, DataError
from surge_dagster.engine.run.memory import MemoryPlan
from surge_dagster.engine.run.superbatch import SuperBatch
from surge_dagster.engine.run.thresholds import Bounds
from surge_dagster.engine.sources.partition import (
    Partition,
    PartitionRange,
    RowBatch,
    read_rows,
)
from surge_dagster.engine.support.ledger import Ledger
from surge_dagster.engine.support.text_hash import text_hashes
from surge_dagster.engine.support.waiting import TURN_SECONDS, StopSignal


class InFlight:
    """Counts texts that were admitted and are neither published nor staged, and remembers the
    highest count.

    Attributes:
        encoded: texts of the whole run that have got their vectors, also in SuperBatches that are
            being encoded.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.texts = 0
        self.most = 0
        self.encoded = 0

    def add(self, texts: int) -> None:
        with self._changed:
            self.texts += texts
            self.most = max(self.most, self.texts)

    def remove(self, texts: int) -> None:
        with self._changed:
            self.texts -= texts
            if not self.texts:
                self._changed.notify_all()

    def wait_until_none(self, stop: StopSignal) -> None:
        """Wait until every text was published or dropped; `Cancelled` when the run is stopping."""
        with self._changed:
            while self.texts:
                stop.require_running()
                self._changed.wait(TURN_SECONDS)


class ExposedIo:
    """Adds up the seconds in which the encoder waits for texts while the reader waits for storage.

    Attributes:
        reader_seconds: in which the reader waits, whatever the encoder does.
    """

    def __init__(self) -> None:
        self.seconds = self.reader_seconds = 0.0
        self._lock = threading.Lock()
        self._waiting: dict[str, float] = {}

    @contextlib.contextmanager
    def waiting(self, stage: Literal["encoder", "reader"]) -> Iterator[None]:
        with self._lock:
            self._waiting[stage] = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                now = time.perf_counter()
                if len(self._waiting) == 2:
                    self.seconds += now - max(self._waiting.values())
                seconds = now - self._waiting.pop(stage)
                self.reader_seconds += seconds if stage == "reader" else 0.0


@dataclass(frozen=True, slots=True)
class RunMemory:
    """Slots and bytes of one run. Methods that wait raise `Cancelled` when the run is stopping.

    Attributes:
        bounds: thresholds of the SuperBatches.
        plan: how the memory limit is divided.
        ledger: books every resident byte against the limit.
        arena: its slots hold the SuperBatches that are alive.
        in_flight: counts texts that were admitted and are not yet published.
        exposed_io: counts the time in which the encoder idles because storage holds slots or
            memory.
    """

    bounds: Bounds
    plan: MemoryPlan
    ledger: Ledger
    arena: Arena
    in_flight: InFlight
    exposed_io: ExposedIo
    stop: StopSignal

    def acquire(self) -> Slot:
        """An empty slot; waits until storage has released one."""
        with self.exposed_io.waiting("reader"):
            return self.arena.acquire(self.stop.stopping.is_set)

    def reserve(self, size: int) -> None:
        """Book bytes that the reader is about to hold; waits until they fit."""
        if not self.ledger.try_reserve(size):
            with self.exposed_io.waiting("reader"):
                self.ledger.reserve(size, self.stop.stopping.is_set)

    @contextlib.contextmanager
    def held(self, size: int) -> Iterator[None]:
        """Book bytes for as long as the block runs; waits until they fit."""
        self.reserve(size)
        try:
            yield
        finally:
            self.ledger.release(size)

    def source_bytes(self, partition: Partition) -> int:
        """Return what the ids and the old file of a partition may take."""
        return self.plan.source - max(0, partition.page_bytes - self.plan.reader_pages)

    def batches(
        self, partition: Partition, rows: PartitionRange | None = None
    ) -> Generator[RowBatch]:
        """Yield the rows of a partition. Its source's pages are booked until the last one, each
        batch while it is in use.

        Raises:
            DataError: a row is refused, or the pages do not fit.
            TransientError: the storage does not answer.
        """
        self._require_pages(partition)
        share = self.plan.reader - min(partition.page_bytes, self.plan.reader_pages)
        with self.held(partition.page_bytes):
            for batch in read_rows(partition, rows):
                if self.stop.stopping.is_set():
                    raise Cancelled
                # What Arrow holds: the values, and up to eight bytes per row for the offsets of
                # each column.
                size = 2 * (batch.value_bytes + 16 * (len(batch) + 1))
                with self.held(min(size, share)):
                    yield batch

    def booked(self, batch: SuperBatch) -> SuperBatch:
        """Book the memory for encoding and writing a SuperBatch; return it with that, and with the
        hashes of its texts."""
        # Of texts that moved on to the next slot, `held_bytes` counts more than the SuperBatch has.
        result = self.plan.result.of_rows(
            batch.texts, min(batch.held_bytes, self.bounds.b_max_bytes)
        )
        self.reserve(result - batch.vector_bytes)
        hashes = text_hashes(batch.slot.texts(0, batch.texts))
        return replace(batch, vector_bytes=result, hashes=hashes)

    def release(self, batch: SuperBatch, texts: int) -> None:
        """Give back the slot and the bytes of a SuperBatch that was written, and its `texts` rows
        that were in flight."""
        batch.slot.release()
        self.ledger.release(batch.held_bytes + batch.vector_bytes)
        self.in_flight.remove(texts)

    def _require_pages(self, partition: Partition) -> None:
        size = partition.page_bytes
        available = self.plan.pages
        if size > available:
            id_bytes = partition.bytes_of_ids(partition.rows or 0)
            limit = self.plan.limit_for(size + id_bytes)
            raise DataError(
                partition.key,
                f"reading its largest row group may take {size:,} bytes of memory and "
                f"{available:,} are set aside",
                f"Write row groups of fewer rows, or set memory_limit_bytes to {limit:,}.",
            )
