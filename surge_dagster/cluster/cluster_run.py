"""A run over the machines of a cluster, with the events, the report and the guarantees of a run on one.

The driver lists the source and decides what is due. Machines get stretches of it until none is left, and what they send
back are the events of their runs. A machine that is lost gives its stretch back; what it had published is found by the
next machine that has the stretch.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from surge_dagster.cluster.machine import CatalogRuns, MachineFacts, StretchOutcome
from surge_dagster.cluster.stretches import Stretch, Stretches, oldest_copy
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import Cancelled, SurgeError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.run.deciding import decide
from surge_dagster.engine.run.report import Event, Failure, Receipt, RunReport, SuperBatchReport
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.support.counts import counted
from surge_dagster.engine.support.process_memory import MemoryGauge
from surge_dagster.engine.support.waiting import StopSignal

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_COPIES_SECONDS = 5.0  # for machines to say what they did of stretches that others have done meanwhile
T = TypeVar("T")


class MachineLost(SurgeError):
    """The machine, its process, or its encoder pool ended under a stretch."""


class Cluster(Protocol[T]):
    """Machines that come and go, and a task for each stretch that one of them has; `T` is such a task."""

    def machines(self) -> dict[str, MachineFacts]:
        """Those that can encode now, by name; others are started meanwhile."""
        ...

    def embed(self, machine: str, stretch: Stretch, *, again: bool) -> T: ...

    def wait(self, tasks: Sequence[T], seconds: float) -> list[T]:
        """Those that are done, after the first of them or so many seconds."""
        ...

    def result(self, task: T) -> StretchOutcome:
        """Raises `MachineLost`, or the error that ended the stretch."""
        ...

    def stop(self, machine: str) -> None:
        """End the stretch that it has."""
        ...

    def close(self) -> None:
        """End all machines' processes that this run started."""
        ...


@dataclass(slots=True)
class MachineWork:
    """What a machine has done so far."""

    facts: MachineFacts
    stretches: int = 0
    texts: int = 0
    weight: int = 0
    seconds: float = 0.0

    @property
    def bytes_per_second(self) -> float | None:
        return self.weight / self.seconds if self.seconds > 0 and self.weight else None


@dataclass(frozen=True, slots=True)
class _Under:
    """A stretch under way."""

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
    ) -> None:
        self.report, self.published = RunReport(), set[str]()
        self.preparing = "the files of the output are being compared with the source"
        self.work: dict[str, MachineWork] = {}
        self._partitions, self._connect, self._force = list(partitions), connect, force
        self._stop = StopSignal(grace_seconds)
        self._local = runs.new_run(self._partitions, pool)
        self._begun = time.perf_counter()
        self._under: dict[T, _Under] = {}
        self._told = set[str]()  # keys of due partitions that have a receipt or a failure

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
                outputs = self._local.listed_outputs()
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
                        yield from self._embed(cluster, Stretches(due, divides=not self._force))
        finally:
            self.report.peak_rss_bytes = gauge.peak_bytes
            self.report.wall_seconds = time.perf_counter() - self._begun

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

    def _last_events(self, cluster: Cluster[T], left: Stretches) -> Iterator[Event]:
        """Ends what is under way."""
        for under in self._under.values():
            if not under.stretch.is_done:
                cluster.stop(under.machine)
        grace = self._stop.grace_seconds
        # Whose link is down is not known as lost for a minute.
        deadline = time.monotonic() + (grace if self._is_undone() else min(grace, _COPIES_SECONDS))
        while self._under and time.monotonic() < deadline:
            for task in cluster.wait(list(self._under), _LOOK_SECONDS):
                yield from self._take(cluster, task, left)
        self._under.clear()

    def _is_undone(self) -> bool:
        """Whether something is under way that no other machine has done."""
        return not all(under.stretch.is_done for under in self._under.values())

    def _hand_out(self, cluster: Cluster[T], left: Stretches) -> None:
        machines = cluster.machines()
        for name in machines.keys() - self.work.keys():
            self.work[name] = MachineWork(machines[name])
            self._describe(machines[name])
        busy = {under.machine for under in self._under.values()}
        for name in machines.keys() - busy:
            stretch = left.next(self.work[name].bytes_per_second, len(machines))
            if stretch is None and self._under:
                now = time.monotonic()
                stretch = oldest_copy([(under.stretch, now - under.begun) for under in self._under.values()])
            if stretch is None:
                break
            again = stretch.attempts > 0 or any(under.stretch is stretch for under in self._under.values())
            task = cluster.embed(name, stretch, again=again)
            self._under[task] = _Under(name, stretch, time.monotonic())
        self.preparing = f"{counted(len(self._under), 'machine')} at work"

    def _take(self, cluster: Cluster[T], task: T, left: Stretches) -> Iterator[Event]:
        """What has become of a stretch."""
        under = self._under.pop(task)
        others = [other for other in self._under.values() if other.stretch is under.stretch]
        try:
            outcome = cluster.result(task)
        except MachineLost as lost:
            if under.stretch.is_done or others or self._told.issuperset(under.stretch.keys):
                return
            key = left.put_back(under.stretch)
            again = "given up" if key else "done again"
            log.warning("%s; %s %s", str(lost), counted(len(under.stretch.keys), "partition"), again)
            if key:
                reason = (
                    f"{key!r} ended every machine that had it, at last so: {lost}. Correct the cause, then run again."
                )
                yield from self._new([Failure(key, reason)], left)
            return
        stretch, work = under.stretch, self.work[under.machine]
        work.seconds += time.monotonic() - under.begun
        work.texts += sum(event.texts for event in outcome.events if isinstance(event, SuperBatchReport))
        yield from self._new(outcome.events, left)
        if stretch.is_done:
            return
        stretch.is_done = True
        for other in others:
            cluster.stop(other.machine)
        work.stretches, work.weight = work.stretches + 1, work.weight + stretch.weight
        untold = tuple(key for key in stretch.keys if key not in self._told)
        if outcome.stopped and untold:  # by a call that was meant for a stretch before it
            left.put_back(replace(stretch, keys=untold, is_done=False, attempts=stretch.attempts - 1))
        elif untold and stretch.ranges:
            left.end_range(untold[0])

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
        self.report.count(event, time.perf_counter() - self._begun)
        return event

    def _describe(self, facts: MachineFacts) -> None:
        report, space = self.report, self.space
        report.space, report.space_title, report.dimension = space.name, space.title, space.dimension
        report.device, report.hardware, report.precision = facts.device, facts.hardware, facts.precision
        report.workers = sum(work.facts.workers for work in self.work.values())
        log.info("%s encodes: %s, %s", facts.host, facts.device, counted(facts.workers, "worker"))
