"""Bringing partitions up to date: what the asset `embeddings` and the job `catalog_refresh` both do.

The engine decides and encodes; this module tells Dagster. Every partition's event goes to the event writer the moment
its file is complete and was read back. A run that dies loses the events of its last second and no file: the next run
adopts files that are not on record, once they were read back too. What does not read back is encoded again. Nothing is
yielded to Dagster before the engine has ended. A generator that is suspended when a run is terminated would only be
closed when it is collected, and its threads with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property, partial

import dagster as dg

from surge_dagster.assets import lineage, superbatches
from surge_dagster.assets.event_writer import EventWriter
from surge_dagster.assets.launch import LaunchConfig
from surge_dagster.assets.lineage import read_catalogued
from surge_dagster.assets.names import CatalogNames
from surge_dagster.assets.outputs import file_failure, known_space, published
from surge_dagster.assets.partition_events import PartitionEvent
from surge_dagster.assets.partition_keys import from_partition_key, to_partition_key
from surge_dagster.assets.planned import PlansAgain
from surge_dagster.assets.resumed import done_before
from surge_dagster.assets.run_findings import RunFindings
from surge_dagster.assets.selection import Select, catalog_keys, failed_on_record
from surge_dagster.assets.source_partitions import in_chunks, observation
from surge_dagster.check_policy import CheckPolicy
from surge_dagster.engine.catalog import Partition
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.spec import Space
from surge_dagster.engine.errors import ConfigError, StoreUnavailable, TransientError
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.output.left_overs import sweep_left_overs
from surge_dagster.engine.output.spaces import require_format
from surge_dagster.engine.run import EmbeddingRun
from surge_dagster.engine.telemetry import Failure, Receipt, RunReport, SuperBatchReport
from surge_dagster.resources import CatalogSource, Encoder, OutputStore

# The check lists more of them; a log line costs as much as an event.
_FAILURES_LOGGED = 100
# Of the grace time, for publishing. The events of that are stored meanwhile; the rest of the time is for the last ones.
_PUBLISH_SHARE = 0.75


@dataclass(slots=True)
class Outcome:
    """What became of a run.

    Attributes:
        report: the engine's figures.
        partitions: those the run was about, by catalog key.
        failures: what was refused or could not be published.
        findings: what the engine's events showed beside that.
    """

    report: RunReport = field(default_factory=RunReport)
    partitions: dict[str, Partition] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    findings: RunFindings = field(default_factory=RunFindings)

    @property
    def refused(self) -> list[Failure]:
        """Failures that are about the content of a partition of the catalog, so that it has to change."""
        return [failure for failure in self.failures if not failure.transient and failure.key in self.partitions]


class Refresh:
    """One run over the catalog or a part of it.

    Args:
        names: of the catalog.
        context: of the op whose events they are.
        config: what the run was told at its launch.
        catalog, encoder, output: the resources.
        policy: of the checks that end the run.
    """

    def __init__(
        self,
        names: CatalogNames,
        context: dg.OpExecutionContext,
        config: LaunchConfig,
        catalog: CatalogSource,
        encoder: Encoder,
        output: OutputStore,
        policy: CheckPolicy,
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
        self._sound: set[str] = set()  # keys of fresh files that were read back
        self._damaged: set[str] = set()
        self._catalogued = read_catalogued(names, context.instance)
        self._engine: EmbeddingRun | None = None
        self._events = EventWriter(
            context,
            grace_seconds=encoder.grace_seconds,
            stopped_at=lambda: self._engine.stopped_at if self._engine else None,
            before=PlansAgain(names, context).before,
        )
        self.outcome = Outcome(findings=RunFindings(policy))

    def run(self, partition_keys: Iterable[str] | None, already_refused: Mapping[str, Failure]) -> Outcome:
        """Embed what is missing or stale and tell Dagster about it.

        Args:
            partition_keys: as Dagster names them, or as a person typed them; None is the whole catalog.
            already_refused: what an earlier attempt of this run refused, by key; not tried again.

        Raises:
            ConfigError: the catalog, the output, the model or the space is not what it must be.
            EncoderError: the pool failed for good; what was published by then is on record.
            EventsNotStored: Dagster's event log refused events; the next run adopts what was published.
        """
        chosen = self._select(partition_keys)
        self._register(chosen)
        with self._events:
            self._bring_up_to_date(chosen, already_refused)
        return self.outcome

    def _bring_up_to_date(self, chosen: dict[str, Partition], already_refused: Mapping[str, Failure]) -> None:
        space = self._known_space()
        self.outcome.failures += already_refused.values()
        candidates = [partition for partition in chosen.values() if partition.key not in already_refused]
        fresh, todo, unreadable = self._split(candidates, space)
        if todo or space is None:
            with self._encoder.start() as pool:
                self._guard_pool(pool, space)
                if space and pool.space.spec_sha256 != space.spec_sha256:
                    # The model behind the name has changed: another space.
                    fresh, todo, unreadable = self._split(candidates, None)
                space, more = self._embed(pool, todo)
                fresh += more
        else:
            sweep_left_overs(self._store)
        for failure in unreadable:
            self._fail(failure)
        self.outcome.report.space = space.name
        self.outcome.report.dimension = space.dimension
        fresh += self._keep_gone(space)
        self.outcome.report.partitions_skipped = len(fresh)
        self._tell_of_fresh(fresh, space)

    def _select(self, partition_keys: Iterable[str] | None) -> dict[str, Partition]:
        catalog = self._catalog.open()
        listed = {partition.key: partition for partition in catalog}
        if partition_keys is None:
            wanted = dict.fromkeys(listed)
        elif self._config.is_typed:
            wanted = dict.fromkeys(catalog_keys(partition_keys, listed, catalog.url))
        else:
            wanted = dict.fromkeys(map(from_partition_key, partition_keys))
        chosen = {key: partition for key, partition in listed.items() if key in wanted}
        self.outcome.partitions = chosen
        self._gone = [key for key in wanted if key not in chosen]
        return chosen

    def _register(self, chosen: dict[str, Partition]) -> None:
        new = [key for key in map(to_partition_key, chosen) if key not in self._catalogued.registered]
        for keys in in_chunks(new):
            self._context.instance.add_dynamic_partitions(self._names.partitions_name, keys)

    def _known_space(self) -> Space | None:
        """The space of this run as the output knows it, without loading a model; None when it is to be begun."""
        space = known_space(self._names, self._store, self._encoder.spec(), unattended=self._config.unattended)
        expected = self._config.expected_space
        if expected and (space is None or space.name != expected):
            now = repr(space.name) if space else "one that the output does not have"
            raise ConfigError(
                f"the run was launched for the space {expected!r}, and the settings now mean {now}. "
                f"Launch {self._names.refresh_job} by hand to go on with that."
            )
        if space is not None:
            require_format(self._store, space, self._output.file_format())
        return space

    def _guard_pool(self, pool: EncoderPool, space: Space | None) -> None:
        if self._config.unattended and space and pool.space.spec_sha256 != space.spec_sha256:
            raise ConfigError(
                f"the model {self._encoder.model!r} is not the one that made the space {space.name!r}: its content has "
                f"changed. Nothing was encoded. Launch {self._names.refresh_job} by hand to begin a space for the new "
                "one."
            )

    def _split(
        self, candidates: list[Partition], space: Space | None
    ) -> tuple[list[Receipt], list[Partition], list[Failure]]:
        """Receipts of what is fresh, partitions that are selected and need work, and those nobody can tell of now."""
        select = self._config.select
        outputs = OutputState(self._store, space.name, space.file_format) if space else None
        failed = self._shown_as_failed if select is Select.failed else set[str]()
        done = done_before(self._names, self._context) if self._config.force else set[str]()
        fresh: list[Receipt] = []
        todo: list[Partition] = []
        unreadable: list[Failure] = []
        for partition in outputs.looked_at(candidates) if outputs else candidates:
            partition_key = to_partition_key(partition.key)
            try:
                status = outputs.status(partition) if outputs else "missing"
                selected = select.takes(status, partition_key in failed)
                again = self._config.force and selected and partition_key not in done
                receipt = published(outputs, partition.key) if outputs and status == "fresh" and not again else None
                if receipt and space and not self._is_sound(receipt, partition, space):
                    receipt, selected = None, select.takes("missing", partition_key in failed)
            except StoreUnavailable:
                raise  # of every partition, and each would wait for it anew
            except TransientError as error:
                unreadable.append(Failure(partition.key, str(error), transient=True))
                continue
            if receipt:
                fresh.append(receipt)
            elif selected:
                todo.append(partition)
        return fresh, todo, unreadable

    def _keep_gone(self, space: Space) -> list[Receipt]:
        """Receipts of partitions that left the catalog and still have their file; the others count as failures."""
        if not self._gone:
            return []
        outputs = OutputState(self._store, space.name, space.file_format)
        outputs.look_at(self._gone)
        kept: list[Receipt] = []
        remedy = "Delete it in Dagster, or put it back."
        for key in self._gone:
            failure = Failure(key, f"partition {key!r} is not in the catalog any more. {remedy}", remedy=remedy)
            try:
                receipt = published(outputs, key)
            except TransientError as error:
                receipt, failure = None, Failure(key, str(error), transient=True)
            if receipt:
                kept.append(receipt)
            else:
                self.outcome.failures.append(failure)
        return kept

    def _embed(self, pool: EncoderPool, todo: list[Partition]) -> tuple[Space, list[Receipt]]:
        """Run the engine over `todo`; gives the space, and receipts of what turned out to be fresh after all."""
        run = EmbeddingRun(
            todo,
            self._store,
            pool,
            self._encoder.thresholds(),
            force=self._config.force,
            again=self._damaged,
            include_text=self._output.include_text,
            file_format=self._output.file_format(),
            memory_limit=self._encoder.memory_limit_bytes,
            grace_seconds=_PUBLISH_SHARE * self._encoder.grace_seconds,
        )
        self._engine, self.outcome.report = run, run.report
        self._context.log.info(
            f"{len(todo):,} partitions to do on {pool.device} in {pool.precision}, space {run.space.name}, "
            f"SuperBatches of {run.bounds.b_min:,} to {run.bounds.b_max:,} texts"
        )
        fresh: list[Receipt] = []
        superbatch_event: list[int] = []  # its storage id, once it is stored
        with closing(run.events()) as events:
            for event in events:
                self.outcome.findings.see(event)
                match event:
                    case SuperBatchReport():
                        superbatch_event = []
                        self._events.log(
                            superbatches.materialization(self._names, event, run.space.name), superbatch_event.append
                        )
                    case Failure():
                        self._fail(event)
                    case Receipt(action="fresh"):
                        fresh.append(event)
                    case Receipt():
                        encoded_in = superbatch_event if event.superbatch is not None else []
                        if self._reads_back(event.key, run.space):
                            self._observe(event.key)
                            self._events.log_after(partial(self._materialization, event, encoded_in))
        if run.report.superbatches:
            self._events.log(superbatches.materialization_of_run(self._names, run.report, self.outcome.findings))
        return run.space, fresh

    def _is_sound(self, receipt: Receipt, partition: Partition, space: Space) -> bool:
        """Whether a fresh file is on record, or reads back; if it does neither, its partition is encoded again.

        Raises:
            TransientError: the output does not answer.
        """
        if self._is_on_record(receipt):
            return True
        failure = file_failure(partition, self._store, space)
        (self._sound if failure is None else self._damaged).add(receipt.key)
        if failure is not None:
            self._context.log.warning(failure.reason)
        return failure is None

    def _is_on_record(self, receipt: Receipt) -> bool:
        """Whether Dagster shows a file as materialized from the source version that the partition has."""
        partition_key, partition = to_partition_key(receipt.key), self.outcome.partitions.get(receipt.key)
        source_version = partition.source_version if partition is not None else None
        return partition_key not in self._shown_as_failed and self._catalogued.knows(
            partition_key, receipt.desired_version, source_version
        )

    @cached_property
    def _shown_as_failed(self) -> set[str]:
        return failed_on_record(self._names, self._context.instance)

    def _reads_back(self, key: str, space: Space) -> bool:
        """Whether a published file is what its source says it must be; if not, the partition has failed."""
        partition = self.outcome.partitions.get(key)
        if partition is None:
            return True
        try:
            failure = file_failure(partition, self._store, space)
        except StoreUnavailable:
            raise  # the run ends; what is published by now and not told of is adopted by the next one
        except TransientError as error:
            failure = Failure(key, str(error), transient=True)
        if failure is not None:
            self._fail(failure)
        return failure is None

    def _fail(self, failure: Failure) -> None:
        self._observe(failure.key)  # the sensor leaves alone what has failed since it was observed
        self.outcome.failures.append(failure)
        if len(self.outcome.failures) <= _FAILURES_LOGGED:
            self._context.log.error(failure.reason)

    def _tell_of_fresh(self, fresh: list[Receipt], space: Space) -> None:
        """Adopt files that are not on record; in a backfill, say of every other one that it was reused.

        Dagster ends a backfill as failed when a partition that it covers has no event from its run, and shows one that
        an earlier run failed on as failed until there is an event again, however fresh its file is: that one is read
        back first.
        """
        for receipt in fresh:
            known = self._is_on_record(receipt)
            self._observe(receipt.key)
            if not known and receipt.key not in self._sound and not self._reads_back(receipt.key, space):
                continue
            if not known or self._backfill:
                make = partial(self._materialization, receipt, [], reused=known, adopted=not known)
                self._events.log_after(make)

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
