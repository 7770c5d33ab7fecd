"""A run: what the asset `embeddings` and the jobs do, as "worklist, engine, events".

The engine decides and encodes; this module connects it with Dagster. A run that dies loses the
events that were queued and no file: the next run adopts files that are not on record. Nothing is
yielded to Dagster before the engine has ended: when a run is terminated, a suspended generator
would be closed only when it is collected, and its threads with it.

A fresh file that Dagster does not show as materialized is adopted: a run that was killed published
it without its event, or another program made it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

import dagster as dg
import pyarrow as pa

from surge_dagster.cluster.cluster_run import OpenedRun, open_run
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.files.formats import PublishedFile
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.freshness import Freshness, OutputState
from surge_dagster.engine.output.spaces import model_difference
from surge_dagster.engine.run.events import Follower, Run
from surge_dagster.engine.run.report import Failure, Receipt, SuperBatchReport
from surge_dagster.engine.run.staging import remove_staged
from surge_dagster.engine.sources.partition import Partition, Source
from surge_dagster.engine.support.counts import counted, named
from surge_dagster.orchestration.discovery import handle_removed_partitions
from surge_dagster.orchestration.events import RunEvents
from surge_dagster.orchestration.failures import refusal_fingerprint
from surge_dagster.orchestration.launch import (
    LaunchConfig,
    RemovedPartitions,
    Select,
    in_backfill,
)
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.outcome import Outcome
from surge_dagster.orchestration.partition_keys import (
    from_partition_key,
    in_groups,
    to_partition_key,
    with_short_keys,
)
from surge_dagster.orchestration.records import (
    Catalogued,
    failed_on_record,
    last_embeddings,
    read_catalogued,
)
from surge_dagster.orchestration.runs import EVENT_TAG, request_tags
from surge_dagster.orchestration.spaces import (
    asset_of,
    known_space,
    report_readers_space,
    require_first_space,
)

log = logging.getLogger(__name__)

LINE_SECONDS = 10.0  # between two lines of progress; a line costs as much as an event
# When the first attempt of a forced run began. Dagster copies it to the runs that continue it. Its
# UI leaves out tags with this prefix.
_FORCED_SINCE_TAG = ".dagster/surge_forced_since"
# Tags that Dagster leaves out when an operator executes a run again as a whole.
_CONTINUES_TAGS = ("dagster/is_resume_retry", "dagster/retry_number")


@dataclass(frozen=True, slots=True)
class Worklist:
    """The partitions of a run, sorted once.

    Attributes:
        outputs: files of the run's space; those that differ from their source count as missing.
        todo: partitions that are selected and need work.
        freshness: of each of them, by catalog key.
        fresh: of files that stay as they are and are on record.
        adopted: of files that stay as they are and are not on record.
        failures: partitions whose files cannot be read now.
    """

    outputs: OutputState
    todo: list[Partition] = field(default_factory=list)
    freshness: dict[str, Freshness] = field(default_factory=dict)
    fresh: list[Receipt] = field(default_factory=list)
    adopted: list[Receipt] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def receipt(self, file: PublishedFile) -> Receipt:
        location = self.outputs.store.location(file.stored.name)
        return Receipt.of(file.facts, file.stored, location, action="fresh")


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

    def run(self, partition_keys: Sequence[str] | None) -> Space:
        """Embed what is missing or stale and report it to Dagster; return the space.

        Args:
            partition_keys: None is the whole catalog.
        """
        _use_jemalloc()
        source = self._resources.open_source()
        self._choose(source, partition_keys)
        with self._resources.encoder.pool() as pool:
            space = self._space_of(pool)
            space = self._bring_up_to_date(list(self._outcome.partitions.values()), space, pool)
        report_readers_space(self._names, self._context, self._store)

        action = self._config.removed_partitions
        if action is not RemovedPartitions.leave:
            outputs = OutputState(self._store, space.name)
            delete = action is RemovedPartitions.delete
            handle_removed_partitions(
                self._names, self._context, source, outputs, space, delete=delete
            )
        return space

    def _choose(self, source: Source, partition_keys: Sequence[str] | None) -> None:
        """Enter in the outcome the partitions that the run was launched for, and keys that the
        source does not have, whose files and events stay."""
        listed = {partition.key: partition for partition in with_short_keys(source)}
        if partition_keys is None:
            self._outcome.partitions = listed
            return

        known = set(map(to_partition_key, listed))
        unknown = [repr(key) for key in partition_keys if key not in known]
        is_typed = self._config.keys is not None and not self._config.unattended
        if unknown and is_typed:  # by an operator, who may be mistaken
            raise ConfigError(
                f"the catalog {source.url!r} does not have {counted(len(unknown), 'key')}: "
                f"{named(unknown)}. Nothing was encoded. Write keys as the asset source_partitions "
                "shows them, and launch again."
            )

        wanted = dict.fromkeys(map(from_partition_key, partition_keys))
        partitions = {key: partition for key, partition in listed.items() if key in wanted}
        self._outcome.partitions = partitions
        self._outcome.removed = [key for key in wanted if key not in listed]

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

        writer = RunEvents(
            self._names,
            self._context,
            catalogued,
            self._outcome,
            self._store,
            shown_as,
            self._resources.events_grace_seconds,
        )
        with writer.opened() as events:
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
        """Sort the partitions into fresh ones and ones that need work; judge their files."""
        failed = failed_on_record(catalogued.asset, self._context.instance)
        since = _forced_since(self._context) if self._config.force else None
        work = Worklist(OutputState(self._store, space.name))
        for partition in work.outputs.looked_at(candidates):
            freshness = self._examine(partition, work, space)
            fresh = freshness.file if freshness.status == "fresh" else None
            key = to_partition_key(partition.key)
            select = self._config.select
            state = "stale" if freshness.status == "retry" else freshness.status
            is_selected = select is Select.all or state == select.value
            if select is Select.failed:
                is_selected = key in failed

            if freshness.error is not None:
                reason = str(freshness.error)
                work.failures.append(Failure(partition.key, reason, transient=True))
            elif is_selected and (fresh is None or self._is_forced(fresh, since)):
                work.todo.append(partition)
                work.freshness[partition.key] = freshness
            elif fresh is not None:
                is_on_record = key not in failed and catalogued.knows(
                    key, fresh.facts.desired_version, partition.source_version
                )
                receipts = work.fresh if is_on_record else work.adopted
                receipts.append(work.receipt(fresh))

        self._outcome.fresh |= {receipt.key for receipt in (*work.fresh, *work.adopted)}
        remove_staged(self._store, space.name, self._outcome.fresh)
        return work

    def _is_forced(self, file: PublishedFile, since: str | None) -> bool:
        """Return whether a fresh file is encoded again; not if this run goes on with a forced one
        that has encoded it."""
        return self._config.force and (since is None or file.facts.oldest_encoded_at < since)

    def _examine(self, partition: Partition, work: Worklist, space: Space) -> Freshness:
        """Judge the file of a partition and return its freshness.

        A wrong file is refused and counts as missing.
        """
        checks = self._outcome.files
        freshness = work.outputs.freshness(partition)
        if freshness.invalid is not None:
            checks.record_invalid(partition.key, freshness.invalid)
            log.warning("partition %r: %s.", partition.key, freshness.invalid)
        if freshness.file is None or freshness.status != "fresh":
            return freshness

        receipt = work.receipt(freshness.file)
        checks.record(partition, receipt, space)
        self._outcome.set_aside.add(receipt.key, receipt.rejected_rows, receipt.source_rows)
        fault = checks.fault(partition.key)
        if not fault:
            return freshness
        log.warning("partition %r: %s", partition.key, fault)
        work.outputs.refuse(freshness.file, fault)
        return Freshness("missing")

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
        for some in in_groups(new):
            self._context.instance.add_dynamic_partitions(self._names.partitions_name, some)

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
            report = run.report
            device = f"{report.device} ({report.hardware})" if report.hardware else report.device
            sizes = ""
            if report.b_max:  # of each machine
                sizes = f", SuperBatches of {report.b_min:,} to {report.b_max:,} texts"
            self._context.log.info(f"encoding on {device} in {report.precision}{sizes}")
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


def _use_jemalloc() -> None:
    """Let Arrow allocate with jemalloc, unless the environment chooses an allocator: mimalloc keeps
    over 100 MB of freed memory in a run, and more the longer it takes."""
    if "ARROW_DEFAULT_MEMORY_POOL" not in os.environ:
        with suppress(NotImplementedError):  # there are builds of pyarrow without it
            pa.set_memory_pool(pa.jemalloc_memory_pool())


def _forced_since(context: dg.OpExecutionContext) -> str | None:
    """Return when the first attempt of a forced run began; None if this run is the first one.

    A run continues another one if Dagster launched it after a failure, or an operator "from
    failure". One that is executed again as a whole starts from the beginning. An attempt that ended
    before its worklist has encoded nothing and does not count.
    """
    tags: Mapping[str, str] = context.run_tags
    is_continuation = any(tag in tags for tag in _CONTINUES_TAGS)
    if is_continuation and _FORCED_SINCE_TAG in tags:
        return tags[_FORCED_SINCE_TAG]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    context.instance.add_run_tags(context.run_id, {_FORCED_SINCE_TAG: now})
    return None
