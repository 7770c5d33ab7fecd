"""The context of a run: what its stages share, and the memory they take from it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from surge_dagster.engine.encoder.arena import Arena, Slot
from surge_dagster.engine.feed.change_files import ChangeFeed
from surge_dagster.engine.run.events import EventStream
from surge_dagster.engine.run.memory import MemoryPlan
from surge_dagster.engine.run.meters import ExposedIo, InFlight
from surge_dagster.engine.run.space_target import SpaceTarget
from surge_dagster.engine.run.staging import Staging
from surge_dagster.engine.run.superbatch import OpenPartition, SuperBatch
from surge_dagster.engine.run.thresholds import Bounds
from surge_dagster.engine.support.ledger import Ledger
from surge_dagster.engine.support.waiting import StopSignal


class EncodingSpeed:
    """What encoding a text costs in this run: as the pool measured it, and then as its calls show it.

    Args:
        texts_per_second: of the pool.
    """

    def __init__(self, texts_per_second: float) -> None:
        self._texts = max(texts_per_second, 1e-9)
        self._seconds = 1.0

    def add(self, texts: int, seconds: float) -> None:
        """Count an encode call."""
        self._texts += texts
        self._seconds += seconds

    @property
    def text_seconds(self) -> float:
        """Seconds per text."""
        return self._seconds / self._texts


@dataclass(frozen=True, slots=True)
class RunContext:
    """What the stages of one run share.

    Attributes:
        target: where files go.
        staging: where segments of split partitions wait for the others.
        bounds: thresholds of the SuperBatches.
        memory: how the memory limit is divided.
        ledger: books every resident byte against the limit.
        arena: its slots hold the SuperBatches that are alive.
        in_flight: counts texts that were admitted and are not yet published.
        exposed_io: counts the time in which the encoder idles because storage holds slots or memory.
        stop: ends the run early.
        events: takes what the stages report.
        begun: `time.perf_counter()` at the beginning of the run.
        speed: of the encoder.
        feed: writes how the rows of partitions change; None where nobody wants to know.
        read_again: partitions by key whose vectors would be those of two models; all their rows are encoded at the end.
    """

    target: SpaceTarget
    staging: Staging
    bounds: Bounds
    memory: MemoryPlan
    ledger: Ledger
    arena: Arena
    in_flight: InFlight
    exposed_io: ExposedIo
    stop: StopSignal
    events: EventStream
    begun: float
    speed: EncodingSpeed
    feed: ChangeFeed | None = None
    read_again: dict[str, OpenPartition] = field(default_factory=dict)

    def acquire(self) -> Slot:
        """An empty slot; waits until storage has released one.

        Raises:
            Cancelled: the run is stopping.
        """
        with self.exposed_io.waiting("reader"):
            return self.arena.acquire(self.stop.stopping.is_set)

    def reserve(self, size: int) -> None:
        """Book bytes that the reader is about to hold; waits until they fit.

        Raises:
            Cancelled: the run is stopping.
        """
        if not self.ledger.try_reserve(size):
            with self.exposed_io.waiting("reader"):
                self.ledger.reserve(size, self.stop.stopping.is_set)

    def booked(self, batch: SuperBatch) -> SuperBatch:
        """The SuperBatch, after the memory for encoding and writing it is booked beside what it holds.

        Raises:
            Cancelled: the run is stopping.
        """
        # Of texts that moved on to the next slot, `held_bytes` counts more than the SuperBatch has.
        result = self.memory.result.of_rows(batch.texts, min(batch.held_bytes, self.bounds.b_max_bytes))
        self.reserve(result - batch.vector_bytes)
        return replace(batch, vector_bytes=result)

    def release(self, batch: SuperBatch, texts: int) -> None:
        """Give back the slot and the bytes of a SuperBatch that was written, of which `texts` rows were in flight."""
        batch.slot.release()
        self.ledger.release(batch.held_bytes + batch.vector_bytes)
        self.in_flight.remove(texts)
