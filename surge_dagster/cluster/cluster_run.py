"""Runs over the machines of a cluster, with the events, report and guarantees of a run on one.

The driver decides once what is due and encodes nothing itself. Machines get stretches of work, two
at a time, and send back the events of their runs. What a lost machine had goes back into the queue,
except for what it has published. A stretch that is lost three times fails its partitions by name.

A partition that a machine cannot read, or reads in another version than the driver has listed, is
tried once on another machine. A machine whose stretch ends with an error is left out, and the error
of the last machine ends the run.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from surge_dagster.cluster import stretches
from surge_dagster.cluster.machine import (
    STRETCHES_AT_ONCE,
    Cluster,
    MachineFacts,
    MachineLost,
    MachineWork,
    Stretch,
    StretchOutcome,
    write_token,
)
from surge_dagster.cluster.ray_cluster import RayCluster
from surge_dagster.cluster.stretches import Stretches, StretchSizes
from surge_dagster.config.run_setup import RunSetup
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import Cancelled, SurgeError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.freshness import Freshness, OutputState
from surge_dagster.engine.plan.planned_run import learning
from surge_dagster.engine.run.deciding import decide
from surge_dagster.engine.run.events import Run
from surge_dagster.engine.run.report import (
    Event,
    Failure,
    OldVectorSample,
    Receipt,
    RunReport,
    SuperBatchReport,
)
from surge_dagster.engine.run.superbatch import PartitionToRead
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.counts import counted
from surge_dagster.engine.support.process_memory import MemoryGauge
from surge_dagster.engine.support.waiting import StopSignal

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_MOST_LOSSES = 3


@dataclass(frozen=True, slots=True)
class OpenedRun:
    """A run that has not begun.

    Attributes:
        events: runs it.
        machines: what each machine has done, live; None for a run in this process.
    """

    run: Run
    events: Callable[[], Generator[Event]]
    machines: Mapping[str, MachineWork] | None = None


def open_run(
    setup: RunSetup,
    partitions: Sequence[Partition],
    pool: EncoderPool,
    store: Store,
    warn: Callable[[str], None],
    *,
    freshness: Mapping[str, Freshness] | None = None,
    outputs: OutputState | None = None,
) -> OpenedRun:
    """Return a run in this process, or over the cluster of the settings.

    Args:
        pool: of this process; over a cluster it is not started.
        freshness: of all partitions by key, if the caller has asked for it.
        outputs: the files of the space, if the caller has listed them.
    """
    if setup.encoder.cluster == "none":
        run = setup.new_run(partitions, pool, store, freshness=freshness, outputs=outputs)
        opened = OpenedRun(run, partial(learning, run, pool, store))
    else:
        setup = setup.for_machines()
        connect = partial(RayCluster, setup.encoder.cluster, setup, pool.space, warn)
        run = ClusterRun(
            setup, partitions, pool, connect, warn, freshness=freshness, outputs=outputs
        )
        opened = OpenedRun(run, run.events, run.work)
    opened.run.report.prices = setup.encoder.prices()
    return opened


@dataclass(frozen=True, slots=True)
class _Task:
    """A stretch under way."""

    machine: str
    stretch: Stretch


class ClusterRun:
    """A `Run` over machines.

    Args:
        connect: to the machines, which look for a token (see `write_token`); called if something is
            due.
        warn: takes a line about each machine that is lost.

    Attributes:
        work: what each machine has done.
    """

    in_flight = None

    def __init__(
        self,
        setup: RunSetup,
        partitions: Iterable[Partition],
        pool: EncoderPool,
        connect: Callable[[str], Cluster],
        warn: Callable[[str], None] = log.warning,
        *,
        freshness: Mapping[str, Freshness] | None = None,
        outputs: OutputState | None = None,
        sizes: StretchSizes | None = None,
    ) -> None:
        self.report = RunReport()
        self.published = set[str]()
        self.preparing = "the files of the output are being compared with the source"
        self.work: dict[str, MachineWork] = {}
        self._listed = list(partitions)
        # The first of a key that comes again; the others are refused.
        self._partitions = {each.key: each for each in reversed(self._listed)}
        self._connect = connect
        self._warn = warn
        self._force = setup.force
        self._sizes = sizes or stretches.SIZES
        self._queue = Stretches([], divides_rows=False)
        self._stop = StopSignal(setup.grace_seconds)
        # It lists the output and begins the space, and is never run.
        self._store = setup.open_store()
        self._local = setup.new_run([], pool, self._store, outputs=outputs)
        self._freshness = dict(freshness or {})
        self._begun = time.perf_counter()
        self._tasks: dict[Any, _Task] = {}
        self._ended = set[str]()  # keys of due partitions that have a receipt or a failure
        self._refused = set[str]()  # keys that the driver refused
        self._left_out = set[str]()  # machines

    @property
    def space(self) -> Space:
        return self._local.space

    @property
    def stopped(self) -> bool:
        return self._stop.requested_at is not None

    def stop(self) -> None:
        self._stop.request()

    def events(self) -> Generator[Event]:
        """Run, and yield events as `EmbeddingRun.events` does."""
        gauge = MemoryGauge()
        try:
            with gauge:
                self._outputs = self._local.listed_outputs()
                self._describe_space()
                due = yield from self._decide()
                if not due or self.stopped:
                    return
                self.preparing = "the machines are starting"
                self._queue = Stretches(due, divides_rows=not self._force, sizes=self._sizes)
                yield from self._on_cluster()
        finally:
            self.report.peak_rss_bytes = gauge.peak_bytes
            self.report.wall_seconds = self._now()
            self.report.run_seconds = self.report.wall_seconds

    def _decide(self) -> Generator[Event, None, list[Partition]]:
        """Yield what needs no machine; return the partitions that are due."""
        due: list[Partition] = []
        fresh_keys: set[str] = set()
        with contextlib.suppress(Cancelled):
            unknown = [each for key, each in self._partitions.items() if key not in self._freshness]
            for partition in self._outputs.looked_at(unknown):
                self._stop.require_running()
                self._freshness[partition.key] = self._outputs.freshness(partition)
            decisions = decide(
                self._listed,
                self._outputs,
                self._stop,
                force=self._force,
                freshness=self._freshness,
            )
            for decision in decisions:
                if isinstance(decision, PartitionToRead):
                    due.append(decision.source)
                    continue
                if isinstance(decision, Receipt):
                    fresh_keys.add(decision.key)
                elif decision.key in self._refused:
                    continue
                else:
                    self._refused.add(decision.key)
                yield self._counted(decision)
        if not self.stopped:
            self._local.keep_tidy(fresh_keys)
        return due

    def _on_cluster(self) -> Generator[Event]:
        token = write_token(self._store)
        try:
            with contextlib.closing(self._connect(token)) as cluster:
                yield from self._embed(cluster)
        finally:
            self._store.delete(token)

    def _embed(self, cluster: Cluster) -> Generator[Event]:
        try:
            while (self._queue or self._tasks) and not self._stop.stopping.is_set():
                self._hand_out(cluster)
                for task in cluster.wait(list(self._tasks), _LOOK_SECONDS):
                    yield from self._take(cluster, task)
            yield from self._last_events(cluster)
        finally:
            for _ in self._last_events(cluster):
                pass  # the caller takes no more events; what they report is published

    def _now(self) -> float:
        return time.perf_counter() - self._begun

    def _last_events(self, cluster: Cluster) -> Iterator[Event]:
        """End the stretches under way."""
        if self._tasks:
            self.stop()
        for task in self._tasks:
            cluster.stop(task)

        deadline = time.monotonic() + self._stop.grace_seconds
        while self._tasks and time.monotonic() < deadline:
            for task in cluster.wait(list(self._tasks), _LOOK_SECONDS):
                try:
                    yield from self._take(cluster, task)
                except (SurgeError, OSError) as error:  # the first one has ended the run
                    self._warn(str(error))
        self._tasks.clear()

    def _hand_out(self, cluster: Cluster) -> None:
        machines = cluster.machines()
        self._enter(machines)
        speed = self._mean_speed()
        wanted = 0 if speed is None else self._queue.machines_wanted(speed)
        cluster.request(max(1, len(machines), wanted))

        held = Counter[str]()
        for task in self._tasks.values():
            held[task.machine] += _places_of(task.stretch)
        for count in range(STRETCHES_AT_ONCE):
            for name in machines:
                if held[name] != count:
                    continue
                stretch = self._queue.next(name, len(machines), speed, count)
                if stretch is None:
                    continue
                freshness = {key: self._freshness[key] for key in stretch.piece.keys}
                task = cluster.embed(name, stretch, freshness)
                self._tasks[task] = _Task(name, stretch)
                held[name] += _places_of(stretch)
        self.preparing = f"{counted(sum(map(bool, held.values())), 'machine')} at work"

    def _mean_speed(self) -> float | None:
        """Return bytes of text per second of a machine, those of lost machines included."""
        seconds = sum(work.seconds for work in self.work.values())
        weight = sum(work.weight for work in self.work.values())
        return weight / seconds if weight and seconds else None

    def _enter(self, machines: Mapping[str, MachineFacts]) -> None:
        """Begin the record of each machine that is new."""
        if machines and not self.work and not self._local.space_is_known:
            self._local.begin_space()  # a store may refuse it, before any machine has written
        for name, facts in machines.items():
            if name not in self.work:
                self.work[name] = MachineWork(facts, begun=self._now())
                self._describe(facts)

    def _take(self, cluster: Cluster, task_id: Any) -> Iterator[Event]:
        """Yield the events of a stretch that has ended."""
        task = self._tasks.pop(task_id)
        work = self.work[task.machine]
        try:
            outcome = cluster.result(task_id)
        except MachineLost as lost:
            yield from self._put_back_lost(task, lost)
            return
        except (SurgeError, OSError) as error:
            if not self._has_other(cluster, task.machine):
                raise
            self._leave_out(cluster, task.machine, error)
            self._put_back(task.stretch)
            return

        work.ended = self._now()
        is_first = not task.stretch.avoids
        can_be_tried = is_first and not self.stopped and self._has_other(cluster, task.machine)
        to_others: list[str] = []
        events: list[Event] = []
        for event in outcome.events:
            if isinstance(event, SuperBatchReport):
                work.texts += event.texts
            judged = self._judged(work, event)
            if isinstance(judged, Failure) and judged.transient and can_be_tried:
                to_others.append(judged.key)
            else:
                events.append(judged)

        yield from self._new(events)
        if to_others:
            piece = replace(task.stretch.piece, keys=tuple(to_others))
            self._put_back(replace(task.stretch, piece=piece, avoids=task.machine))
        else:
            work.weight += task.stretch.piece.weight
            self._end_range(task.stretch, outcome)

    def _leave_out(self, cluster: Cluster, machine: str, error: Exception) -> None:
        if machine not in self._left_out:
            self._left_out.add(machine)
            cluster.leave_out(machine)
            self._warn(f"the machine {self.work[machine].facts.host} is left out: {error}")

    def _end_range(self, stretch: Stretch, outcome: StretchOutcome) -> None:
        key = stretch.piece.keys[0]
        if stretch.piece.rows is None or outcome.stopped or key in self._ended:
            return
        if self._queue.end_range(key):
            self._look_again([key])
            self._queue.add_staged(key)

    def _put_back(self, stretch: Stretch) -> None:
        """Put back what a machine could not do.

        What it has published is fresh now: the next machine reports it, and encodes nothing.
        """
        self._look_again(stretch.piece.keys)
        if not self._ended.issuperset(stretch.piece.keys):
            self._queue.put_back(stretch)

    def _put_back_lost(self, task: _Task, lost: MachineLost) -> Iterator[Event]:
        """Put back what a machine was lost with; yield failures if it was lost too often."""
        stretch = task.stretch
        if task.machine not in self._left_out:
            self.work[task.machine].lost_at.append(self._now())
            stretch = replace(stretch, losses=stretch.losses + 1, avoids=task.machine)
        if stretch.losses < _MOST_LOSSES:
            then = "left for the next run" if self.stopped else "done again"
            self._warn(f"{lost}; {counted(len(stretch.piece.keys), 'partition')} {then}")
            self._put_back(stretch)
            return

        self._look_again(stretch.piece.keys)
        published: list[str] = []
        given_up: list[str] = []
        for key in stretch.piece.keys:
            is_fresh = self._freshness[key].status == "fresh" and not self._force
            (published if is_fresh else given_up).append(key)
        if published:
            self._queue.put_back(Stretch(replace(stretch.piece, keys=tuple(published))))
        self._warn(f"{lost}; {counted(len(given_up), 'partition')} given up")
        for key in given_up:
            reason = (
                f"{key!r}: machines were lost with it three times, the last time so: {lost}. "
                "Correct the cause, then run again."
            )
            yield from self._new([Failure(key, reason, in_source=False)])

    def _look_again(self, keys: Sequence[str]) -> None:
        """Look which of these partitions a machine has published."""
        if self._stop.stopping.is_set():
            return
        self._outputs.refresh()
        self._outputs.look_at(keys)
        for key in keys:
            self._freshness[key] = self._outputs.freshness(self._partitions[key])

    def _judged(self, work: MachineWork, event: Event) -> Event:
        """Return the event; a receipt for another source version than listed becomes a failure."""
        if not isinstance(event, Receipt):
            return event
        listed = self._partitions[event.key].source_version
        if event.source_version == listed:
            return event
        reason = (
            f"{event.key!r}: the machine {work.facts.host} read version {event.source_version}, "
            f"and this run listed {listed}. The source has changed, or the machine reads another "
            "copy of it. Run again when all machines read one source."
        )
        return Failure(event.key, reason, transient=True, in_source=False)

    def _has_other(self, cluster: Cluster, machine: str) -> bool:
        """Return whether another machine can encode."""
        return bool(cluster.machines().keys() - {machine})

    def _new(self, events: Iterable[Event]) -> Iterator[Event]:
        """Yield the events that are new; a file that was found fresh is one of a lost machine."""
        for event in events:
            match event:
                case SuperBatchReport():
                    yield self._counted(replace(event, index=self.report.superbatches))
                case OldVectorSample():
                    yield self._counted(event)
                case _ if event.key in self._ended:
                    continue
                case Failure(key) if key in self._refused:
                    self._end(key)
                case Receipt(action="fresh"):
                    self._end(event.key)
                    yield self._counted(replace(event, action="encoded"))
                case _:
                    self._end(event.key)
                    yield self._counted(event)

    def _end(self, key: str) -> None:
        self._ended.add(key)
        self._queue.drop(key)

    def _counted(self, event: Event) -> Event:
        if isinstance(event, Receipt) and event.action != "fresh":
            self.published.add(event.key)
        self.report.count(event, self._now())
        return event

    def _describe_space(self) -> None:
        self.report.space = self.space.name
        self.report.space_title = self.space.title
        self.report.dimension = self.space.dimension

    def _describe(self, facts: MachineFacts) -> None:
        self._describe_space()
        report = self.report
        report.device = facts.device
        report.hardware = facts.hardware
        report.precision = facts.precision
        report.machines = len(self.work)
        report.workers = sum(work.facts.workers for work in self.work.values())
        log.info("%s encodes: %s, %s", facts.host, facts.device, counted(facts.workers, "worker"))


def _places_of(stretch: Stretch) -> int:
    """Return how many of a machine's places a stretch takes."""
    return STRETCHES_AT_ONCE if stretch.losses else 1
