"""Bringing partitions up to date: what the asset `embeddings` and the job `catalog_refresh` both do.

The engine decides and encodes; this module tells Dagster. Every partition gets its event the moment its file is
complete, so a run that dies has lost nothing that Dagster does not know or cannot find again: the next run adopts
valid files that are not on record. Nothing is yielded to Dagster before the engine has ended. A generator that is
suspended when a run is terminated would only be closed when it is collected, and its threads with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field

import dagster as dg

from surge_dagster.assets import lineage, superbatches
from surge_dagster.assets.launch import LaunchConfig, active_runs, process_tags
from surge_dagster.assets.lineage import read_catalogued
from surge_dagster.assets.names import CatalogNames
from surge_dagster.assets.outputs import file_violation, known_space, published
from surge_dagster.assets.partition_keys import from_partition_key, to_partition_key
from surge_dagster.assets.resumed import done_before
from surge_dagster.assets.selection import Select, catalog_keys, failed_on_record
from surge_dagster.assets.source_partitions import in_chunks, observation
from surge_dagster.engine.catalog import Partition
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.spec import Space
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.run import EmbeddingRun
from surge_dagster.engine.telemetry import Failure, Receipt, RunReport, SuperBatchReport
from surge_dagster.resources import CatalogSource, Encoder, OutputStore

# The check lists more of them; a log line costs as much as an event.
_FAILURES_LOGGED = 100


@dataclass(slots=True)
class Outcome:
    """What became of a run.

    Attributes:
        report: the engine's figures.
        partitions: those the run was about, by catalog key.
        failures: what was refused or could not be published.
    """

    report: RunReport = field(default_factory=RunReport)
    partitions: dict[str, Partition] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)


class Refresh:
    """One run over the catalog or a part of it.

    Args:
        names: of the catalog.
        context: of the op; events are logged through it, from the thread that calls `run`.
        config: what the run was told at its launch.
        catalog, encoder, output: the resources.
    """

    def __init__(
        self,
        names: CatalogNames,
        context: dg.OpExecutionContext,
        config: LaunchConfig,
        catalog: CatalogSource,
        encoder: Encoder,
        output: OutputStore,
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
        self._catalogued = read_catalogued(names, context.instance)
        self.outcome = Outcome()

    def run(self, partition_keys: Iterable[str] | None, already_refused: Mapping[str, Failure]) -> Outcome:
        """Embed what is missing or stale and tell Dagster about it.

        Args:
            partition_keys: as Dagster names them, or as a person typed them; None is the whole catalog.
            already_refused: what an earlier attempt of this run refused, by key; not tried again.

        Raises:
            ConfigError: the catalog, the output, the model or the space is not what it must be.
            EncoderError: the pool failed for good; what was published by then is on record.
        """
        self._sign()
        chosen = self._select(partition_keys)
        self._register(chosen)
        space = self._known_space()
        self.outcome.failures += already_refused.values()
        candidates = [partition for partition in chosen.values() if partition.key not in already_refused]
        fresh, todo = self._split(candidates, space)
        if todo or space is None:
            with self._encoder.start() as pool:
                self._guard_pool(pool, space)
                if space and pool.space.spec_sha256 != space.spec_sha256:
                    fresh, todo = self._split(candidates, None)  # the model behind the name has changed: another space
                space, more = self._embed(pool, todo)
                fresh += more
        self.outcome.report.space = space.name
        self.outcome.report.dimension = space.dimension
        fresh += self._keep_gone(space)
        self.outcome.report.partitions_skipped = len(fresh)
        self._tell_of_fresh(fresh, space)
        return self.outcome

    def _sign(self) -> None:
        """Leave on the run which process executes it, so that a run whose process died can be told; tell others."""
        step, run_id = self._context.get_step_execution_context(), self._context.run_id
        self._context.instance.add_run_tags(run_id, process_tags(step, run_id))
        for _ in active_runs(self._context.instance, lambda run: True):
            pass  # what matters is that those whose process is gone are declared failed

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
        return space

    def _guard_pool(self, pool: EncoderPool, space: Space | None) -> None:
        if self._config.unattended and space and pool.space.spec_sha256 != space.spec_sha256:
            raise ConfigError(
                f"the model {self._encoder.model!r} is not the one that made the space {space.name!r}: its content has "
                f"changed. Nothing was encoded. Launch {self._names.refresh_job} by hand to begin a space for the new "
                "one."
            )

    def _split(self, candidates: list[Partition], space: Space | None) -> tuple[list[Receipt], list[Partition]]:
        """Receipts of what is fresh, and the partitions that need work and are of the state that was selected."""
        instance, select = self._context.instance, self._config.select
        outputs = OutputState(self._store, space.name) if space else None
        failed = failed_on_record(self._names, instance) if select is Select.failed else set[str]()
        done = done_before(self._names, self._context) if self._config.force else set[str]()
        fresh: list[Receipt] = []
        todo: list[Partition] = []
        for partition in candidates:
            partition_key = to_partition_key(partition.key)
            status = outputs.status(partition) if outputs else "missing"
            selected = select.takes(status, partition_key in failed)
            again = self._config.force and selected and partition_key not in done
            receipt = published(outputs, partition.key) if outputs and status == "fresh" and not again else None
            if receipt:
                fresh.append(receipt)
            elif selected:
                todo.append(partition)
        return fresh, todo

    def _keep_gone(self, space: Space) -> list[Receipt]:
        """Receipts of partitions that left the catalog and still have their file; the others count as failures."""
        if not self._gone:
            return []
        outputs = OutputState(self._store, space.name)
        found = {key: published(outputs, key) for key in self._gone}
        remedy = "Delete it in Dagster, or put it back."
        self.outcome.failures += [
            Failure(key, f"partition {key!r} is not in the catalog any more. {remedy}", remedy=remedy)
            for key, receipt in found.items()
            if receipt is None
        ]
        return [receipt for receipt in found.values() if receipt]

    def _embed(self, pool: EncoderPool, todo: list[Partition]) -> tuple[Space, list[Receipt]]:
        """Run the engine over `todo`; gives the space, and receipts of what turned out to be fresh after all."""
        run = EmbeddingRun(
            todo,
            self._store,
            pool,
            self._encoder.thresholds(),
            force=self._config.force,
            include_text=self._output.include_text,
            memory_limit=self._encoder.memory_limit_bytes,
            grace_seconds=self._encoder.grace_seconds,
        )
        self.outcome.report = run.report
        self._context.log.info(
            f"{len(todo):,} partitions to do on {pool.device} in {pool.precision}, space {run.space.name}, "
            f"SuperBatches of {run.bounds.b_min:,} to {run.bounds.b_max:,} texts"
        )
        fresh: list[Receipt] = []
        superbatch_event: int | None = None
        with closing(run.events()) as events:
            for event in events:
                match event:
                    case SuperBatchReport():
                        self._log(superbatches.materialization(self._names, event, run.space.name))
                        superbatch_event = self._last_superbatch_event()
                    case Failure():
                        self._fail(event)
                    case Receipt(action="fresh"):
                        fresh.append(event)
                    case Receipt():
                        encoded_in = superbatch_event if event.superbatch is not None else None
                        if self._reads_back(event.key, run.space):
                            observed = self._observed(event.key)
                            self._log(lineage.materialization(self._names, event, observed, encoded_in))
        return run.space, fresh

    def _reads_back(self, key: str, space: Space) -> bool:
        """Whether a published file is what its source says it must be; if not, the partition has failed."""
        partition = self.outcome.partitions.get(key)
        if partition is None:
            return True
        wrong = file_violation(partition, self._store, space)
        if wrong is None or partition.current_source_version() != partition.source_version:
            return True  # right when it was read; if the source has changed since, the next run will see to it
        self._fail(Failure(key, f"partition {key!r}: {wrong}"))
        return False

    def _fail(self, failure: Failure) -> None:
        self._observed(failure.key)  # the sensor leaves alone what has failed since it was observed
        self.outcome.failures.append(failure)
        if len(self.outcome.failures) <= _FAILURES_LOGGED:
            self._context.log.error(failure.reason)

    def _tell_of_fresh(self, fresh: list[Receipt], space: Space) -> None:
        """Adopt files that are not on record; in a backfill, say of every other one that it was reused.

        Dagster ends a backfill as failed when a partition that it covers has no event from its run.
        """
        for receipt in fresh:
            observed = self._observed(receipt.key)
            known = self._catalogued.knows(receipt.key, receipt.desired_version)
            if not known and not self._reads_back(receipt.key, space):
                continue
            if not known or self._backfill:
                self._log(lineage.materialization(self._names, receipt, observed, reused=known, adopted=not known))

    def _observed(self, key: str) -> int | None:
        """Storage id of the observation of the partition's source version, which is logged first if it has moved.

        Not all of it at the start: with many partitions the first file would have to wait for minutes of events.
        """
        partition, partition_key = self.outcome.partitions.get(key), to_partition_key(key)
        record = self._catalogued
        if partition and record.observed.get(partition_key) != partition.source_version:
            self._log(observation(self._names, partition))
            stored = self._context.instance.get_latest_storage_id_by_partition(
                self._names.source_partitions, dg.DagsterEventType.ASSET_OBSERVATION, {partition_key}
            )
            record.observed[partition_key] = partition.source_version
            record.observation_ids.update(stored)
        return record.observation_ids.get(partition_key)

    def _last_superbatch_event(self) -> int | None:
        records = self._context.instance.fetch_materializations(self._names.superbatches, limit=1).records
        return records[0].storage_id if records else None

    def _log(self, event: dg.AssetMaterialization | dg.AssetObservation) -> None:
        self._context.log_event(event)
        for _ in self._context.consume_events():
            pass  # it is stored by now; the context would keep it in memory until the step ends (4 kB each)
