"""How the rows of encode calls are shared out: calls, their portions, and each worker's next one.

Idle workers pull portions; nothing is assigned in advance, so a slow or lost device costs little.
With several workers a portion is a part of the remaining rows, so portions shrink and all workers
finish together. Portions come from the oldest call that has rows; the next call's follow without a
pause. A portion is batched by itself, so it must hold many texts of each length; it is also what a
dying worker loses.

The weight of a row is its bytes plus a constant, close enough to tokens and known before anything
is tokenized. All of this belongs to the dispatcher's thread and does no input or output.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from surge_dagster.engine.encoder.arena import Slot
from surge_dagster.engine.encoder.metrics import NO_COSTS, Costs
from surge_dagster.engine.encoder.quarantine import FailedRow, Quarantine, QuarantinedRows
from surge_dagster.engine.support.waiting import wait_in_turns

# Bytes that a row counts in addition to its text, for special tokens, hand-over and its vector.
ROW_WEIGHT = 32
# A worker has one portion under way and one waiting. Each is half of the worker's share of the rows
# that remain when it is taken, so together they are three quarters of its share.
PORTIONS_PER_WORKER = 2


@dataclass(frozen=True, slots=True)
class PortionSizes:
    """Limits of a portion.

    Attributes:
        texts: at most.
        largest, smallest: in weighted bytes.
    """

    texts: int
    largest: int
    smallest: int


# In texts of 47 bytes, which weigh 79: at most 8,192, which a dying worker loses, five seconds of
# MiniLM on two CPU cores; at least 415, enough of each length for full batches.
PORTIONS = PortionSizes(texts=8_192, largest=4 << 20, smallest=32 << 10)
# Of workers that queue their work on a GPU: short portions would leave the device waiting, and have
# small passes. Of these texts at most 106,000, which take MiniLM 0.15 s on an H200, and at least
# 6,600, which take 9 ms.
QUEUED_PORTIONS = PortionSizes(texts=131_072, largest=8 << 20, smallest=512 << 10)


@dataclass(frozen=True, slots=True)
class Portion:
    """Rows of a call that one worker encodes together; `quarantined` ones without others.

    Attributes:
        answered: ranges of rows that are answered before the portion ends.
    """

    call: EncodeCall
    start: int
    stop: int
    quarantined: QuarantinedRows | None = None
    answered: list[tuple[int, int]] = field(default_factory=list)

    def unanswered(self) -> Iterator[tuple[int, int]]:
        """Yield the ranges of the other rows."""
        first = self.start
        for start, stop in sorted(self.answered):
            if first < start:
                yield first, start
            first = stop
        if first < self.stop:
            yield first, self.stop


@dataclass(frozen=True, slots=True)
class EncodeMetrics:
    """What an encode call cost, and which of its texts failed.

    Attributes:
        failed: one text of each group that has texts that end every worker, and each text that
            was refused.
    """

    costs: Costs = NO_COSTS
    workers: int = 1
    failed: tuple[FailedRow, ...] = ()

    def plus(self, later: EncodeMetrics) -> EncodeMetrics:
        """Return the metrics of two calls for one slot, of which `later` was the second."""
        costs = self.costs.plus(later.costs)
        return replace(later, costs=costs, failed=self.failed + later.failed)


@dataclass(slots=True, eq=False)
class EncodeCall:
    """One encode call: rows that are not assigned, the costs of the finished portions, and what its
    caller waits for.

    Only the dispatcher's thread changes it; `done` is set when `error` or the costs are final. Rows
    count from 0: where only some rows of the slot are encoded, they are places in `chosen`.

    Attributes:
        workers: of the pool.
        on_abandon: lets the dispatcher end the call.
        borders, chosen, holds_ids: `borders`, `rows` and `holds_ids` of `EncoderPool.submit`.
        weights_before: total weight of the rows before each row, int64 [rows + 1].
        finished_rows: how many rows have their vectors or have failed by now.
        started_at: when its first portion was assigned, or the call before it ended.
        ended_at: when the last of its portions that was answered ended.
        encoded: ranges of rows that have their vectors.
    """

    slot: Slot
    workers: int
    on_abandon: Callable[[EncodeCall], None]
    borders: np.ndarray | None = None
    chosen: np.ndarray | None = None
    holds_ids: bool = False
    rows: int = field(init=False)
    weights_before: np.ndarray = field(init=False)
    quarantine: Quarantine = field(init=False)
    next_row: int = 0
    finished_rows: int = 0
    replays: int = 0
    costs: Costs = NO_COSTS
    encoded: list[tuple[int, int]] = field(default_factory=list)
    started_at: float | None = None
    ended_at: float | None = None
    encode_seconds: float = 0.0
    abandoned: bool = False
    error: Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        offsets = self.slot.offsets
        borders = self.borders
        if self.chosen is None:
            self.rows = len(self.slot)
            self.weights_before = offsets + ROW_WEIGHT * np.arange(self.rows + 1)
        else:
            self.rows = len(self.chosen)
            self.slot.choose(self.chosen)
            self.weights_before = np.zeros(self.rows + 1, np.int64)
            np.cumsum(
                offsets[self.chosen + 1] - offsets[self.chosen] + ROW_WEIGHT,
                out=self.weights_before[1:],
            )
            borders = None if borders is None else np.searchsorted(self.chosen, borders)
        self.quarantine = Quarantine(borders, self.rows)

    def result(self, timeout_seconds: float | None = None) -> EncodeMetrics | None:
        """Wait for the end of the call, or raise what ended the pool; None after the timeout."""
        if not wait_in_turns(self.done.wait, timeout_seconds):
            return None
        if self.error is not None:
            # Each thread that raises it adds its traceback.
            raise copy.copy(self.error)
        return self.metrics

    def abandon(self) -> None:
        """End the call without encoding further rows, and wait until `encoded` is final.

        Workers finish the portions that they have after that; the slot cannot be used again before.
        """
        self.on_abandon(self)
        wait_in_turns(self.done.wait)

    @property
    def metrics(self) -> EncodeMetrics:
        costs = replace(
            self.costs,
            texts_computed=self.rows,
            encode_seconds=self.encode_seconds,
            replays=self.replays,
        )
        failed = self.quarantine.failed
        if self.chosen is not None:
            failed = [replace(one, row=int(self.chosen[one.row])) for one in failed]
        return EncodeMetrics(costs, self.workers, tuple(failed))

    # Everything below is called in the dispatcher's thread.

    def take(self, sizes: PortionSizes) -> Portion | None:
        """Return the next unassigned rows; None if there are none."""
        if self.next_row >= self.rows:
            return None
        start = self.next_row
        self.next_row = portion_end(self.weights_before, start, self.workers, sizes)
        return Portion(self, start, self.next_row)

    def take_quarantined(self) -> Portion | None:
        rows, skipped = self.quarantine.next()
        self.finished_rows += skipped
        return None if rows is None else Portion(self, rows.start, rows.stop, rows)

    def add(self, portion: Portion, costs: Costs, ended_at: float) -> None:
        """Count a portion that its worker finished at this time."""
        self.ended_at = max(ended_at, self.ended_at or ended_at)
        self.costs = self.costs.plus(costs)
        for start, stop in portion.unanswered():
            self._finish(start, stop)

    def add_part(
        self, portion: Portion, start: int, stop: int, tokens: int, reason: str = ""
    ) -> None:
        """Count texts of a portion that are answered before the others.

        Args:
            start, stop: in the portion.
            reason: why they have no vector; "" if they have.
        """
        start += portion.start
        stop += portion.start
        portion.answered.append((start, stop))
        self.costs = self.costs.plus(Costs(tokens=tokens, padded_tokens=tokens))
        self._finish(start, stop, reason)

    def _finish(self, start: int, stop: int, reason: str = "") -> None:
        """Count rows that have their vectors, or were refused for a reason."""
        self.finished_rows += stop - start
        if not reason:
            self.encoded.append((start, stop))
            return
        for row in range(start, stop):
            self.quarantine.refuse(row, reason)

    def lose(self, portion: Portion, reason: str, *, was_killed: bool = False) -> None:
        """Quarantine the unanswered rows of a portion whose worker was lost; see
        `Quarantine.narrow`."""
        if self.abandoned:
            return
        self.replays += 1
        # The answered texts of a quarantined group are not the cause; begin again with the others.
        if portion.quarantined is None or portion.answered:
            for start, stop in portion.unanswered():
                self.quarantine.add(start, stop)
        else:
            failed = self.quarantine.narrow(portion.quarantined, reason, was_killed=was_killed)
            self.finished_rows += failed

    def drop_rest(self) -> None:
        self.abandoned = True
        self.next_row = self.rows
        self.quarantine.clear()


class Schedule:
    """Chooses the next portion of each worker."""

    def __init__(self) -> None:
        self.calls: list[EncodeCall] = []

    def next_portion(
        self, *, idle: bool, is_queue: bool = False, most_texts: int | None = None
    ) -> Portion | None:
        """Return the next portion for a worker, or None.

        Args:
            idle: whether the worker has no portion.
            is_queue: whether it queues its portions on a GPU.
            most_texts: limit of its backend.

        A quarantined portion may kill its worker, so only an idle worker gets one: no other portion
        is lost with it.
        """
        sizes = QUEUED_PORTIONS if is_queue else PORTIONS
        if most_texts is not None:
            sizes = replace(sizes, texts=min(sizes.texts, most_texts))
        for call in list(self.calls):
            portion = None
            if idle and call.quarantine:
                portion = call.take_quarantined()
                self.end_if_finished(call)  # all quarantined rows may belong to failed groups
            portion = portion or call.take(sizes)
            if portion is not None:
                if call.started_at is None:
                    call.started_at = time.monotonic()
                return portion
        return None

    def end_if_finished(self, call: EncodeCall) -> None:
        if call.finished_rows >= call.rows:
            self.end(call)

    def end(self, call: EncodeCall, error: Exception | None = None) -> None:
        """Remove a call, set its `encode_seconds` and wake its caller.

        Time counts for one call only. Two calls that start at 0 s and end at 3 s and 5 s have 3 s
        and 2 s: the later one starts at the end of the earlier one. If the later one ends first, at
        2 s, the earlier one starts 2 s later. With several workers the ends may come in any order,
        so each call has at least the seconds that its own forward passes took.
        """
        if call not in self.calls:
            return  # ended or canceled before; its workers only finish their portions
        call.error = error
        place = self.calls.index(call)
        ended_at = call.ended_at or time.monotonic()
        if call.started_at is not None:
            call.encode_seconds = max(
                ended_at - call.started_at, call.costs.forward_seconds / call.workers
            )
            for earlier in self.calls[:place]:
                if earlier.started_at is not None:
                    earlier.started_at += call.encode_seconds
        for later in self.calls[place + 1 :]:
            if later.started_at is not None:
                later.started_at = max(later.started_at, ended_at)
        del self.calls[place]
        call.done.set()


def portion_end(weights_before: np.ndarray, start: int, workers: int, sizes: PortionSizes) -> int:
    """Return the end of the portion that begins at row `start`; weights as in `EncodeCall`."""
    weight: float = sizes.largest
    if workers > 1:
        rest = float(weights_before[-1] - weights_before[start])
        part = rest / (workers * PORTIONS_PER_WORKER)
        weight = max(sizes.smallest, min(weight, part))
    # the last row before which there is at most this weight
    most = weights_before[start] + weight
    stop = int(np.searchsorted(weights_before, most, side="right")) - 1
    return min(len(weights_before) - 1, start + sizes.texts, max(stop, start + 1))
