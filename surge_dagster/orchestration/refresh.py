"""Bringing partitions up to date: what the asset `embeddings` and the job `catalog_refresh` both do.

The engine decides and encodes; this module tells Dagster. Every partition's event goes to the event writer the moment
its file is complete and was read back. A run that dies loses the events of its last second and no file: the next run
adopts files that are not on record, once they were read back too. What does not read back is encoded again. Nothing is
yielded to Dagster before the engine has ended. A generator that is suspended when a run is terminated would only be
closed when it is collected, and its threads with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial

import dagster as dg

from surge_dagster.assets import superbatches
from surge_dagster.assets.source_partitions import in_chunks, observation
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError, TransientError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.output.spaces import require_format
from surge_dagster.engine.output.staging import sweep_orphan_files
from surge_dagster.engine.report import Failure, Receipt, SuperBatchReport
from surge_dagster.engine.run import EmbeddingRun
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.orchestration import lineage
from surge_dagster.orchestration.event_writer import EventWriter
from surge_dagster.orchestration.launch import LaunchConfig, require_expected_settings
from surge_dagster.orchestration.lineage import read_catalogued
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.outcome import Outcome
from surge_dagster.orchestration.outputs import known_space, published, refuse_to_begin
from surge_dagster.orchestration.partition_events import PartitionEvent
from surge_dagster.orchestration.partition_keys import (
    from_partition_key,
    is_canonical,
    to_partition_key,
    with_short_keys,
)
from surge_dagster.orchestration.planned import PlansAgain
from surge_dagster.orchestration.read_back import Found, ReadBack, unanswered
from surge_dagster.orchestration.removed_partitions import handle_removed_partitions
from surge_dagster.orchestration.selection import catalog_keys, named
from surge_dagster.orchestration.worklist import FAILURES_LOGGED, Survey, Surveyed
from surge_dagster.resources import CatalogSource, Encoder, OutputStore

# Of the grace time, for publishing. The events of that are stored meanwhile; the rest of the time is for the last ones.
_PUBLISH_SHARE = 0.75


class Refresh:
    """One run over the catalog or a part of it.

    Args:
        names: of the catalog.
        context: of the op whose events they are.
        config: what the run was told at its launch.
        catalog, encoder, output: the resources.
        outcome: of this attempt, which is filled while it goes on.
    """

    def __init__(
        self,
        names: CatalogNames,
        context: dg.OpExecutionContext,
        config: LaunchConfig,
        catalog: CatalogSource,
        encoder: Encoder,
        output: OutputStore,
        outcome: Outcome,
    ) -> None:
        self._names = names
        self._context = context
        self._config = config
        self._catalog = catalog
        self._encoder = encoder
        self._output = output
        self._store = output.open()
        self._backfill = "dagster/backfill" in context.run_tags
        self._gone: list[str] = []
        self._strangers: list[str] = []
        self._catalogued = read_catalogued(names, context.instance)
        self._survey = Survey(names, context, config, self._store, self._catalogued)
        self._engine: EmbeddingRun | None = None
        self._events = EventWriter(
            context,
            grace_seconds=encoder.grace_seconds,
            stopped_at=lambda: self._engine.stopped_at if self._engine else None,
            before=PlansAgain(names, context).before,
        )
        self.outcome = outcome

    def run(self, partition_keys: Iterable[str] | None) -> None:
        """Embed what is missing or stale and tell Dagster about it; `outcome` says what became of it.

        Args:
            partition_keys: as Dagster names them, or as a person typed them; None is the whole catalog.

        Raises:
            ConfigError: the catalog, the output, the model or the space is not what it must be.
            EncoderError: the pool failed for good; what was published by then is on record.
            EventsNotStored: Dagster's event log refused events; the next run adopts what was published.
        """
        chosen = self._select(partition_keys)
        self._register(chosen)
        with self._events:
            try:
                self._bring_up_to_date(chosen)
            finally:
                if self._engine is not None:
                    self.outcome.published |= self._engine.published

    def _bring_up_to_date(self, chosen: dict[str, Partition]) -> None:
        refused = {failure.key for failure in self.outcome.failures}
        candidates = [partition for partition in chosen.values() if partition.key not in refused]
        space = self._known_space()
        if space is not None:
            self._tell_space(space)
        surveyed = self._survey.look(candidates, space)
        if surveyed.todo or space is None:
            with self._encoder.start() as pool:
                self._guard_pool(pool, space)
                if space and pool.space.spec_sha256 != space.spec_sha256:
                    # The model behind the name has changed: another space.
                    surveyed = self._survey.look(candidates, None)
                self._take(surveyed)
                space, fresh = self._embed(pool, surveyed.todo)
                fresh += surveyed.fresh
        else:
            sweep_orphan_files(self._store)
            self._take(surveyed)
            fresh = surveyed.fresh
        self._tell_space(space)
        fresh += self._keep_gone(space)
        self._fail_strangers()
        self._tell_of_fresh(fresh, space)
        handle_removed_partitions(self._names, self._context, self._config.vanished, self._store, space)

    def _tell_space(self, space: Space) -> None:
        self.outcome.report.space = space.name
        self.outcome.report.dimension = space.dimension

    def _take(self, surveyed: Surveyed) -> None:
        """Enter what needs no encoding, so that it is told whatever ends the run."""
        self.outcome.fresh |= {receipt.key for receipt in surveyed.fresh}
        for failure in surveyed.unreadable:
            self._fail(failure)

    def _select(self, partition_keys: Iterable[str] | None) -> dict[str, Partition]:
        catalog, registered = self._catalog.open(), self._catalogued.registered
        listed = {partition.key: partition for partition in with_short_keys(catalog, registered)}
        if partition_keys is None:
            wanted = dict.fromkeys(listed)
        elif self._config.is_typed:
            wanted = dict.fromkeys(catalog_keys(partition_keys, listed, catalog.url))
        else:
            wanted = dict[str, None]()
            for partition_key in partition_keys:
                key = from_partition_key(partition_key)
                if key in listed or is_canonical(partition_key):
                    wanted[key] = None
                else:  # a person may add any text to Dagster's partitions
                    self._strangers.append(partition_key)
        chosen = {key: partition for key, partition in listed.items() if key in wanted}
        self.outcome.begin(chosen)
        self._gone = [key for key in wanted if key not in chosen]
        return chosen

    def _register(self, chosen: dict[str, Partition]) -> None:
        new = [key for key in map(to_partition_key, chosen) if key not in self._catalogued.registered]
        for keys in in_chunks(new):
            self._context.instance.add_dynamic_partitions(self._names.partitions_name, keys)

    def _known_space(self) -> Space | None:
        """The space of this run as the output knows it, without loading a model; None when it is to be begun."""
        spec, expected = self._encoder.spec(), self._config.expected_space
        resources = self._names.resources(self._context.resources)
        require_expected_settings(self._config, self._context.run_tags, resources)
        space = known_space(self._names, self._store, spec, unattended=False)
        if space is None and self._config.unattended:
            refuse_to_begin(self._names, self._store, spec)
        if expected and (space is None or space.name != expected):
            now = repr(space.name) if space else "one that the output does not have"
            raise ConfigError(
                f"the run was launched for the space {expected!r}, and the settings now mean {now}. "
                f"Launch {self._names.refresh_job} by hand to go on with that."
            )
        if space is not None:
            require_format(self._store, space, self._output.format)
        return space

    def _guard_pool(self, pool: EncoderPool, space: Space | None) -> None:
        bound = self._config.unattended or self._config.expected_space
        if bound and space and pool.space.spec_sha256 != space.spec_sha256:
            how = "by hand" if self._config.unattended else "without expected_space"
            raise ConfigError(
                f"the model {self._encoder.model!r} is not the one that made the space {space.name!r}: its content has "
                f"changed. Nothing was encoded. Launch {self._names.refresh_job} {how} to begin a space for the new "
                "one."
            )

    def _keep_gone(self, space: Space) -> list[Receipt]:
        """Receipts of partitions that left the catalog and still have their file.

        The others count as failures where a person asked for them. Where nobody did they may have left while the run
        waited: what is done about such partitions is the sensor's, and a failure would stay on record for good.
        """
        if not self._gone:
            return []
        outputs = OutputState(self._store, space.name, space.file_format)
        outputs.look_at(self._gone)
        kept: list[Receipt] = []
        remedy = "Delete it in Dagster, or put it back."
        for key in self._gone:
            try:
                receipt = published(outputs, key)
            except TransientError as error:
                self.outcome.fail(unanswered(key, error))
                continue
            if receipt:
                self.outcome.fresh.add(key)
                kept.append(receipt)
            elif self._config.unattended:
                self.outcome.gone.append(key)
            else:
                reason = f"partition {key!r} is not in the catalog any more. {remedy}"
                self.outcome.fail(Failure(key, reason, remedy=remedy, in_source=False))
        if gone := self.outcome.gone:
            self._context.log.warning(
                f"{len(gone):,} partitions have left the catalog since this run was asked for them, and are passed "
                f"over: {named(map(repr, gone))}. What becomes of them is the setting vanished."
            )
        return kept

    def _fail_strangers(self) -> None:
        remedy = "Delete it in Dagster."
        for key in self._strangers:
            reason = f"partition {key!r} was added to Dagster and is not how a key of the catalog is written. {remedy}"
            self.outcome.strangers.add(failure := Failure(key, reason, remedy=remedy, in_source=False))
            self.outcome.fail(failure)

    def _embed(self, pool: EncoderPool, todo: list[Partition]) -> tuple[Space, list[Receipt]]:
        """Run the engine over `todo`; gives the space, and receipts of what turned out to be fresh after all."""
        run = EmbeddingRun(
            todo,
            self._store,
            pool,
            self._encoder.superbatch_thresholds(self._catalog.max_text_bytes),
            force=self._config.force,
            again=self._survey.damaged,
            include_text=self._output.include_text,
            file_format=self._output.format,
            memory_limit=self._encoder.memory_limit_bytes,
            grace_seconds=_PUBLISH_SHARE * self._encoder.grace_seconds,
        )
        self._engine, self.outcome.report = run, run.report
        self._context.log.info(
            f"{len(todo):,} partitions to do on {pool.device} in {pool.precision}, space {run.space.name}, "
            f"SuperBatches of {run.bounds.b_min:,} to {run.bounds.b_max:,} texts"
        )
        fresh: list[Receipt] = []
        superbatch_events: dict[int, list[int]] = {}  # by SuperBatch, the storage id of its event once it is stored
        with ReadBack(self._store, run.space) as read_back, closing(run.events()) as events:
            for event in events:
                read_back.require_going_on()
                self.outcome.findings.see(event)
                match event:
                    case SuperBatchReport():
                        self._events.log(
                            superbatches.materialization(self._names, event, run.space.name),
                            superbatch_events.setdefault(event.index, []).append,
                        )
                    case Failure():
                        self._fail(event)
                    case Receipt(action="fresh"):
                        self.outcome.fresh.add(event.key)
                        fresh.append(event)
                    case Receipt():
                        encoded_in = [] if event.superbatch is None else superbatch_events.get(event.superbatch, [])
                        self._tell_when_read(read_back, event, partial(self._materialization, event, encoded_in))
        if run.report.superbatches:
            self._events.log(superbatches.materialization_of_run(self._names, run.report, self.outcome.findings))
        return run.space, fresh

    def _tell_when_read(self, read_back: ReadBack, receipt: Receipt, make: Callable[[], PartitionEvent]) -> None:
        """Log a file's event once it has turned out to be what its source says; else its partition has failed."""

        def tell(found: Found) -> None:
            if found is None:
                self.outcome.tried(receipt.key)
                self._observe(receipt.key)
                self._events.log_after(make)
            else:
                self.outcome.findings.counted.add(receipt.key)
                self._fail(found if isinstance(found, Failure) else unanswered(receipt.key, found))

        partition = self.outcome.partitions.get(receipt.key)
        if partition is None:
            tell(None)  # it left the catalog: there is nothing to read it beside
        else:
            read_back.look(partition, receipt.bytes, tell)

    def _fail(self, failure: Failure) -> None:
        self._observe(failure.key)  # the sensor leaves alone what has failed since it was observed
        self.outcome.fail(failure)
        if len(self.outcome.failures) <= FAILURES_LOGGED:
            self._context.log.error(failure.reason)

    def _tell_of_fresh(self, fresh: list[Receipt], space: Space) -> None:
        """Adopt files that are not on record; in a backfill, say of every other one that it was reused.

        Dagster ends a backfill as failed when a partition that it covers has no event from its run, and shows one that
        an earlier run failed on as failed until there is an event again, however fresh its file is: that one is read
        back first.
        """
        with ReadBack(self._store, space) as read_back:
            for receipt in fresh:
                known = self._survey.is_on_record(receipt, self.outcome.partitions.get(receipt.key))
                self._observe(receipt.key)
                if known or receipt.key in self._survey.sound:
                    self.outcome.tried(receipt.key)
                if known and not self._backfill:
                    continue
                make = partial(self._materialization, receipt, [], reused=known, adopted=not known)
                if known or receipt.key in self._survey.sound:
                    self._events.log_after(make)
                else:
                    self._tell_when_read(read_back, receipt, make)

    def _observe(self, key: str) -> bool:
        """Log the partition's source version if it has moved since it was observed last; whether it had.

        Not all of it at the start: with many partitions the first file would have to wait for minutes of events.
        """
        partition, partition_key = self.outcome.partitions.get(key), to_partition_key(key)
        record = self._catalogued
        if partition is None or record.observed.get(partition_key) == partition.source_version:
            return False
        self._events.log(
            observation(self._names, partition), partial(record.observation_ids.__setitem__, partition_key)
        )
        record.observed[partition_key] = partition.source_version
        return True

    def _materialization(
        self, receipt: Receipt, encoded_in: list[int], *, reused: bool = False, adopted: bool = False
    ) -> PartitionEvent:
        """The event of a partition, made when those of its source version and its SuperBatch are stored."""
        observed = self._catalogued.observation_ids.get(to_partition_key(receipt.key))
        superbatch_event = encoded_in[0] if encoded_in else None
        return lineage.materialization(self._names, receipt, observed, superbatch_event, reused=reused, adopted=adopted)
