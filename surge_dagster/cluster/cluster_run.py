"""A run over the machines of a cluster, with the events, the report and the guarantees of a run on one.

The driver lists the source and decides what is due. Machines get stretches of it until none is left, two at a time, and
what they send back are the events of their runs. A machine that is lost gives its stretches back; what it had published
is found by the next machine that has them.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from surge_dagster.cluster.machine import STRETCHES_AT_ONCE, CatalogRuns, MachineFacts, StretchOutcome, listed_outputs
from surge_dagster.cluster.machine_work import IN_VAIN, MachineWork, require_shared
from surge_dagster.cluster.stretches import STUCK_SECONDS, Stretch, Stretches, oldest_copy
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import Cancelled, ConfigError, SurgeError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.run.deciding import decide
from surge_dagster.engine.run.report import Event, Failure, Receipt, RunReport, SuperBatchReport
from surge_dagster.engine.sources.partition import Partition, PartitionRange
from surge_dagster.engine.support.counts import counted
from surge_dagster.engine.support.process_memory import MemoryGauge
from surge_dagster.engine.support.waiting import StopSignal

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_MOST_TRIES = 3  # of a partition, on machines that have done nothing yet
_MOST_REFUSED = 10  # machines, before one has done anything
_COPIES_SECONDS = 5.0  # for machines to say what they did of stretches that others have done meanwhile
T = TypeVar("T")


class MachineLost(SurgeError):
    """The machine, its process, or its encoder pool ended under a stretch.

    Attributes:
        is_innocent: the stretch is not the cause: the whole host was lost, or the store did not answer.
    """

    def __init__(self, reason: str, *, is_innocent: bool = False) -> None:
        super().__init__(reason)
        self.is_innocent = is_innocent


class Cluster(Protocol[T]):
    """Machines that come and go, and a task for each stretch that one of them has; `T` is such a task."""

    def machines(self) -> dict[str, MachineFacts]:
        """Those that can encode now, by name; others are started meanwhile."""
        ...

    def request(self, machines: int) -> None:
        """Say how many could be used, so that whoever starts and ends machines can do it."""
        ...

    def embed(self, machine: str, stretch: Stretch, *, again: bool) -> T: ...

    def wait(self, tasks: Sequence[T], seconds: float) -> list[T]:
        """Those that are done, after the first of them or so many seconds."""
        ...

    def result(self, task: T) -> StretchOutcome:
        """Raises `MachineLost`, or the error that ended the stretch."""
        ...

    def stop(self, task: T) -> None:
        """Ask for the end of a stretch."""
        ...

    def refuse(self, machine: str) -> None:
        """Use a machine no more."""
        ...

    def is_starting(self) -> bool:
        """Whether a machine is being started."""
        ...

    def close(self) -> None:
        """End all machines' processes that this run started."""
        ...


@dataclass(frozen=True, slots=True)
class _Under:
    """A stretch under way, and when it began, in seconds since the run did."""

    machine: str
    stretch: Stretch
    begun: float


class ClusterRun(Generic[T]):
    """See `EmbeddingRun`, whose methods and attributes these are.

    Args:
        partitions: all of the source, or those that are wanted.
        runs: makes the runs of machines.
        pool: gives the space; it is not started.
        connect: to the machines, which it does where something is due.
        warn: takes a line about each machine that is lost.

    Attributes:
        work: by machine.
    """

    in_flight = None

    def __init__(
        self,
        partitions: Iterable[Partition],
        runs: CatalogRuns,
        pool: EncoderPool,
        connect: Callable[[], Cluster[T]],
        *,
        force: bool,
        grace_seconds: float,
        warn: Callable[[str], None] = log.warning,
    ) -> None:
        self.report, self.published = RunReport(), set[str]()
        self.preparing = "the files of the output are being compared with the source"
        self.work: dict[str, MachineWork] = {}
        self._partitions, self._connect, self._force = list(partitions), connect, force
        self._stop, self._warn, self._runs = StopSignal(grace_seconds), warn, runs
        self._local = runs.new_run(self._partitions, pool)
        self._begun = time.perf_counter()
        self._under: dict[T, _Under] = {}
        self._told = set[str]()  # keys of due partitions that have a receipt or a failure
        self._tries = Counter[tuple[str, tuple[PartitionRange, ...]]]()  # of what failed, and was put back
        self._refusals: dict[str, ConfigError] = {}  # by machine, which is used no more

    @property
    def space(self) -> Space:
        return self._local.space

    @property
    def failed(self) -> bool:
        return bool(self.report.partitions_failed)

    @property
    def stopped(self) -> bool:
        return self._stop.requested_at is not None

    def stop(self) -> None:
        self._stop.request()

    def __iter__(self) -> Iterator[Receipt]:
        with contextlib.closing(self.events()) as events:
            for event in events:
                if isinstance(event, Receipt) and event.action != "fresh":
                    yield event

    def events(self) -> Generator[Event]:
        """As `EmbeddingRun.events`. A lost machine's stretch is done again, by another one."""
        gauge = MemoryGauge()
        try:
            with gauge:
                outputs = listed_outputs(self._runs, self._local)
                due, fresh_keys = list[Partition](), set[str]()
                with contextlib.suppress(Cancelled):
                    for decision in decide(self._partitions, outputs, self._stop, force=self._force):
                        if isinstance(decision, Receipt):
                            fresh_keys.add(decision.key)
                        if isinstance(decision, Receipt | Failure):
                            yield self._counted(decision)
                        else:
                            due.append(decision.source)
                if self.stopped:
                    return
                self._local.keep_tidy(fresh_keys)
                if due:
                    self.preparing = "the machines are starting"
                    with contextlib.closing(self._connect()) as cluster:
                        left = Stretches(due, divides=not self._force, at_once=STRETCHES_AT_ONCE)
                        yield from self._embed(cluster, left)
        finally:
            self.report.peak_rss_bytes = gauge.peak_bytes
            self.report.wall_seconds = self._now()
            self.report.run_seconds = self.report.wall_seconds

    def _embed(self, cluster: Cluster[T], left: Stretches) -> Generator[Event]:
        try:
            while (left or self._is_undone()) and not self._stop.stopping.is_set():
                self._hand_out(cluster, left)
                for task in cluster.wait(list(self._under), _LOOK_SECONDS):
                    yield from self._take(cluster, task, left)
            yield from self._last_events(cluster, left)
        finally:
            for _ in self._last_events(cluster, left):
                pass  # nobody takes them any longer; what they tell of is published

    def _now(self) -> float:
        return time.perf_counter() - self._begun

    def _last_events(self, cluster: Cluster[T], left: Stretches) -> Iterator[Event]:
        """Ends what is under way."""
        for task, under in self._under.items():
            if not under.stretch.is_done:
                cluster.stop(task)
        grace = self._stop.grace_seconds
        # Whose link is down is not known as lost for a minute.
        deadline = time.monotonic() + (grace if self._is_undone() else min(grace, _COPIES_SECONDS))
        while self._under and time.monotonic() < deadline:
            for task in cluster.wait(list(self._under), _LOOK_SECONDS):
                try:
                    yield from self._take(cluster, task, left)
                except SurgeError as error:  # of several machines, after the first one ended the run
                    self._warn(str(error))
        self._under.clear()

    def _is_undone(self) -> bool:
        """Whether something is under way that no other machine has done."""
        return not all(under.stretch.is_done for under in self._under.values())

    def _hand_out(self, cluster: Cluster[T], left: Stretches) -> None:
        machines = cluster.machines()
        if self._refusals and not machines and not cluster.is_starting() and not self._has_worked():
            raise next(iter(self._refusals.values()))
        if machines and not self.work and not self._local.space_is_known:
            self._local.begin_space()  # which is refused before any machine has written
        for name in machines.keys() - self.work.keys():
            self.work[name] = MachineWork(machines[name])
            self.report.machines = len(self.work)
            self._describe(machines[name])
        if speeds := [speed for work in self.work.values() if (speed := work.bytes_per_second)]:  # also of lost ones
            cluster.request(max(1, len(machines), left.machines_wanted(sum(speeds) / len(speeds))))
        elif not machines:
            cluster.request(1)
        now = self._now()
        machines = {name: machines[name] for name in machines if not self.work[name].is_useless(now)} or machines
        held = Counter[str]()
        for under in self._under.values():
            held[under.machine] += _share_of(under.stretch)
        at_work = {under.machine for under in self._under.values() if not under.stretch.is_done}
        # Others are stuck with what copies have done, and keep nobody from a stretch.
        able = max(1, sum(not held[name] or name in at_work for name in machines))
        for count, name in [(count, name) for count in range(STRETCHES_AT_ONCE) for name in machines]:
            if held[name] == count and (stretch := self._next(name, count, able, left)) is not None:
                again = stretch.blame > 0 or any(under.stretch is stretch for under in self._under.values())
                task = cluster.embed(name, stretch, again=again)
                self._under[task] = _Under(name, stretch, now)
                held[name] += _share_of(stretch)
        self.preparing = f"{counted(sum(map(bool, held.values())), 'machine')} at work"

    def _next(self, name: str, held: int, machines: int, left: Stretches) -> Stretch | None:
        """The next stretch of a machine that has so many."""
        stretch = left.next(self.work[name].bytes_per_second, machines, held, machine=name)
        if stretch is None and not held and not self._force:  # a forced copy removes what the other one has staged
            now = self._now()
            running = [(under.stretch, now - under.begun) for under in self._under.values()]
            return oldest_copy(running, name, machines)
        return stretch

    def _take(self, cluster: Cluster[T], task: T, left: Stretches) -> Iterator[Event]:
        """What has become of a stretch."""
        under = self._under.pop(task)
        copies = [other for other, running in self._under.items() if running.stretch is under.stretch]
        try:
            outcome = self._outcome(cluster, under.machine, task)
        except MachineLost as lost:
            self.work[under.machine].lost_at.append(self._now())
            what = f"{lost}; {counted(len(under.stretch.keys), 'partition')}"
            if under.stretch.is_done or copies or self._told.issuperset(under.stretch.keys):
                self._warn(f"{what} {'left to' if copies and not under.stretch.is_done else 'done by'} another machine")
                return
            key = left.put_back(under.stretch, under.machine, is_innocent=lost.is_innocent)
            then = "given up" if key else "left for the next run" if self.stopped else "done again"
            self._warn(f"{what} {then}")
            if key:
                reason = f"{key!r}: machines were lost with it again and again, at last so: {lost}. Correct the cause, "
                yield from self._new([Failure(key, f"{reason}then run again.", in_source=False)], left)
            return
        stretch, work = under.stretch, self.work[under.machine]
        work.was_at_work(under.begun, self._now())
        work.texts += sum(event.texts for event in outcome.events if isinstance(event, SuperBatchReport))
        failures = {event.key: event for event in outcome.events if isinstance(event, Failure)}
        is_sound = not failures or any(isinstance(event, Receipt) for event in outcome.events)
        work.in_vain += not is_sound
        if not is_sound and any(self._now() - self._under[copy].begun < STUCK_SECONDS for copy in copies):
            stretch.lost_on |= {under.machine}  # the other machine decides
            return
        again = {failure.key for failure in failures.values() if self._tries_again(failure, under, left)}
        if again and not is_sound and not work.weight and work.in_vain == IN_VAIN:
            reason = next(iter(failures.values())).reason
            self._warn(f"the machine {work.facts.host} has done nothing, and other machines try its work: {reason}")
        events = [event for event in outcome.events if not (isinstance(event, Failure) and event.key in again)]
        yield from self._new(events, left)
        if stretch.is_done:
            return
        stretch.is_done = True
        for copy in copies:
            cluster.stop(copy)
        work.stretches, work.weight = work.stretches + 1, work.weight + is_sound * stretch.weight
        untold = tuple(key for key in stretch.keys if key not in self._told)
        if untold and stretch.ranges and not outcome.stopped and len(events) == len(outcome.events):
            left.end_range(untold[0])

    def _outcome(self, cluster: Cluster[T], machine: str, task: T) -> StretchOutcome:
        """What a stretch came to; a machine whose settings are wrong is lost, and others do its work if they can."""
        work = self.work[machine]
        try:
            outcome = cluster.result(task)
            receipt = next((event for event in outcome.events if isinstance(event, Receipt)), None)
            if receipt is not None and not work.has_published:
                require_shared(work.facts.host, receipt)
                work.has_published = True
        except ConfigError as error:
            self._refusals[machine] = error
            if len(self._refusals) >= _MOST_REFUSED and not self._has_worked():
                raise
            cluster.refuse(machine)
            raise MachineLost(f"the machine {work.facts.host} is used no more: {error}", is_innocent=True) from None
        return outcome

    def _has_worked(self) -> bool:
        """Whether a machine has done something, so that the settings are not wrong for all of them."""
        return any(work.weight for name, work in self.work.items() if name not in self._refusals)

    def _tries_again(self, failure: Failure, under: _Under, left: Stretches) -> bool:
        """Whether a partition is tried once more, or was done by another machine.

        It may have failed for a cause that passes, such as a machine that staged the same rows while this one read
        them, or on a machine that can do nothing.
        """
        if self._stop.stopping.is_set():
            return False
        may_be_the_machine = len(self.work) > 1 and not self.work[under.machine].weight
        most = _MOST_TRIES if may_be_the_machine else int(failure.transient)
        if most and under.stretch.is_done:
            return True
        tried = failure.key, under.stretch.ranges
        if failure.key in self._told or self._tries[tried] >= most:
            return False
        self._tries[tried] += 1
        left.put_back_one(under.stretch, failure.key, under.machine)
        return True

    def _new(self, events: Iterable[Event], left: Stretches) -> Iterator[Event]:
        """Those that nobody has told of; a fresh partition was published by a machine that could not say so."""
        for event in events:
            if isinstance(event, SuperBatchReport):
                yield self._counted(replace(event, index=self.report.superbatches))
            elif event.key not in self._told:
                self._told.add(event.key)
                left.drop(event.key)
                is_fresh = isinstance(event, Receipt) and event.action == "fresh"
                yield self._counted(replace(event, action="encoded") if is_fresh else event)

    def _counted(self, event: Event) -> Event:
        if isinstance(event, Receipt) and event.action != "fresh":
            self.published.add(event.key)
        self.report.count(event, self._now())
        return event

    def _describe(self, facts: MachineFacts) -> None:
        report, space = self.report, self.space
        report.space, report.space_title, report.dimension = space.name, space.title, space.dimension
        report.device, report.hardware, report.precision = facts.device, facts.hardware, facts.precision
        report.workers = sum(work.facts.workers for work in self.work.values())
        log.info("%s encodes: %s, %s", facts.host, facts.device, counted(facts.workers, "worker"))


def _share_of(stretch: Stretch) -> int:
    """How many of a machine's stretches it counts as."""
    return STRETCHES_AT_ONCE if stretch.is_suspect else 1
