"""The embeddings: the one asset that is executed, and the jobs that bring all of it, or any part of it, up to date.

A run of the asset covers the partitions that were chosen for it, which Dagster takes as one range. The jobs cover what
their config names, or everything: an asset with partitions cannot be launched without choosing a range, so they are an
op that does the same work and logs the same events, and that sees partitions that no sensor has registered yet.

Dagster reads the annotations of ops while it makes them, so they must not be strings here.
"""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import dagster as dg

from surge_dagster.assets.checks import evaluation_of, run_check_results, run_checks
from surge_dagster.check_policy import CheckPolicy
from surge_dagster.engine.errors import EncoderError, SurgeError, TransientError
from surge_dagster.engine.model.spec import FileFormat
from surge_dagster.engine.support.waiting import rest
from surge_dagster.orchestration.active_runs import record_process
from surge_dagster.orchestration.asset_events import CODE_VERSION
from surge_dagster.orchestration.failures import failure_of, report_failures
from surge_dagster.orchestration.launch import LaunchConfig
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.outcome import Outcome
from surge_dagster.orchestration.refresh import Refresh
from surge_dagster.orchestration.run_queue import POOL, RUN_TAGS

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

    def job(name: str, node: dg.OpDefinition | dg.PendingNodeInvocation, description: str) -> dg.JobDefinition:
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

        What failed for good is told before it returns. Where an error ends the run, its checks are told here too. One
        that is interrupted has to end soon, and tells nothing.

        A retry policy on the op would also retry a run that was terminated, since Dagster applies it to interrupts.
        """
        record_process(context)
        outcome = Outcome.after(self.before.pop(context.run_id, None), self.policy)
        try:
            self._refresh(context, config, chosen, outcome)
        except Exception as error:
            outcome.give_up()
            if isinstance(error, EncoderError | TransientError):
                context.log.error(str(error))
                if _may_retry(context):
                    raise self._retry(context, outcome) from error
            outcome.ended_by = error
            self._tell_of_end(context, outcome)
            if isinstance(error, SurgeError):
                raise failure_of(self.names, outcome) from error
            raise
        outcome.settle()
        if any(failure.transient for failure in outcome.failures) and _may_retry(context):
            raise self._retry(context, outcome)
        report_failures(self.names, context, outcome)
        return outcome

    def _refresh(
        self, context: dg.OpExecutionContext, config: LaunchConfig, chosen: Iterable[str] | None, outcome: Outcome
    ) -> None:
        named = config.named_keys()
        Refresh(self.names, context, config, outcome).run(named if named is not None else chosen)

    def _tell_of_end(self, context: dg.OpExecutionContext, outcome: Outcome) -> None:
        """Tell of a run that an error ended; what cannot be told must not take the error's place."""
        with _logged(context, "the checks of this run"):
            for result in run_check_results(self.names, self.policy, outcome):
                if result.passed:
                    continue  # of a part of the run, and a check that failed before would be taken for mended
                context.log_event(evaluation_of(self.names, result))  # pyright: ignore[reportArgumentType]
        with _logged(context, "the partitions that failed"):
            report_failures(self.names, context, outcome)

    def _retry(self, context: dg.OpExecutionContext, outcome: Outcome) -> dg.RetryRequested:
        """What has Dagster make another attempt, after a wait."""
        self.before[context.run_id] = outcome
        # Spread, so that runs that one fault has ended do not all come back at the same moment. It waits here and
        # not in Dagster, which hears of a person's "Terminate" only afterwards.
        try:
            rest(_RETRY_SECONDS * 2**context.retry_number * random.uniform(0.5, 1.5))
        except BaseException:  # a person ends the run
            del self.before[context.run_id]
            raise
        return dg.RetryRequested(max_retries=_RETRIES)


def _may_retry(context: dg.OpExecutionContext) -> bool:
    """Whether another attempt would follow; a run's config can turn that off."""
    return context.retry_number < _RETRIES and not context.get_step_execution_context().retry_mode.disabled


@contextmanager
def _logged(context: dg.OpExecutionContext, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        with suppress(Exception):  # Dagster keeps what is logged where it keeps the events
            context.log.error(f"{what} could not be recorded: {type(error).__name__}: {error}")
