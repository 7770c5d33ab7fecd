"""Runs over the machines of a cluster, with the events, report and guarantees of a run on one.

The driver lists the source and decides what is due. Machines get stretches of it, two at a time,
and send back the events of their runs. The stretches of a lost machine go back into the queue; the
next machine that has them finds what was published. A stretch that is lost three times fails its
partitions by name.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from surge_dagster.cluster.machine import (
    STRETCHES_AT_ONCE,
    CatalogRuns,
    MachineFacts,
    StretchOutcome,
    listed_outputs,
)
from surge_dagster.cluster.machine_work import MachineWork, require_shared
from surge_dagster.cluster.stretches import Stretch, Stretches
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import Cancelled, SurgeError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.run.deciding import decide
from surge_dagster.engine.run.report import (
    Event,
    Failure,
    OldVectorSample,
    Receipt,
    RunReport,
    SuperBatchReport,
)
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.support.counts import counted
from surge_dagster.engine.support.process_memory import MemoryGauge
from surge_dagster.engine.support.waiting import StopSignal

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_MOST_FAILURES = 2  # of the first stretches of a machine
T = TypeVar("T")


class MachineLost(SurgeError):
    """The machine, its process, or its encoder pool ended under a stretch."""


class Cluster(Protocol[T]):
    """Machines that come and go, and a task for each stretch that one of them has; `T` is such a
    task."""

    def machines(self) -> dict[str, MachineFacts]:
        """Those that can encode now, by name; others are started meanwhile."""
        ...

    def request(self, machines: int) -> None:
        """Say how many could be used, so that whoever starts and ends machines can do it."""
        ...

    def embed(self, machine: str, stretch: Stretch) -> T: ...

    def wait(self, tasks: Sequence[T], seconds: float) -> list[T]:
        """Those that are done, after the first of them or so many seconds."""
        ...

    def result(self, task: T) -> StretchOutcome:
        """Return what a stretch came to.

        Raises:
            MachineLost: the machine could not finish it.
            Exception: the error that ended the stretch on the machine.
        """
        ...

    def stop(self, task: T) -> None:
        """Ask for the end of a stretch."""
        ...

    def leave_out(self, machine: str) -> None:
        """End a machine's process, and do not use the machine again."""
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
        self._left_out = set[str]()  # machines
        self._versions = {partition.key: partition.source_version for partition in self._partitions}

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
                    for decision in decide(
                        self._partitions, outputs, self._stop, force=self._force
                    ):
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
            while (left or self._under) and not self._stop.stopping.is_set():
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
        """End what is under way."""
        for task in self._under:
            cluster.stop(task)

        deadline = time.monotonic() + self._stop.grace_seconds
        while self._under and time.monotonic() < deadline:
            for task in cluster.wait(list(self._under), _LOOK_SECONDS):
                try:
                    yield from self._take(cluster, task, left)
                except (SurgeError, OSError) as error:  # the first one has ended the run
                    self._warn(str(error))
        self._under.clear()

    def _hand_out(self, cluster: Cluster[T], left: Stretches) -> None:
        machines = cluster.machines()
        self._enter(machines)
        speeds = [work.bytes_per_second for work in self.work.values()]  # lost machines included
        speeds = [speed for speed in speeds if speed]
        if speeds:
            wanted = left.machines_wanted(sum(speeds) / len(speeds))
            cluster.request(max(1, len(machines), wanted))
        elif not machines:
            cluster.request(1)

        held = Counter[str]()
        for under in self._under.values():
            held[under.machine] += _share_of(under.stretch)
        for count in range(STRETCHES_AT_ONCE):
            for name in machines:
                if held[name] != count:
                    continue
                stretch = left.next(self.work[name].bytes_per_second, len(machines), count)
                if stretch is not None:
                    task = cluster.embed(name, stretch)
                    self._under[task] = _Under(name, stretch, self._now())
                    held[name] += _share_of(stretch)
        self.preparing = f"{counted(sum(map(bool, held.values())), 'machine')} at work"

    def _enter(self, machines: Mapping[str, MachineFacts]) -> None:
        """Begin the record of each machine that is new."""
        if machines and not self.work and not self._local.space_is_known:
            self._local.begin_space()  # which is refused before any machine has written
        for name, facts in machines.items():
            if name not in self.work:
                self.work[name] = MachineWork(facts)
                self.report.machines = len(self.work)
                self._describe(facts)

    def _take(self, cluster: Cluster[T], task: T, left: Stretches) -> Iterator[Event]:
        """Yield the events of a stretch that has ended."""
        under = self._under.pop(task)
        work = self.work[under.machine]
        try:
            outcome = cluster.result(task)
            self._require_shared(work, outcome)
        except MachineLost as lost:
            yield from self._put_back_lost(cluster, under, left, lost)
        except (SurgeError, OSError) as error:
            # A machine that has done nothing may be the cause itself. Else the run ends.
            can_wait = self._has_other(cluster, under.machine) or cluster.is_starting()
            if work.stretches or not can_wait:
                raise
            left.put_back(under.stretch)
            self._count_failure(cluster, under.machine, str(error))
        else:
            yield from self._end(cluster, under, left, outcome)

    def _put_back_lost(
        self, cluster: Cluster[T], under: _Under, left: Stretches, lost: MachineLost
    ) -> Iterator[Event]:
        """Put back what a machine was lost with; yield failures if it was lost too often."""
        stretch = under.stretch
        if self._told.issuperset(stretch.keys):  # another range of the partition failed
            self._warn(str(lost))
            return
        if under.machine in self._left_out:
            left.put_back(stretch)
            return

        # Two stretches of one process are one failure of the machine.
        work = self.work[under.machine]
        is_new_loss = not work.lost_at or under.begun > work.lost_at[-1]
        work.lost_at.append(self._now())

        is_kept = left.put_back_lost(stretch)
        if not is_kept:
            then = "given up"
        elif self.stopped:
            then = "left for the next run"
        else:
            then = "done again"
        self._warn(f"{lost}; {counted(len(stretch.keys), 'partition')} {then}")
        if not is_kept:
            for key in stretch.keys:
                reason = (
                    f"{key!r}: machines were lost with it three times, the last time so: {lost}. "
                    "Correct the cause, then run again."
                )
                yield from self._new([Failure(key, reason, in_source=False)], left)
        if is_new_loss and self._has_other(cluster, under.machine):
            self._count_failure(cluster, under.machine, str(lost))

    def _end(
        self, cluster: Cluster[T], under: _Under, left: Stretches, outcome: StretchOutcome
    ) -> Iterator[Event]:
        """Yield the events of a stretch, unless its machine may be why all its partitions failed."""
        stretch = under.stretch
        work = self.work[under.machine]
        events = [self._compared(work, event) for event in outcome.events]
        work.was_at_work(under.begun, self._now())
        work.texts += sum(event.texts for event in events if isinstance(event, SuperBatchReport))
        failures = [event for event in events if isinstance(event, Failure)]

        if not failures or any(isinstance(event, Receipt) for event in events):
            work.stretches += 1
            work.weight += stretch.weight
        elif not work.stretches and not self.stopped and self._has_other(cluster, under.machine):
            left.put_back(stretch)
            self._count_failure(cluster, under.machine, failures[0].reason)
            events = [event for event in events if isinstance(event, SuperBatchReport)]
            yield from self._new(events, left)
            return

        yield from self._new(events, left)
        if stretch.ranges and not outcome.stopped and stretch.keys[0] not in self._told:
            left.end_range(stretch.keys[0])

    def _require_shared(self, work: MachineWork, outcome: StretchOutcome) -> None:
        """Look for the first file that a machine has published."""
        receipt = next((event for event in outcome.events if isinstance(event, Receipt)), None)
        if receipt is not None and not work.has_published:
            require_shared(work.facts.host, receipt)
            work.has_published = True

    def _compared(self, work: MachineWork, event: Event) -> Event:
        """Return the event; a receipt for another source version than listed becomes a failure."""
        if not isinstance(event, Receipt) or event.source_version == self._versions[event.key]:
            return event
        reason = (
            f"{event.key!r}: the machine {work.facts.host} read version {event.source_version}, "
            f"and this run listed {self._versions[event.key]}. The source has changed, or the "
            "machine reads another copy of it. Run again when all machines read one source."
        )
        return Failure(event.key, reason, transient=True, in_source=False)

    def _has_other(self, cluster: Cluster[T], machine: str) -> bool:
        """Return whether another machine can encode."""
        return bool(cluster.machines().keys() - {machine})

    def _count_failure(self, cluster: Cluster[T], machine: str, reason: str) -> None:
        """Leave a machine out whose first stretches have failed."""
        work = self.work[machine]
        if work.stretches or machine in self._left_out:
            return
        work.failures += 1
        if work.failures >= _MOST_FAILURES:
            self._left_out.add(machine)
            cluster.leave_out(machine)
            self._warn(
                f"the machine {work.facts.host} is left out: its first stretches failed, the last one with: {reason}"
            )

    def _new(self, events: Iterable[Event], left: Stretches) -> Iterator[Event]:
        """Those that nobody has told of; a fresh partition was published by a machine that could
        not say so."""
        for event in events:
            if isinstance(event, SuperBatchReport):
                yield self._counted(replace(event, index=self.report.superbatches))
            elif isinstance(event, OldVectorSample):
                yield self._counted(event)
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
        report.space, report.space_title, report.dimension = (
            space.name,
            space.title,
            space.dimension,
        )
        report.device, report.hardware, report.precision = (
            facts.device,
            facts.hardware,
            facts.precision,
        )
        report.workers = sum(work.facts.workers for work in self.work.values())
        log.info("%s encodes: %s, %s", facts.host, facts.device, counted(facts.workers, "worker"))


def _share_of(stretch: Stretch) -> int:
    """Return how many of a machine's stretches it counts as."""
    return STRETCHES_AT_ONCE if stretch.losses else 1
