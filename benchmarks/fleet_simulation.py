"""A simulator of fleets: machines come, encode texts at a steady speed, one stretch after the
other, and are lost.

What a machine has published or staged stays when it is lost, and another machine comes in its
place.
"""

from __future__ import annotations

import heapq
import itertools
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Self

from benchmarks.fleet_costs import FleetCosts
from surge_dagster.catalogs.synthetic import MEAN_BYTES, partition_sizes
from surge_dagster.cluster.stretches import Stretch
from surge_dagster.engine.sources.partition import Partition, PartitionRange, RowBatch

_LEAST_SPEED, _SLOW_SPEED = 0.5, 0.5
_WAVE_SECONDS = 60.0
# a partition of more than a SuperBatch is staged SuperBatch by SuperBatch
STAGED_BYTES = 5_000 * MEAN_BYTES


@dataclass(frozen=True, slots=True)
class Faults:
    """What goes wrong.

    Attributes:
        spread: standard deviation of the machines' speeds, as a share of their mean.
        slow: share of machines at half speed.
        lost_per_hour: share of machines that are preempted in an hour.
        wave: share that is preempted within a minute, half way through the work.
        replaced_seconds: after which another machine is there.
        cold_seconds: what the first start on a machine takes longer, for the model and the program.
    """

    spread: float = 0.1
    slow: float = 0.02
    lost_per_hour: float = 0.1
    wave: float = 0.0
    replaced_seconds: float = 120.0
    cold_seconds: float = 60.0


class Catalog:
    """Partitions whose texts nobody reads; `of` gives them log-normal sizes.

    Attributes:
        partitions: by key.
        text_bytes: of all of them.
    """

    def __init__(self, partitions: Iterable[Partition]) -> None:
        self.partitions = {partition.key: partition for partition in partitions}
        self.text_bytes = sum(partition.text_bytes or 0 for partition in self.partitions.values())

    @classmethod
    def of(cls, texts: int, partitions: int, sigma: float, seed: int = 0) -> Self:
        sizes = partition_sizes(texts, partitions, sigma, seed).tolist()
        return cls(_partition(number, size) for number, size in enumerate(sizes))


def _partition(number: int, rows: int) -> Partition:
    def read(start: int = 0, stop: int = 0) -> Iterator[RowBatch]:
        raise AssertionError("nothing is read in a simulation")

    key = f"category-{number:06}"
    return Partition(
        key, "v1", read, lambda: "v1", rows=rows, text_bytes=rows * MEAN_BYTES, read_range=read
    )


Piece = str | PartitionRange  # what is published or staged as one


@dataclass(eq=False, slots=True)
class Machine:
    """One machine until it is lost. `speed` is in bytes of text per second."""

    slot: int
    speed: float
    is_new: bool = True
    is_lost: bool = False
    tasks: list[Task] = field(default_factory=list)
    encoding: Task | None = None
    weight: int = 0
    seconds: float = 0.0

    @property
    def name(self) -> str:
        return str(id(self))

    @property
    def bytes_per_second(self) -> float | None:
        return self.weight / self.seconds if self.seconds else None


@dataclass(eq=False, slots=True)
class Task:
    """A stretch that a machine has. Times are seconds of the simulation."""

    machine: Machine
    stretch: Stretch
    begun: float
    ready: float
    pieces: list[tuple[Piece, int]]
    encoding_since: float = 0.0
    waits: bool = True
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """`efficiency` is the work through what all machines could have done in `seconds`; `encoded`
    counts bytes twice that were encoded twice, `done` once."""

    seconds: float
    efficiency: float
    done_bytes: int
    encoded_bytes: float
    failed: int
    stretches: int
    lost: int


class Fleet(ABC):
    """Machines that encode, come and go; a subclass decides what they do.

    Args:
        speed: of a machine in the mean, in bytes of text per second.
    """

    def __init__(
        self,
        catalog: Catalog,
        machines: int,
        speed: float,
        costs: FleetCosts,
        faults: Faults,
        seed: int,
    ) -> None:
        self.catalog, self.count, self.costs, self.faults = catalog, machines, costs, faults
        self.now, self.listing = 0.0, 2 * costs.list_seconds(len(catalog.partitions))
        self.done, self.failed = set[str](), set[str]()
        self._staged = set[PartitionRange]()
        self._staged_rows = Counter[str]()
        self._staged_bytes = Counter[Piece]()  # of what is in work
        self._random = random.Random(seed)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._stored_at, self._stretches, self._lost, self._encoded = 0.0, 0, 0, 0.0
        self.speeds = [speed * self._relative_speed() for _ in range(machines)]
        self._machines = dict[int, Machine]()

    def _relative_speed(self) -> float:
        drawn = max(_LEAST_SPEED, self._random.gauss(1.0, self.faults.spread))
        return drawn * _SLOW_SPEED if self._random.random() < self.faults.slow else drawn

    def run(self) -> Outcome:
        """Simulate until all is done."""
        for slot in range(self.count):
            self.at(0.0, lambda slot=slot: self._come(slot))
        ideal = self.catalog.text_bytes / sum(self.speeds)
        for slot in self._random.sample(range(self.count), round(self.faults.wave * self.count)):
            moment = ideal / 2 + self._random.uniform(0, _WAVE_SECONDS)
            self.at(moment, lambda slot=slot: self._lose(self._machines.get(slot)))
        self.begin()
        while len(self.done) + len(self.failed) < len(self.catalog.partitions) or self.under_way():
            self.now, _, call = heapq.heappop(self._heap)
            call()
        seconds = max(self.now, self._stored_at)
        done = sum(self.catalog.partitions[key].text_bytes or 0 for key in self.done)
        efficiency = done / sum(self.speeds) / seconds
        return Outcome(
            seconds, efficiency, done, self._encoded, len(self.failed), self._stretches, self._lost
        )

    def at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (when, next(self._order), call))

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def under_way(self) -> bool: ...

    @abstractmethod
    def joined(self, machine: Machine) -> None: ...

    @abstractmethod
    def finished(self, task: Task) -> None: ...

    @abstractmethod
    def lost(self, machine: Machine, tasks: list[Task]) -> None: ...

    # Machines

    def _come(self, slot: int) -> None:
        machine = self._machines[slot] = Machine(slot, self.speeds[slot])
        if self.faults.lost_per_hour:
            life = self._random.expovariate(self.faults.lost_per_hour / 3600)
            self.at(self.now + life, lambda: self._lose(machine))
        self.joined(machine)

    def _lose(self, machine: Machine | None) -> None:
        if machine is None or machine.is_lost:
            return
        self._lost += 1
        machine.is_lost = True
        del self._machines[machine.slot]
        tasks = list(machine.tasks)
        for task in tasks:
            self.end(task)
        self.at(self.now + self.faults.replaced_seconds, lambda: self._come(machine.slot))
        self.lost(machine, tasks)

    # Their work

    def give(self, machine: Machine, stretch: Stretch, start_seconds: float) -> Task:
        """Let a machine do a stretch after those that it has; it begins to read, or to start, now."""
        edge = self.costs.stretch_seconds / 2
        task = Task(
            machine, stretch, self.now, self.now + start_seconds + edge, self._pieces(stretch)
        )
        machine.tasks.append(task)
        self._stretches += 1
        self._encode_next(machine)
        return task

    def _pieces(self, stretch: Stretch) -> list[tuple[Piece, int]]:
        pieces: Iterable[Piece] = stretch.ranges or stretch.keys
        left = [piece for piece in pieces if piece not in self.done and piece not in self._staged]
        return [(piece, self._whole_bytes(piece) - self._staged_bytes[piece]) for piece in left]

    def _whole_bytes(self, piece: Piece) -> int:
        if isinstance(piece, str):
            return self.catalog.partitions[piece].text_bytes or 0
        return (piece.stop - piece.start) * MEAN_BYTES

    def _encode_next(self, machine: Machine) -> None:
        task = next((task for task in machine.tasks if task.waits), None)
        if machine.encoding is not None or task is None:
            return
        machine.encoding, task.waits = task, False
        task.encoding_since = max(self.now, task.ready)
        seconds = sum(size for _, size in task.pieces) / machine.speed
        seconds = max(seconds, len(task.pieces) * self.costs.file_seconds)
        self.at(task.encoding_since + seconds, lambda: self._encoded_all(task))

    def _encoded_all(self, task: Task) -> None:
        if task.is_over:
            return
        self._encoded += sum(size for _, size in task.pieces)
        task.machine.encoding = None
        self._encode_next(task.machine)
        self.at(self.now + self.costs.stretch_seconds / 2, lambda: self._published_all(task))

    def _published_all(self, task: Task) -> None:
        if task.is_over:
            return
        self._publish(task.pieces)
        key = task.stretch.keys[0]
        rows = self.catalog.partitions[key].rows or 0
        if task.stretch.ranges and key not in self.done and self._staged_rows[key] == rows:
            self.at(self.now + rows * self.costs.row_seconds, lambda: self._assembled(task))
        else:
            self._finish(task)

    def _assembled(self, task: Task) -> None:
        if not task.is_over:
            self.done.add(task.stretch.keys[0])
            self._finish(task)

    def _finish(self, task: Task) -> None:
        machine = task.machine
        # A stretch that waits behind another one is not slow.
        begun = max(task.begun, task.encoding_since - self.costs.stretch_seconds / 2)
        machine.seconds += self.now - begun
        machine.weight += task.stretch.weight
        self.end(task)
        self.finished(task)

    def end(self, task: Task) -> None:
        """Take a task from its machine; what it has published by now stays."""
        if task.is_over:
            return
        machine = task.machine
        self._encoded += self.note_progress(task)
        task.is_over = True
        machine.tasks.remove(task)
        if machine.encoding is task:
            machine.encoding = None
            if not machine.is_lost:
                self._encode_next(machine)

    def note_progress(self, task: Task) -> float:
        """Enter what a task has published and staged by now; gives the bytes that it has encoded."""
        if task.machine.encoding is not task:
            return 0.0
        left = encoded = max(0.0, self.now - task.encoding_since) * task.machine.speed
        for piece, size in task.pieces:
            if size > left:
                before = self._whole_bytes(piece) - size
                now = before + int(left // STAGED_BYTES) * STAGED_BYTES
                self._staged_bytes[piece] = max(now, self._staged_bytes[piece])
                break
            left -= size
            self._publish([(piece, size)])
        return encoded

    def _publish(self, pieces: list[tuple[Piece, int]]) -> None:
        for piece, _ in pieces:
            if isinstance(piece, str):
                self.done.add(piece)
            elif piece not in self._staged:
                self._staged.add(piece)
                self._staged_rows[piece.key] += piece.stop - piece.start

    def store_events(self, partitions: int, writers: int) -> float:
        """When the events of so many partitions are stored: one database stores those of all runs."""
        self._stored_at = max(self._stored_at, self.now) + partitions * self.costs.event_seconds(
            writers
        )
        return self._stored_at
