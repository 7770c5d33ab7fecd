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
from typing import Any

import dagster as dg
import pyarrow as pa

from surge_dagster.cluster.cluster_run import ClusterRun
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.output.spaces import list_spaces, model_difference, nearest_spaces
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.report import Failure, Receipt, RunReport, SuperBatchReport
from surge_dagster.engine.run.staging import remove_staged
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.support.counts import counted, named
from surge_dagster.engine.support.waiting import every
from surge_dagster.engine.tables.opening import release
from surge_dagster.orchestration.cluster_runs import (
    PUBLISH_SHARE,
    cluster_run_of,
    events_of,
    run_of,
)
from surge_dagster.orchestration.discovery import known_space
from surge_dagster.orchestration.launch import LaunchConfig, Unattended, is_by_operator
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.outcome import Outcome
from surge_dagster.orchestration.partition_keys import in_chunks, to_partition_key
from surge_dagster.orchestration.progress import LINE_SECONDS, Progress
from surge_dagster.orchestration.read_back import footer_failures
from surge_dagster.orchestration.readers_space import report_readers_space
from surge_dagster.orchestration.records import failed_on_record, last_embeddings, read_catalogued
from surge_dagster.orchestration.removed_partitions import handle_removed_partitions
from surge_dagster.orchestration.run_events import FAILURES_LOGGED, RunEvents
from surge_dagster.orchestration.worklist import (
    OnRecord,
    Worklist,
    done_before,
    make_worklist,
    requested_partitions,
)


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
        self._unattended = Unattended.of(context.run_tags)
        self._outcome = outcome
        self._resources = names.resources(context)
        self._store = self._resources.output.open()
        # Dagster ends a backfill as failed when a partition that it covers has no event from its
        # run.
        self._in_backfill = "dagster/backfill" in context.run_tags
        self._catalogued = read_catalogued(names, context.instance)
        outcome.embedding_ids = self._catalogued.embedding_ids
        done = done_before(names, context) if config.force else set[str]()
        self._record = OnRecord(self._catalogued, failed_on_record(names, context.instance), done)
        events_seconds = (1 - PUBLISH_SHARE) * self._resources.encoder.grace_seconds
        self._events = RunEvents(names, context, self._catalogued, outcome, events_seconds)

    def run(self, partition_keys: Sequence[str] | None) -> None:
        """Embed what is missing or stale and report it to Dagster; None is the whole catalog."""
        _return_freed_memory()
        source = self._resources.catalog.open()
        registered, is_typed = (
            self._catalogued.registered,
            self._config.is_typed(self._context.run_tags),
        )
        requested = requested_partitions(source, registered, partition_keys, is_typed=is_typed)
        self._outcome.partitions = requested.partitions
        self._fail_unknown(requested.unknown)
        self._register(requested.partitions)
        with self._events:
            self._skip_removed(requested.removed)
            space = self._bring_up_to_date(list(requested.partitions.values()))
        report_readers_space(self._names, self._context, self._store)
        if self._unattended and self._unattended.removed_partitions:
            # Who executes an old run again may not know that it deletes.
            action = (
                "report"
                if is_by_operator(self._context.run_tags)
                else self._unattended.removed_partitions
            )
            handle_removed_partitions(self._names, self._context, action, self._store, space)
        release(source)

    def _fail_unknown(self, unknown: Sequence[str]) -> None:
        remedy = "Delete it in Dagster."
        for key in unknown:
            reason = f"partition {key!r} was added to Dagster and is not how a key of the catalog is written. {remedy}"
            self._outcome.failures[key] = Failure(key, reason, remedy=remedy, in_source=False)

    def _register(self, partitions: Iterable[str]) -> None:
        new = [
            key
            for key in map(to_partition_key, partitions)
            if key not in self._catalogued.registered
        ]
        for keys in in_chunks(new):
            self._context.instance.add_dynamic_partitions(self._names.partitions_name, keys)

    def _skip_removed(self, removed: list[str]) -> None:
        """Leave partitions that were removed from the source as they are; a backfill repeats their
        last events."""
        self._outcome.removed = removed
        if not removed:
            return
        self._context.log.warning(
            f"{len(removed):,} skipped, removed from the source: {named(map(repr, removed))}. Their files and events "
            "stay as they are; the setting removed_partitions decides about them."
        )
        if self._in_backfill:  # unchanged, so that what was out of date stays so
            for event in last_embeddings(
                self._names, self._context.instance, self._catalogued, removed
            ):
                self._events.repeated(event)

    def _bring_up_to_date(self, candidates: Sequence[Partition]) -> Space:
        known = self._known_space()
        with self._resources.encoder.pool() as pool:
            self._require_same_model(pool, known)
            # Another space: the first run of one, or the content of the model has changed.
            is_known = known is not None and known.spec_sha256 == pool.space.spec_sha256
            work = self._worklist(
                candidates, known if known is not None and is_known else pool.space
            )
            self._take(work)
            run = self._new_run(pool, work)
            found_fresh = self._embed(run, pool, work)
        self._report_known(work, found_fresh)
        return run.space

    def _worklist(self, candidates: Sequence[Partition], space: Space) -> Worklist:
        outputs = OutputState(self._store, space.name)
        footers = self._outcome.footers
        work = make_worklist(candidates, outputs, space, self._config, self._record, footers)
        for difference in work.differing[:FAILURES_LOGGED]:
            self._context.log.warning(difference)
        if len(work.differing) > FAILURES_LOGGED:
            files = counted(len(work.differing), "file")
            self._context.log.warning(f"{files} in all, each unlike its facts or its source")
        return work

    def _take(self, work: Worklist) -> None:
        fresh = {receipt.key for receipt in (*work.fresh, *work.adopted)}
        remove_staged(self._store, work.outputs.space, fresh)
        self._outcome.fresh |= fresh
        for failure in work.failures:
            self._events.failure(failure)

    def _known_space(self) -> Space | None:
        is_unattended = self._unattended is not None
        space = known_space(self._names, self._resources, self._store, unattended=is_unattended)
        expected = self._unattended.expected_space if self._unattended else None
        if expected and (space is None or space.name != expected):
            now = repr(space.name) if space else "one that the output does not have"
            known = [each for each in list_spaces(self._store) if each.name == expected]
            was = nearest_spaces(self._resources.encoder.encoding_spec(), known) or repr(expected)
            raise ConfigError(
                f"the run was launched for the space {was}, and the settings now mean {now}. Launch "
                f"{self._names.refresh_job} by hand to use that space."
            )
        return space

    def _require_same_model(self, pool: EncoderPool, space: Space | None) -> None:
        if self._unattended and space and pool.space.spec_sha256 != space.spec_sha256:
            raise ConfigError(
                f"the model {self._resources.encoder.model!r} is not as it was for the space {space.name!r}: "
                f"{model_difference(pool.space, space)}. Nothing was encoded. Launch {self._names.refresh_job} by "
                "hand to begin a space for what it is now."
            )

    def _new_run(self, pool: EncoderPool, work: Worklist) -> EmbeddingRun | ClusterRun[Any]:
        force, resources = self._config.force, self._resources
        if resources.encoder.cluster == "none":
            run = run_of(resources, work.todo, self._store, pool, force=force, outputs=work.outputs)
        else:
            warn, refused = self._context.log.warning, work.refused
            run = cluster_run_of(resources, work.todo, pool, warn, force=force, refused=refused)
            self._outcome.machines = run.work
        run.report.price_per_hour = resources.encoder.price_per_hour
        self._outcome.report = run.report
        to_do, space = counted(len(work.todo), "partition"), run.space
        self._context.log.info(f"{to_do} to do, space {space.title} ({space.name})")
        return run

    def _embed(
        self, run: EmbeddingRun | ClusterRun[Any], pool: EncoderPool, work: Worklist
    ) -> list[Receipt]:
        """Run, then judge the footers of its files; return receipts of what the run found fresh."""
        fresh: list[Receipt] = []
        rows: dict[str, int] = {}
        progress = Progress(work.todo, run)
        log_progress = lambda: self._context.log.info(progress.line())  # noqa: E731
        try:
            with (
                every(LINE_SECONDS, log_progress, "surge-progress"),
                closing(events_of(run, pool, self._store)) as events,
            ):
                for event in events:
                    self._outcome.count(event)
                    progress.count(event)
                    match event:
                        case SuperBatchReport():
                            if event.index == 0:
                                self._context.log.info(_encoder_line(run.report))
                            if event.is_slow:
                                self._context.log.warning(event.slow_message)
                            # the run may take days
                            report_readers_space(self._names, self._context, self._store)
                            self._events.superbatch(event, run.space)
                        case Failure():
                            self._events.failure(event)
                        case Receipt(action="fresh"):
                            fresh.append(event)
                            rows[event.key] = event.rows
                        case Receipt():
                            rows[event.key] = event.rows
                            self._events.embedding(event)
        finally:
            self._outcome.published |= run.published
        self._events.end_of_superbatches()
        failed = self._judge_footers(work.outputs, rows, run.space) if rows else set[str]()
        return [receipt for receipt in fresh if receipt.key not in failed]

    def _judge_footers(self, outputs: OutputState, rows: dict[str, int], space: Space) -> set[str]:
        """Report which of these files are not what they should be; return their catalog keys."""
        if outputs.space != space.name:  # the output has the space under another name
            outputs = OutputState(self._store, space.name)

        failed: set[str] = set()
        partitions = self._outcome.partitions
        for failure in footer_failures(outputs, rows, partitions, space, self._outcome.footers):
            self._events.failure(failure)
            failed.add(failure.key)
        return failed

    def _report_known(self, work: Worklist, found_fresh: Sequence[Receipt]) -> None:
        """Adopt files that are not on record; in a backfill, report every other fresh file as
        reused."""
        for receipt in work.adopted:
            self._events.embedding(receipt, adopted=True)
        for receipt in (*work.fresh, *found_fresh):
            if self._in_backfill:
                self._events.embedding(receipt, reused=True)
            else:
                self._events.unchanged(receipt)


def _encoder_line(report: RunReport) -> str:
    device = f"{report.device} ({report.hardware})" if report.hardware else report.device
    # of each machine
    sizes = f", SuperBatches of {report.b_min:,} to {report.b_max:,} texts" if report.b_max else ""
    return f"encoding on {device} in {report.precision}{sizes}"


def _return_freed_memory() -> None:
    """Let Arrow allocate with jemalloc from here on, unless the environment says with what;
    `commands` says why."""
    if "ARROW_DEFAULT_MEMORY_POOL" not in os.environ:
        with suppress(NotImplementedError):  # there are builds of pyarrow without it
            pa.set_memory_pool(pa.jemalloc_memory_pool())
