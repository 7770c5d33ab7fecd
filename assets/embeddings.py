"""The asset `embeddings`, its upstream assets, and the jobs that bring all or some of its partitions up to date.

A run of the asset covers one range of partitions. The jobs cover the partitions that their config names, or all of
them. Dagster does not launch a partitioned asset without a range, so the jobs execute an op that does the same work and
logs the same events. The op also finds partitions that no sensor has registered yet.

Dagster executes neither upstream asset. A run of `embeddings` reports the events of both; the sensor reports the
catalog too. `superbatches` is not a second output of that run's op: an op with a partitioned and an unpartitioned asset
makes backfills from the UI impossible.
"""
# Dagster reads annotations when it makes an asset or an op, so they must not be strings here.

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import dagster as dg
from sqlalchemy.exc import InterfaceError, OperationalError

from surge_dagster.assets.checks import evaluation_of, run_check_results, run_checks
from surge_dagster.config.check_policy import CheckPolicy
from surge_dagster.engine.errors import EncoderError, SurgeError, TransientError
from surge_dagster.engine.model.spec import FileFormat
from surge_dagster.engine.support.waiting import rest
from surge_dagster.orchestration.asset_events import CODE_VERSION
from surge_dagster.orchestration.failures import failure_of, report_failures
from surge_dagster.orchestration.heartbeats import executing
from surge_dagster.orchestration.launch import POOL, LaunchConfig, MistypedKeys, job_of
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.outcome import Outcome
from surge_dagster.orchestration.refresh import Refresh
from surge_dagster.resources import CatalogSource
from surge_dagster.resources.upstream_asset import asset_key

_PASSING = EncoderError, TransientError, OperationalError, InterfaceError  # the last two of Dagster's own database
_RETRIES = 2
_RETRY_SECONDS = 5


def source_partitions(names: CatalogNames, catalog: CatalogSource) -> dg.AssetSpec:
    """The external asset with one dynamic partition per key of the catalog; downstream of the asset that it may be."""
    upstream = asset_key(catalog.url)
    return dg.AssetSpec(
        names.source_partitions,
        deps=[upstream] if upstream else None,
        partitions_def=names.partitions,
        group_name=names.group,
        kinds=catalog.kinds,
        description=(
            f"{catalog.describe()}\n\nEach partition is a set of texts with ids. Its data version is the source "
            "version, a token that changes when the partition may have changed. The sensor "
            f"`{names.sensor}` and each run report it; the schedule `{names.schedule}` handles removed partitions."
        ),
    )


def superbatches(names: CatalogNames) -> dg.AssetSpec:
    """The asset with an event per SuperBatch."""
    return dg.AssetSpec(
        names.superbatches,
        deps=[names.source_partitions],
        group_name=names.group,
        kinds={"arrow"},
        description=(
            "The input of each encode call: many small partitions together, or a piece of a large one. Runs of "
            f"`{names.refresh_job}` and `{names.embed_job}` report one event per SuperBatch, with its metrics, and one "
            "at their end, with charts."
        ),
    )


def embeddings(names: CatalogNames, policy: CheckPolicy, file_format: FileFormat) -> dg.AssetsDefinition:
    """The asset with a file per partition, and the checks that end its runs."""
    attempts = _Attempts(names, policy)
    checks = run_checks(names, policy)

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
                    f"One {file_format.capitalize()} file per partition with id, text and embedding. A run skips "
                    "partitions that are up to date, unless its config says `force: true`.\n\n"
                    f"The job `{names.refresh_job}`, which the schedule `{names.schedule}` launches, embeds everything "
                    f"missing or stale; the job `{names.embed_job}` partitions that you or the sensor `{names.sensor}` "
                    f"name. The job `{names.check_job}` compares all files with the catalog."
                ),
            ).with_io_manager_key(
                names.input_resource
            )  # it loads inputs that name no input manager, and writes nothing
        ],
        check_specs=checks,
        partitions_def=names.partitions,
        backfill_policy=dg.BackfillPolicy.single_run(),
        pool=POOL,
        required_resource_keys=names.resource_keys,
    )
    def embed(
        context: dg.AssetExecutionContext, config: LaunchConfig
    ) -> Iterator[dg.AssetCheckResult | dg.Output[None]]:
        """Embed the partitions of this run that are missing or stale."""
        chosen = context.partition_keys if context.has_partition_key or context.has_partition_key_range else None
        outcome = attempts.make(context.op_execution_context, config, chosen)
        results = list(run_check_results(names, policy, outcome))
        judged = {result.check_name for result in results}
        # Dagster shows a check without a result as skipped, but fails an op that lacks an output of one.
        for spec in checks:
            if spec.name not in judged:
                yield dg.Output(None, output_name=spec.get_python_identifier())
        yield from results
        if outcome.failures:
            raise failure_of(names, outcome)

    return embed


def embedding_jobs(names: CatalogNames, policy: CheckPolicy) -> tuple[dg.JobDefinition, dg.JobDefinition]:
    """The job for the whole catalog, and the job whose config names partitions; both take the same config."""
    attempts = _Attempts(names, policy)

    @dg.op(name=names.refresh_op, pool=POOL, out=dg.Out(dg.Nothing), required_resource_keys=names.resource_keys)
    def refresh(
        context: dg.OpExecutionContext, config: LaunchConfig
    ) -> Iterator[dg.AssetCheckEvaluation | dg.Output[None]]:
        """Embed what is missing or stale among the partitions that the config names, else in the whole catalog."""
        outcome = attempts.make(context, config, None)
        for result in run_check_results(names, policy, outcome):
            yield evaluation_of(names, result, context.instance)
        if outcome.failures:
            raise failure_of(names, outcome)
        yield dg.Output(None)

    configured_as_the_asset = refresh.alias(names.embeddings_op)
    any_set = "Embeds any set of partitions in one run: the config names their keys or their state."
    return (
        job_of(names.refresh_job, refresh, "Embeds every partition that is missing or stale, in one run."),
        job_of(names.embed_job, configured_as_the_asset, any_set),
    )


@dataclass(frozen=True, slots=True)
class _Attempts:
    names: CatalogNames
    policy: CheckPolicy
    before: dict[str, Outcome] = field(default_factory=dict)  # of the previous attempt at a run, by run id

    def make(self, context: dg.OpExecutionContext, config: LaunchConfig, chosen: Sequence[str] | None) -> Outcome:
        """Make one attempt at a run; Dagster retries what is transient, but neither bad data nor bad settings."""
        # A retry policy on the op would also retry a terminated run, since Dagster applies it to interrupts.
        outcome = Outcome.after(self.before.pop(context.run_id, None), self.policy.max_truncated_share)
        try:
            with executing(context):
                return self._attempt(context, config, chosen, outcome)
        except dg.DagsterExecutionInterruptedError as error:
            outcome.ended_by = error
            with suppress(Exception):
                context.log.info(self._last_line(context, outcome))
            raise

    def _attempt(
        self, context: dg.OpExecutionContext, config: LaunchConfig, chosen: Sequence[str] | None, outcome: Outcome
    ) -> Outcome:
        try:
            config.require_keys(context.run_tags)
            partition_keys = chosen if config.keys is None else config.keys
            Refresh(self.names, context, config, outcome).run(partition_keys)
        except Exception as error:
            for failure in outcome.report.partitions_failed:  # also those whose events the run has not received
                outcome.fail(failure)
            if isinstance(error, _PASSING) or isinstance(error.__cause__, _PASSING):
                with suppress(Exception):  # Dagster stores log lines where it stores events
                    context.log.error(str(error))
                if _may_retry(context):
                    raise self._retry(context, outcome) from error
            outcome.ended_by = error
            # Its checks stay what they are, unless an earlier attempt has begun.
            if isinstance(error, MistypedKeys) and not outcome.partitions:
                context.log.info(outcome.sum_up())
            else:
                self._report_end(context, outcome)
            if isinstance(error, SurgeError):
                raise failure_of(self.names, outcome) from error
            raise
        if any(failure.transient for failure in outcome.failures.values()) and _may_retry(context):
            raise self._retry(context, outcome)
        report_failures(self.names, context, outcome)
        context.log.info(outcome.sum_up())
        return outcome

    def _report_end(self, context: dg.OpExecutionContext, outcome: Outcome) -> None:
        """Report the checks and failures of a run that an error ended; a failure to do so must not hide the error."""
        try:
            report_failures(self.names, context, outcome)
            context.log.info(outcome.sum_up())
            for result in run_check_results(self.names, self.policy, outcome):
                if result.passed:
                    continue  # it covers a part of the run, and would replace an earlier failure of the check
                context.log_event(evaluation_of(self.names, result, context.instance))  # pyright: ignore[reportArgumentType]
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            with suppress(Exception):  # Dagster stores log lines where it stores events
                context.log.error(f"the end of this run could not be recorded: {reason}")

    def _last_line(self, context: dg.OpExecutionContext, outcome: Outcome) -> str:
        """What a terminated run has published, and who embeds the rest."""
        by_sensor = context.run_tags.get("dagster/sensor_name") == self.names.sensor
        done = outcome.sum_up() if outcome.partitions else "Nothing was begun"
        then = "leaves it alone until its source changes" if by_sensor else "requests what is missing, if it is on"
        return (
            f"Terminated. {done}. Launch {self.names.refresh_job} for the rest, or wait for the schedule "
            f"{self.names.schedule}, if it is on; the sensor {self.names.sensor} {then}."
        )

    def _retry(self, context: dg.OpExecutionContext, outcome: Outcome) -> dg.RetryRequested:
        """Wait, then give the exception that makes Dagster start another attempt."""
        # Random, so that runs that one fault ended do not all retry at the same moment. It waits here, since Dagster's
        # own wait ignores "Terminate" until it is over.
        rest(_RETRY_SECONDS * 2**context.retry_number * random.uniform(0.5, 1.5))
        self.before[context.run_id] = outcome
        return dg.RetryRequested(max_retries=_RETRIES)


def _may_retry(context: dg.OpExecutionContext) -> bool:
    return context.retry_number < _RETRIES and not context.get_step_execution_context().retry_mode.disabled
