"""A run: what the asset `embeddings` and the jobs do, as "worklist, engine, events".

The engine decides and encodes; this module connects it with Dagster. A run that dies loses the
events that were queued and no file: the next run adopts files that are not on record. Nothing is
yielded to Dagster before the engine has ended: when a run is terminated, a suspended generator
would be closed only when it is collected, and its threads with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import closing, suppress
from functools import partial

import dagster as dg
import pyarrow as pa

from surge_dagster.cluster.cluster_run import OpenedRun, open_run
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.output.spaces import model_difference
from surge_dagster.engine.run.following import Follower, Run
from surge_dagster.engine.run.report import Failure, Receipt, RunReport, SuperBatchReport
from surge_dagster.engine.run.staging import remove_staged
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.support.counts import counted, named
from surge_dagster.engine.tables.opening import release
from surge_dagster.orchestration.failures import refusal_fingerprint
from surge_dagster.orchestration.launch import LaunchConfig, RemovedPartitions, in_backfill
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.outcome import Outcome
from surge_dagster.orchestration.partition_keys import in_chunks, to_partition_key
from surge_dagster.orchestration.readers_space import asset_of, report_readers_space
from surge_dagster.orchestration.records import (
    Catalogued,
    failed_on_record,
    last_embeddings,
    read_catalogued,
)
from surge_dagster.orchestration.removed_partitions import handle_removed_partitions
from surge_dagster.orchestration.requests import EVENT_TAG, request_tags
from surge_dagster.orchestration.run_events import RunEvents
from surge_dagster.orchestration.space_of_settings import known_space, require_first_space
from surge_dagster.orchestration.worklist import (
    OnRecord,
    Worklist,
    forced_since,
    make_worklist,
    requested_partitions,
)

LINE_SECONDS = 10.0  # between two lines of progress; a line costs as much as an event


class Refresh:
    """A run over the catalog or a part of it; fills its outcome."""

    def __init__(
        self,
        names: CatalogNames,
        context: dg.OpExecutionContext,
        config: LaunchConfig,
        outcome: Outcome,
    ) -> None:
        self._names = names
        self._context = context
        self._config = config
        self._outcome = outcome
        self._resources = names.resources(context)
        self._store = self._resources.output.open()
        self._in_backfill = in_backfill(context)

    def run(self, partition_keys: Sequence[str] | None) -> None:
        """Embed what is missing or stale and report it to Dagster; None is the whole catalog."""
        _use_jemalloc()
        source = self._resources.open_source()
        partitions, self._outcome.removed = requested_partitions(
            source, partition_keys, is_typed=self._config.is_typed
        )
        self._outcome.partitions = partitions
        with self._resources.encoder.pool() as pool:
            space = self._space_of(pool)
            space = self._bring_up_to_date(list(partitions.values()), space, pool)
        report_readers_space(self._names, self._context, self._store)

        action = self._config.removed_partitions
        if action is not RemovedPartitions.leave:
            outputs = OutputState(self._store, space.name)
            delete = action is RemovedPartitions.delete
            handle_removed_partitions(
                self._names, self._context, source, outputs, space, delete=delete
            )
        release(source)

    def _space_of(self, pool: EncoderPool) -> Space:
        """Return the space of the settings, which may be a new one.

        Raises:
            ConfigError: an unattended run would begin another space than the first one.
        """
        known = known_space(self._resources, self._store)
        if known is not None and known.spec_sha256 == pool.space.spec_sha256:
            return known
        if known is None and self._config.unattended:
            require_first_space(self._names, self._resources, self._store)
        if known is not None and self._config.unattended:
            raise ConfigError(
                f"the model {self._resources.encoder.model!r} is not as it was for the space "
                f"{known.name!r}: {model_difference(pool.space, known)}. Nothing was encoded. "
                f"Launch {self._names.refresh_job} by hand to begin a space for what it is now."
            )
        return pool.space

    def _bring_up_to_date(
        self, candidates: Sequence[Partition], space: Space, pool: EncoderPool
    ) -> Space:
        """Embed what needs it; return the space as the output has it."""
        shown_as = partial(asset_of, self._names, self._store, space)
        catalogued = read_catalogued(self._names, shown_as(), self._context.instance)
        self._outcome.asset = catalogued.asset
        self._register(candidates, catalogued)
        self._tag_attempt(catalogued)

        with RunEvents(
            self._names,
            self._context,
            catalogued,
            self._outcome,
            shown_as,
            self._resources.events_grace_seconds,
        ) as events:
            self._leave_removed(candidates, events)
            work = self._worklist(candidates, space, catalogued)
            for failure in work.failures:
                events.failure(failure)
            opened = open_run(
                self._resources.run_setup(force=self._config.force),
                work.todo,
                pool,
                self._store,
                self._context.log.warning,
                freshness=work.freshness,
                outputs=work.outputs,
            )
            self._outcome.report = opened.run.report
            self._outcome.machines = opened.machines
            self._embed(opened, work.todo, events)
            self._report_fresh(work, events)
        return opened.run.space

    def _worklist(
        self, candidates: Sequence[Partition], space: Space, catalogued: Catalogued
    ) -> Worklist:
        """Decide what needs work, and enter in the outcome what is fresh."""
        failed = failed_on_record(catalogued.asset, self._context.instance)
        since = forced_since(self._context) if self._config.force else None
        record = OnRecord(catalogued, failed, since)
        outputs = OutputState(self._store, space.name)
        files = self._outcome.files
        work = make_worklist(candidates, outputs, space, self._config, record, files)

        fresh = {receipt.key for receipt in (*work.fresh, *work.adopted)}
        remove_staged(self._store, outputs.space, fresh)
        self._outcome.fresh |= fresh
        return work

    def _tag_attempt(self, catalogued: Catalogued) -> None:
        """Let the sensor know of a run that it did not request, in case that it is terminated."""
        if EVENT_TAG not in self._context.run_tags:
            instance = self._context.instance
            settings = refusal_fingerprint(self._resources)
            tags = request_tags(self._names, instance, catalogued, 1, settings)
            instance.add_run_tags(self._context.run_id, tags)

    def _register(self, partitions: Iterable[Partition], catalogued: Catalogued) -> None:
        keys = [to_partition_key(partition.key) for partition in partitions]
        new = [key for key in keys if key not in catalogued.registered]
        for chunk in in_chunks(new):
            self._context.instance.add_dynamic_partitions(self._names.partitions_name, chunk)

    def _leave_removed(self, candidates: Iterable[Partition], events: RunEvents) -> None:
        """Leave `embeddings` as it is for partitions that this run does not bring up to date there:
        those that were removed from the source, and all of a space that readers do not use."""
        removed = self._outcome.removed
        if removed:
            self._context.log.warning(
                f"{len(removed):,} removed from the source: {named(map(repr, removed))}. Their "
                "files and events stay as they are; the setting removed_partitions decides about "
                "them."
            )
        left = list(removed)
        if self._outcome.asset != self._names.embeddings:
            left += [partition.key for partition in candidates]
        if self._in_backfill:  # unchanged, so that what was out of date stays so
            for event in last_embeddings(self._names, self._context.instance, left):
                events.repeated(event)

    def _embed(self, opened: OpenedRun, todo: Sequence[Partition], events: RunEvents) -> None:
        """Run, and report to Dagster."""
        run = opened.run
        log = self._context.log
        log.info(
            f"{counted(len(todo), 'partition')} to do, space {run.space.title} ({run.space.name})"
        )
        follower = Follower(run, todo)
        try:
            followed = follower.follow(
                opened.events(), lambda progress: log.info(progress.in_words()), LINE_SECONDS
            )
            with closing(followed):
                for event in followed:
                    self._outcome.count(event)
                    match event:
                        case SuperBatchReport():
                            self._report_superbatch(event, run, events)
                        case Failure():
                            events.failure(event)
                        case Receipt():
                            partition = self._outcome.partitions[event.key]
                            self._outcome.files.record(partition, event, run.space)
                            events.embedding(event)
        finally:
            self._outcome.published |= run.published

    def _report_superbatch(self, superbatch: SuperBatchReport, run: Run, events: RunEvents) -> None:
        if superbatch.index == 0:
            self._context.log.info(_encoder_line(run.report))
            # Now and not at the end: the run may take days.
            report_readers_space(self._names, self._context, self._store)
        events.superbatch(superbatch, run.space)

    def _report_fresh(self, work: Worklist, events: RunEvents) -> None:
        """Adopt files that are not on record; in a backfill, report every other fresh file too."""
        for receipt in work.adopted:
            events.embedding(receipt)
        for receipt in work.fresh:
            if self._in_backfill:
                events.embedding(receipt)
            else:
                events.source(receipt.key)


def _encoder_line(report: RunReport) -> str:
    device = f"{report.device} ({report.hardware})" if report.hardware else report.device
    # of each machine
    sizes = f", SuperBatches of {report.b_min:,} to {report.b_max:,} texts" if report.b_max else ""
    return f"encoding on {device} in {report.precision}{sizes}"


def _use_jemalloc() -> None:
    """Let Arrow allocate with jemalloc, unless the environment chooses an allocator: mimalloc keeps
    over 100 MB of freed memory in a run, and more the longer it takes."""
    if "ARROW_DEFAULT_MEMORY_POOL" not in os.environ:
        with suppress(NotImplementedError):  # there are builds of pyarrow without it
            pa.set_memory_pool(pa.jemalloc_memory_pool())
