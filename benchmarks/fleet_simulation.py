"""A simulator of fleets: time is simulated, and who gets what is decided by the product's own code.

`RayWay` hands out what `Stretches` cuts, `ShardWay` what `cut` does. A machine encodes texts at a steady speed, one
stretch after the other; what it has published stays when it is lost, and another machine comes in its place.
"""

from __future__ import annotations

import heapq
import itertools
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Self

from benchmarks.fleet_costs import FleetCosts
from surge_dagster.catalogs.synthetic import MEAN_BYTES, partition_sizes
from surge_dagster.cluster.stretches import Stretch, Stretches, oldest_copy
from surge_dagster.engine.plan.ranges import divide
from surge_dagster.engine.sources.partition import Partition, PartitionRange, RowBatch
from surge_dagster.orchestration import shards

SENSOR_SECONDS = 5.0  # of `lost_runs`
SILENT_SECONDS = 300.0  # after which a run whose heartbeat stands still is declared lost
NOTICED_SECONDS = 13.0  # after which Ray has noticed a lost host, as measured with killed hosts
LOOK_SECONDS = 1.0  # between two looks of a driver whose machines are idle
_LEAST_SPEED, _SLOW_SPEED = 0.5, 0.5
_WAVE_SECONDS = 60.0
_START_SPREAD = 0.9, 1.1  # by which starts of a cluster's machines differ
_STAGED_BYTES = 5_000 * MEAN_BYTES  # a partition of more than a SuperBatch is staged SuperBatch by SuperBatch


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
    return Partition(key, "v1", read, lambda: "v1", rows=rows, text_bytes=rows * MEAN_BYTES, read_range=read)


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
    """`efficiency` is the work through what all machines could have done in `seconds`; `encoded` counts bytes twice
    that were encoded twice, `done` once."""

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
        self, catalog: Catalog, machines: int, speed: float, costs: FleetCosts, faults: Faults, seed: int
    ) -> None:
        self.catalog, self.count, self.costs, self.faults = catalog, machines, costs, faults
        self.now, self.listing = 0.0, 2 * costs.list_seconds(len(catalog.partitions))
        self.done, self.failed = set[str](), set[str]()
        self._staged = set[PartitionRange]()
        self._staged_rows = Counter[str]()
        self._staged_bytes = Counter[str]()  # of partitions that are in work as a whole
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
        return Outcome(seconds, efficiency, done, self._encoded, len(self.failed), self._stretches, self._lost)

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
        task = Task(machine, stretch, self.now, self.now + start_seconds + edge, self._pieces(stretch))
        machine.tasks.append(task)
        self._stretches += 1
        self._encode_next(machine)
        return task

    def _pieces(self, stretch: Stretch) -> list[tuple[Piece, int]]:
        partitions = self.catalog.partitions
        if stretch.ranges:
            left = [part for part in stretch.ranges if part not in self._staged]
            return [(part, (part.stop - part.start) * MEAN_BYTES) for part in left]
        sizes = ((key, (partitions[key].text_bytes or 0) - self._staged_bytes[key]) for key in stretch.keys)
        return [(key, size) for key, size in sizes if key not in self.done]

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
        machine.weight += 0 if task.stretch.is_done else task.stretch.weight
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
                if isinstance(piece, str):
                    whole, staged = self.catalog.partitions[piece].text_bytes or 0, int(left // _STAGED_BYTES)
                    now = whole - size + staged * _STAGED_BYTES
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
        self._stored_at = max(self._stored_at, self.now) + partitions * self.costs.event_seconds(writers)
        return self._stored_at


class RayWay(Fleet):
    """One run that hands stretches to machines, `held` at a time to each."""

    def __init__(self, *parameters: object, held: int, **options: object) -> None:
        super().__init__(*parameters, **options)  # pyright: ignore[reportArgumentType]
        self._held = held
        self._left = Stretches(self.catalog.partitions.values(), at_once=held)
        self._under: dict[Stretch, list[Task]] = {}
        self._free: dict[Machine, None] = {}
        self._ready = set[Machine]()
        self._driver_free_at, self._looks_at = 0.0, 0.0

    def begin(self) -> None:
        self._driver_free_at = self.listing

    def under_way(self) -> bool:
        return bool(self._under)

    def joined(self, machine: Machine) -> None:
        start = (self.faults.cold_seconds + self.costs.pool_seconds) * self._random.uniform(*_START_SPREAD)
        self.at(max(self.now, self.listing) + start, lambda: self._welcome(machine))

    def _welcome(self, machine: Machine) -> None:
        if not machine.is_lost:
            self._ready.add(machine)
            self._free[machine] = None
            self._look_again()

    def finished(self, task: Task) -> None:
        self._driver_free_at = max(self._driver_free_at, self.now) + self.costs.driver_seconds(self.count)
        self.at(self._driver_free_at, lambda: self._take(task))

    def _take(self, task: Task) -> None:
        stretch = task.stretch
        self._leave(task)
        if not stretch.is_done:
            stretch.is_done = True
            for other in self._under.get(stretch, [])[:]:
                if not other.is_over:  # else its end is being told
                    self.end(other)
                    self._leave(other)
            if stretch.ranges and stretch.keys[0] not in self.done:
                self._left.end_range(stretch.keys[0])
            else:
                for key in stretch.keys if stretch.ranges else ():
                    self._left.drop(key)
                self.store_events(len(stretch.keys), 1)
        self._hand_out()

    def _leave(self, task: Task) -> None:
        self._under[task.stretch].remove(task)
        if not self._under[task.stretch]:
            del self._under[task.stretch]
        self._make_free(task.machine)

    def _make_free(self, machine: Machine) -> None:
        if not machine.is_lost:
            self._free[machine] = None

    def lost(self, machine: Machine, tasks: list[Task]) -> None:
        self._ready.discard(machine)
        self._free.pop(machine, None)
        self.at(self.now + NOTICED_SECONDS, lambda: self._put_back(tasks))

    def _put_back(self, tasks: list[Task]) -> None:
        for task in tasks:
            stretch = task.stretch
            self._leave(task)
            if stretch.is_done or stretch in self._under or self.done.issuperset(stretch.keys):
                continue
            if key := self._left.put_back(stretch, task.machine.name, is_innocent=True):
                self.failed.add(key)
        self._hand_out()

    def _hand_out(self) -> None:
        for machine in list(self._free):
            while (held := self._holds(machine)) < self._held:
                stretch, again = self._next(machine, held), False
                if stretch is None and not machine.tasks and self._looks_at <= self.now:
                    stretch, again = self._copy(), True
                if stretch is None:
                    break
                lists = (1.0 if machine.is_new else 0.5 if again or stretch.blame else 0.0) * self.listing
                machine.is_new = False
                self._under.setdefault(stretch, []).append(self.give(machine, stretch, lists))
            if self._holds(machine) >= self._held:
                del self._free[machine]
            elif not machine.tasks:  # nor is there anything for the others
                if self._under:
                    self._look_again()
                return

    def _next(self, machine: Machine, held: int) -> Stretch | None:
        return self._left.next(machine.bytes_per_second, len(self._ready), held, machine=machine.name)

    def _holds(self, machine: Machine) -> int:
        return sum(self._held if task.stretch.is_suspect else 1 for task in machine.tasks)

    def _copy(self) -> Stretch | None:
        tasks = itertools.chain.from_iterable(self._under.values())
        stretch = oldest_copy([(task.stretch, self.now - task.begun) for task in tasks])
        for task in self._under.get(stretch, []) if stretch else ():
            self.note_progress(task)
        return stretch

    def _look_again(self) -> None:
        if self._looks_at <= self.now:
            self._looks_at = self.now + LOOK_SECONDS
            self.at(self._looks_at, self._hand_out)


class ShardWay(Fleet):
    """Dagster runs of the stretches that `cut` makes, each a process that some machine starts."""

    def begin(self) -> None:
        self._queue: list[tuple[int, Stretch]] = []  # by priority
        self._waiting = dict[Task, int]()
        self._slots, self._active = self.count, 0
        speed = fmean(self.speeds)
        keys = list(self.catalog.partitions)
        for number, shard in enumerate(shards.cut(keys, self.catalog.partitions, self.count, round(60 * speed))):
            run = number, Stretch(tuple(shard.keys), shard.weight, ranges=self._ranges(shard))
            self.at(self.listing + (number + 1) * self.costs.enqueue_seconds, lambda run=run: self._enqueue(run))
        self.at(self.costs.dequeue_seconds, self._dequeue)

    def _ranges(self, shard: shards.Stretch) -> tuple[PartitionRange, ...]:
        if shard.part is None:
            return ()
        number, count, _ = shard.part
        return tuple(divide(self.catalog.partitions[shard.keys[0]], count)[number - 1 : number])

    def under_way(self) -> bool:
        return False

    def joined(self, machine: Machine) -> None:
        pass  # the queue finds it

    def _enqueue(self, run: tuple[int, Stretch]) -> None:
        heapq.heappush(self._queue, run)

    def _dequeue(self) -> None:
        idle = [machine for machine in self._machines.values() if not machine.tasks]
        count = min(len(idle), self._slots, len(self._queue))
        for number, machine in enumerate(idle[:count], 1):
            self._slots -= 1
            run = heapq.heappop(self._queue)
            self.at(self.now + number * self.costs.launch_seconds, lambda m=machine, r=run: self._launch(m, r))
        self.at(self.now + max(self.costs.dequeue_seconds, count * self.costs.launch_seconds), self._dequeue)

    def _launch(self, machine: Machine, run: tuple[int, Stretch]) -> None:
        number, stretch = run
        if machine.is_lost:  # the launcher starts it on another one
            self._slots += 1
            self._enqueue(run)
            return
        cold = self.faults.cold_seconds if machine.is_new else 0.0
        machine.is_new = False
        task = self.give(machine, stretch, cold + self.costs.run_seconds + self.costs.pool_seconds + self.listing)
        self._waiting[task] = number

    def finished(self, task: Task) -> None:
        del self._waiting[task]
        for part in task.stretch.ranges:
            if self._staged_rows[part.key] == self.catalog.partitions[part.key].rows:
                self.done.add(part.key)
        self.at(self.store_events(len(task.stretch.keys), self.count), self._end_run)

    def _end_run(self) -> None:
        self._slots += 1

    def lost(self, machine: Machine, tasks: list[Task]) -> None:
        for task in tasks:
            run = self._waiting.pop(task), task.stretch
            self.at(self.now + SILENT_SECONDS + SENSOR_SECONDS, lambda run=run: self._launch_again(run))

    def _launch_again(self, run: tuple[int, Stretch]) -> None:
        self._slots += 1
        self._enqueue(run)


WAYS: Mapping[str, type[Fleet]] = {"shards": ShardWay, "ray": RayWay}
