"""Who gets what in a simulated fleet, decided by the product's own code, `Stretches`."""

from __future__ import annotations

from benchmarks.fleet_simulation import Fleet, Machine, Task
from surge_dagster.cluster.stretches import Stretches

NOTICED_SECONDS = 13.0  # after which Ray has noticed a lost host, as measured with killed hosts
LOOK_SECONDS = 1.0  # between two looks of a driver whose machines are idle
_START_SPREAD = 0.9, 1.1  # by which starts of a cluster's machines differ


class RayWay(Fleet):
    """One run that hands stretches to machines, `held` at a time to each."""

    def __init__(self, *parameters: object, held: int, **options: object) -> None:
        super().__init__(*parameters, **options)  # pyright: ignore[reportArgumentType]
        self._held = held
        self._left = Stretches(self.catalog.partitions.values(), at_once=held)
        self._under: dict[Task, None] = {}
        self._free: dict[Machine, None] = {}
        self._ready = set[Machine]()
        self._driver_free_at, self._looks_at = 0.0, 0.0

    def begin(self) -> None:
        self._driver_free_at = self.listing

    def under_way(self) -> bool:
        return bool(self._under)

    def joined(self, machine: Machine) -> None:
        start = (self.faults.cold_seconds + self.costs.pool_seconds) * self._random.uniform(
            *_START_SPREAD
        )
        self.at(max(self.now, self.listing) + start, lambda: self._welcome(machine))

    def _welcome(self, machine: Machine) -> None:
        if not machine.is_lost:
            self._ready.add(machine)
            self._free[machine] = None
            self._look_again()

    def finished(self, task: Task) -> None:
        self._driver_free_at = max(self._driver_free_at, self.now) + self.costs.driver_seconds(
            self.count
        )
        self.at(self._driver_free_at, lambda: self._take(task))

    def _take(self, task: Task) -> None:
        stretch = task.stretch
        self._leave(task)
        if stretch.ranges and stretch.keys[0] not in self.done:
            self._left.end_range(stretch.keys[0])
        else:
            for key in stretch.keys if stretch.ranges else ():
                self._left.drop(key)
            self.store_events(len(stretch.keys), 1)
        self._hand_out()

    def _leave(self, task: Task) -> None:
        del self._under[task]
        if not task.machine.is_lost:
            self._free[task.machine] = None

    def lost(self, machine: Machine, tasks: list[Task]) -> None:
        self._ready.discard(machine)
        self._free.pop(machine, None)
        self.at(self.now + NOTICED_SECONDS, lambda: self._put_back(tasks))

    def _put_back(self, tasks: list[Task]) -> None:
        for task in tasks:
            stretch = task.stretch
            self._leave(task)
            if self.done.issuperset(stretch.keys):
                continue
            if not self._left.put_back_lost(stretch):
                for key in stretch.keys:
                    self._left.drop(key)
                self.failed.update(set(stretch.keys) - self.done)
        self._hand_out()

    def _hand_out(self) -> None:
        for machine in list(self._free):
            while (held := self._holds(machine)) < self._held:
                stretch = self._left.next(machine.bytes_per_second, len(self._ready), held)
                if stretch is None:
                    break
                lists = 0.0
                if machine.is_new:
                    lists = self.listing
                elif stretch.is_again:
                    lists = 0.5 * self.listing
                machine.is_new = False
                self._under[self.give(machine, stretch, lists)] = None
            if self._holds(machine) >= self._held:
                del self._free[machine]
            elif not machine.tasks:  # nor is there anything for the others
                if self._under:
                    self._look_again()
                return

    def _holds(self, machine: Machine) -> int:
        return sum(self._held if task.stretch.losses else 1 for task in machine.tasks)

    def _look_again(self) -> None:
        if self._looks_at <= self.now:
            self._looks_at = self.now + LOOK_SECONDS
            self.at(self._looks_at, self._hand_out)
