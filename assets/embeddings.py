"""The embeddings: the one asset that is executed, and the jobs that bring all of it, or any part of it, up to date.

A run of the asset covers the partitions that were chosen for it, which Dagster takes as one range. The jobs cover what
their config names, or everything: an asset with partitions cannot be launched without choosing a range, so they are an
op that does the same work and logs the same events, and that sees partitions that no sensor has registered yet.

Dagster reads the annotations of ops while it makes them, so they must not be strings here.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import dagster as dg
from dagster._core.definitions.composition import PendingNodeInvocation

from surge_dagster.assets.checks import evaluation_of, run_check_results, run_checks
from surge_dagster.assets.failures import failure_of, tell_of_failures
from surge_dagster.assets.heartbeats import signed
from surge_dagster.assets.launch import LaunchConfig
from surge_dagster.assets.lineage import CODE_VERSION
from surge_dagster.assets.names import CatalogNames
from surge_dagster.assets.outcome import Outcome
from surge_dagster.assets.pool_limit import POOL
from surge_dagster.assets.refresh import Refresh
from surge_dagster.assets.run_retries import RUN_TAGS
from surge_dagster.check_policy import CheckPolicy
from surge_dagster.engine.encoder.spec import FileFormat
from surge_dagster.engine.errors import ConfigError, EncoderError, TransientError
from surge_dagster.engine.waiting import rest

_RETRIES = 2
_RETRY_SECONDS = 5


def embeddings(names: CatalogNames, policy: CheckPolicy, file_format: FileFormat = "parquet") -> dg.AssetsDefinition:
    """The asset with a file per partition, and the checks that end its runs.

    Args:
        file_format: of the files, for whoever looks at the asset.
    """
    attempts = _Attempts(names, policy)

    @dg.multi_asset(
        name=names.embeddings_op,
        specs=[
            dg.AssetSpec(
                names.embeddings,
                deps=[names.source_partitions, names.superbatches],
                skippable=True,
                code_version=CODE_VERSION,
                group_name=names.group,
                kinds={file_format, "pytorch"},
                description=(
                    f"One {file_format.capitalize()} file per catalog partition with id, text and embedding, complete "
                    "or not there at all. A run skips what is up to date; `force: true` in its config encodes it again."
                ),
            )
        ],
        check_specs=run_checks(names, policy),
        partitions_def=names.partitions,
        backfill_policy=dg.BackfillPolicy.single_run(),
        pool=POOL,
        required_resource_keys=names.resource_keys,
    )
    def embed(context: dg.AssetExecutionContext, config: LaunchConfig) -> Iterator[dg.AssetCheckResult]:
        """Embed the partitions of this run that are missing or stale."""
        chosen = context.partition_keys if context.has_partition_key or context.has_partition_key_range else None
        outcome = attempts.make(context.op_execution_context, config, chosen)
        yield from run_check_results(names, policy, outcome)
        if outcome.failures:
            raise failure_of(names, outcome)

    return embed


def embedding_jobs(names: CatalogNames, policy: CheckPolicy) -> tuple[dg.JobDefinition, dg.JobDefinition]:
    """The job that is for the whole catalog, and the one that is told its partitions; either takes the same config."""
    attempts = _Attempts(names, policy)

    @dg.op(name=names.refresh_op, pool=POOL, out=dg.Out(dg.Nothing), required_resource_keys=names.resource_keys)
    def refresh(
        context: dg.OpExecutionContext, config: LaunchConfig
    ) -> Iterator[dg.AssetCheckEvaluation | dg.Output[None]]:
        """Embed whatever is missing or stale among those that the config names, else in the whole catalog."""
        outcome = attempts.make(context, config, None)
        for result in run_check_results(names, policy, outcome):
            yield evaluation_of(names, result)
        if outcome.failures:
            raise failure_of(names, outcome)
        yield dg.Output(None)

    def job(name: str, node: dg.OpDefinition | PendingNodeInvocation, description: str) -> dg.JobDefinition:
        @dg.job(name=name, executor_def=dg.in_process_executor, run_tags=RUN_TAGS, description=description)
        def compose() -> None:
            node()

        return compose

    return (
        job(
            names.refresh_job,
            refresh,
            "Everything that is missing or stale, in one run. Nothing is chosen, and there may be nothing to do.",
        ),
        job(
            names.embed_job,
            refresh.alias(names.embeddings_op),  # configured as the asset is
            "Any partitions in one run, however scattered: the config names their keys, or a state they are in.",
        ),
    )


@dataclass(frozen=True, slots=True)
class _Attempts:
    """The attempts of runs in this process.

    Attributes:
        names: of the catalog.
        policy: of its checks.
        before: what became of a run's last attempt, by run id, for the one that follows it in the same process.
    """

    names: CatalogNames
    policy: CheckPolicy
    before: dict[str, Outcome] = field(default_factory=dict)

    def make(self, context: dg.OpExecutionContext, config: LaunchConfig, chosen: Iterable[str] | None) -> Outcome:
        """One attempt at a run; decides what Dagster retries: crashes and what is transient, no bad data or settings.

        What failed for good is told before it returns.

        A retry policy on the op would also retry a run that was terminated, since Dagster applies it to interrupts.
        """
        with signed(context):
            outcome = self._make(context, config, chosen)
            tell_of_failures(self.names, context, outcome)
            return outcome

    def _make(self, context: dg.OpExecutionContext, config: LaunchConfig, chosen: Iterable[str] | None) -> Outcome:
        resources = self.names.resources(context.resources)
        outcome = Outcome.after(self.before.pop(context.run_id, None), self.policy)
        try:
            named = config.named_keys()
            work = Refresh(
                self.names,
                context,
                config,
                resources.catalog,
                resources.encoder,
                resources.output,
                outcome,
            )
            work.run(named if named is not None else chosen)
        except ConfigError as error:
            outcome.end_by(error)
            tell_of_failures(self.names, context, outcome)
            raise dg.Failure(str(error), allow_retries=False) from error
        except (EncoderError, TransientError) as error:
            outcome.end_by(error)
            context.log.error(str(error))
            raise self._retry(context, outcome) from error
        if any(failure.transient for failure in outcome.failures) and context.retry_number < _RETRIES:
            raise self._retry(context, outcome)
        return outcome

    def _retry(self, context: dg.OpExecutionContext, outcome: Outcome) -> dg.RetryRequested:
        """What has Dagster make another attempt after a wait; where none is left, its failures are told."""
        if context.retry_number >= _RETRIES:
            tell_of_failures(self.names, context, outcome)
        else:
            self.before[context.run_id] = outcome
            # Spread, so that runs that one fault has ended do not all come back at the same moment. It waits here and
            # not in Dagster, which hears of a person's "Terminate" only afterwards.
            rest(_RETRY_SECONDS * 2**context.retry_number * random.uniform(0.5, 1.5))
        return dg.RetryRequested(max_retries=_RETRIES)
