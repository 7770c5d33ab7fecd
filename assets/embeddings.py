"""The asset `embeddings`, its upstream assets, and the jobs that bring all or some of its
partitions up to date.

A run of the asset covers one range of partitions. The jobs cover the partitions that their config
names, or all of them. Dagster does not launch a partitioned asset without a range, so the jobs
execute an op that does the same work and logs the same events. The op also finds partitions that no
sensor has registered yet.

Dagster executes neither upstream asset. A run of `embeddings` reports the events of both; the
sensor reports the catalog too. `superbatches` is not a second output of that run's op: an op with a
partitioned and an unpartitioned asset makes backfills from the UI impossible.
"""
# Dagster reads annotations when it makes an asset or an op, so they must not be strings here.

from collections.abc import Iterator, Sequence
from contextlib import suppress

import dagster as dg
from sqlalchemy.exc import InterfaceError, OperationalError

from surge_dagster.assets.checks import evaluation_of, run_check_results, run_checks
from surge_dagster.config.check_policy import CheckPolicy
from surge_dagster.engine.errors import EncoderError, SurgeError, TransientError
from surge_dagster.orchestration.asset_events import CODE_VERSION
from surge_dagster.orchestration.failures import (
    allow_run_retry,
    failure_of,
    forget_overtaken,
    report_failures,
)
from surge_dagster.orchestration.heartbeats import executing
from surge_dagster.orchestration.launch import POOL, LaunchConfig, MistypedKeys, job_of
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.outcome import Outcome, Truncation
from surge_dagster.orchestration.refresh import Refresh
from surge_dagster.resources import CatalogSource
from surge_dagster.resources.upstream_asset import asset_key

# After these errors Dagster launches the run again; the last two are of Dagster's own database.
_PASSING = EncoderError, TransientError, OperationalError, InterfaceError


def source_partitions(names: CatalogNames, catalog: CatalogSource) -> dg.AssetSpec:
    """The external asset with one dynamic partition per key of the catalog; downstream of the asset
    that it may be."""
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
            "at their end, with its totals."
        ),
    )


def embeddings(
    names: CatalogNames, policy: CheckPolicy, max_partitions_per_run: int | None = None
) -> dg.AssetsDefinition:
    """The asset with a file per partition, and the checks that end its runs."""
    checks = run_checks(names, policy)
    if max_partitions_per_run is None:
        backfill_policy = dg.BackfillPolicy.single_run()
    else:
        backfill_policy = dg.BackfillPolicy.multi_run(max_partitions_per_run)

    @dg.multi_asset(
        name=names.embeddings_op,
        specs=[
            dg.AssetSpec(
                names.embeddings,
                deps=[names.source_partitions, names.superbatches],
                skippable=True,
                code_version=CODE_VERSION,
                group_name=names.group,
                kinds={"parquet", "pytorch"},
                description=(
                    "One Parquet file per partition with id, text and embedding. A run skips "
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
        backfill_policy=backfill_policy,
        pool=POOL,
        required_resource_keys=names.resource_keys,
    )
    def embed(
        context: dg.AssetExecutionContext, config: LaunchConfig
    ) -> Iterator[dg.AssetCheckResult | dg.Output[None]]:
        """Embed the partitions of this run that are missing or stale."""
        chosen = (
            context.partition_keys
            if context.has_partition_key or context.has_partition_key_range
            else None
        )
        outcome = _run(names, policy, context.op_execution_context, config, chosen)
        results = list(run_check_results(names, policy, outcome, context.instance))
        judged = {result.check_name for result in results}
        # Dagster shows a check without a result as skipped, but fails an op that lacks an output of
        # one.
        for spec in checks:
            if spec.name not in judged:
                yield dg.Output(None, output_name=spec.get_python_identifier())
        yield from results
        if outcome.failures:
            raise _failure(names, context.op_execution_context, outcome)

    return embed


def embedding_jobs(
    names: CatalogNames, policy: CheckPolicy
) -> tuple[dg.JobDefinition, dg.JobDefinition]:
    """The job for the whole catalog, and the job whose config names partitions; both take the same
    config."""

    @dg.op(
        name=names.refresh_op,
        pool=POOL,
        out=dg.Out(dg.Nothing),
        required_resource_keys=names.resource_keys,
    )
    def refresh(
        context: dg.OpExecutionContext, config: LaunchConfig
    ) -> Iterator[dg.AssetCheckEvaluation | dg.Output[None]]:
        """Embed what is missing or stale among the partitions that the config names, else in the
        whole catalog."""
        outcome = _run(names, policy, context, config, None)
        for result in run_check_results(names, policy, outcome, context.instance):
            yield evaluation_of(names, result, context.instance)
        if outcome.failures:
            raise _failure(names, context, outcome)
        yield dg.Output(None)

    configured_as_the_asset = refresh.alias(names.embeddings_op)
    any_set = "Embeds any set of partitions in one run: the config names their keys or their state."
    return (
        job_of(
            names.refresh_job,
            refresh,
            "Embeds every partition that is missing or stale, in one run.",
        ),
        job_of(names.embed_job, configured_as_the_asset, any_set),
    )


def _run(
    names: CatalogNames,
    policy: CheckPolicy,
    context: dg.OpExecutionContext,
    config: LaunchConfig,
    chosen: Sequence[str] | None,
) -> Outcome:
    """Embed what a run was launched for; failed partitions are in the outcome."""
    outcome = Outcome(Truncation(policy.max_truncated_share))
    try:
        with executing(context):
            _embed(names, policy, context, config, chosen, outcome)
    except dg.DagsterExecutionInterruptedError as error:
        outcome.ended_by = error
        with suppress(Exception):
            context.log.info(_last_line(names, context, outcome))
        raise
    return outcome


def _embed(
    names: CatalogNames,
    policy: CheckPolicy,
    context: dg.OpExecutionContext,
    config: LaunchConfig,
    chosen: Sequence[str] | None,
    outcome: Outcome,
) -> None:
    """Fill the outcome; an error that ends the run is reported before it is raised."""
    try:
        config.require_keys(context.run_tags)
        Refresh(names, context, config, outcome).run(chosen if config.keys is None else config.keys)
    except Exception as error:
        outcome.ended_by = error
        # also those whose events the run has not received
        for failure in outcome.report.partitions_failed:
            outcome.fail(failure)
        # A launch with a mistyped key leaves the checks as they are.
        if isinstance(error, MistypedKeys):
            context.log.info(outcome.sum_up())
        else:
            _report_end(names, policy, context, outcome)
        if isinstance(error, SurgeError):
            raise _failure(names, context, outcome) from error
        allow_run_retry(context, _is_passing(error))
        raise
    forget_overtaken(names, context, outcome)
    report_failures(names, context, outcome)
    context.log.info(outcome.sum_up())


def _failure(names: CatalogNames, context: dg.OpExecutionContext, outcome: Outcome) -> dg.Failure:
    """Return the failure that ends a run; what may pass makes Dagster launch the run again."""
    if outcome.ended_by is None:
        is_transient = any(failure.transient for failure in outcome.failures.values())
    else:
        is_transient = _is_passing(outcome.ended_by)
    return failure_of(names, context, outcome, is_transient=is_transient)


def _is_passing(error: BaseException) -> bool:
    return isinstance(error, _PASSING) or isinstance(error.__cause__, _PASSING)


def _report_end(
    names: CatalogNames, policy: CheckPolicy, context: dg.OpExecutionContext, outcome: Outcome
) -> None:
    """Report the checks and failures of a run that an error ended; a failure to do so must not hide
    the error."""
    try:
        report_failures(names, context, outcome)
        context.log.info(outcome.sum_up())
        for result in run_check_results(names, policy, outcome, context.instance):
            if result.passed:
                # it covers a part of the run, and would replace an earlier failure of the check
                continue
            context.log_event(evaluation_of(names, result, context.instance))  # pyright: ignore[reportArgumentType]
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        with suppress(Exception):  # Dagster stores log lines where it stores events
            context.log.error(f"the end of this run could not be recorded: {reason}")


def _last_line(names: CatalogNames, context: dg.OpExecutionContext, outcome: Outcome) -> str:
    """What a terminated run has published, and who embeds the rest."""
    by_sensor = context.run_tags.get("dagster/sensor_name") == names.sensor
    done = outcome.sum_up() if outcome.partitions else "Nothing was begun"
    then = (
        "leaves it alone until its source changes"
        if by_sensor
        else "requests what is missing, if it is on"
    )
    return (
        f"Terminated. {done}. Launch {names.refresh_job} for the rest, or wait for the schedule "
        f"{names.schedule}, if it is on; the sensor {names.sensor} {then}."
    )
