"""The embeddings: the one asset that is executed, and the job that brings all of it up to date.

A run of the asset covers the partitions that were chosen for it. `catalog_refresh` covers everything without anything
being chosen: an asset with partitions cannot be launched without choosing some, so the job is an op that does the same
work and logs the same events, and it sees partitions that no sensor has registered yet.
"""

from collections.abc import Iterable, Iterator

import dagster as dg
from dagster._core.definitions.metadata import normalize_metadata

from surge_dagster.assets.checks import RUN_CHECK, failure_of, mark_as_failed, run_check, run_check_metadata
from surge_dagster.assets.launch import LaunchConfig
from surge_dagster.assets.lineage import CODE_VERSION, EMBEDDINGS
from surge_dagster.assets.refresh import Outcome, Refresh
from surge_dagster.assets.source_partitions import CATALOG_PARTITIONS, SOURCE_PARTITIONS
from surge_dagster.assets.superbatches import SUPERBATCHES
from surge_dagster.engine.errors import ConfigError, EncoderError, TransientError
from surge_dagster.resources import CatalogSource, Encoder, OutputStore

POOL = "gpu"
EMBEDDINGS_OP = "embeddings"
REFRESH_OP = "refresh"
_RETRIES = 2
_RETRY_SECONDS = 5

# What an attempt refused, by run id, for the attempts that follow it in the same process: bad data is read once.
_refused: dict[str, dict[str, str]] = {}


@dg.multi_asset(
    name=EMBEDDINGS_OP,
    specs=[
        dg.AssetSpec(
            EMBEDDINGS,
            deps=[SOURCE_PARTITIONS, SUPERBATCHES],
            skippable=True,
            code_version=CODE_VERSION,
            group_name="surge",
            kinds={"parquet", "pytorch"},
            description=(
                "One Parquet file per catalog partition with id, text and embedding, complete or not there at all. "
                "A run skips what is up to date; `force: true` in its config encodes it again."
            ),
        )
    ],
    check_specs=[run_check],
    partitions_def=CATALOG_PARTITIONS,
    backfill_policy=dg.BackfillPolicy.single_run(),
    pool=POOL,
)
def embeddings(
    context: dg.AssetExecutionContext,
    config: LaunchConfig,
    catalog: CatalogSource,
    encoder: Encoder,
    output: OutputStore,
) -> Iterator[dg.AssetCheckResult]:
    """Embed the partitions of this run that are missing or stale."""
    chosen = context.partition_keys if context.has_partition_key or context.has_partition_key_range else None
    outcome = _attempt(context.op_execution_context, config, catalog, encoder, output, chosen)
    metadata = run_check_metadata(outcome)
    if outcome.failures:
        mark_as_failed(context.op_execution_context, [failure.key for failure in outcome.failures])
    yield dg.AssetCheckResult(
        asset_key=RUN_CHECK.asset_key, check_name=RUN_CHECK.name, passed=not outcome.failures, metadata=metadata
    )
    if outcome.failures:
        raise failure_of(outcome)


@dg.op(name=REFRESH_OP, pool=POOL, out=dg.Out(dg.Nothing))
def refresh(
    context: dg.OpExecutionContext,
    config: LaunchConfig,
    catalog: CatalogSource,
    encoder: Encoder,
    output: OutputStore,
) -> Iterator[dg.AssetCheckEvaluation | dg.Output[None]]:
    """Embed whatever is missing or stale in the whole catalog."""
    outcome = _attempt(context, config, catalog, encoder, output, None)
    if outcome.failures:
        mark_as_failed(context, [failure.key for failure in outcome.failures])
    yield dg.AssetCheckEvaluation(
        asset_key=RUN_CHECK.asset_key,
        check_name=RUN_CHECK.name,
        passed=not outcome.failures,
        metadata=normalize_metadata(run_check_metadata(outcome)),
        blocking=True,
    )
    if outcome.failures:
        raise failure_of(outcome)
    yield dg.Output(None)


@dg.job(
    executor_def=dg.in_process_executor,
    description="Everything that is missing or stale, in one run. Nothing is chosen, and there may be nothing to do.",
)
def catalog_refresh() -> None:
    """The whole catalog, in one run."""
    refresh()


def _attempt(
    context: dg.OpExecutionContext,
    config: LaunchConfig,
    catalog: CatalogSource,
    encoder: Encoder,
    output: OutputStore,
    chosen: Iterable[str] | None,
) -> Outcome:
    """One attempt at a run; decides what Dagster retries: crashes and what is transient, never bad data or settings.

    A retry policy on the op would also retry a run that was terminated, since Dagster applies it to interrupts.
    """
    refused = _refused.setdefault(context.run_id, {})
    try:
        named = config.named_keys()
        work = Refresh(context, config, catalog, encoder, output)
        outcome = work.run(named if named is not None else chosen, dict(refused))
    except ConfigError as error:
        raise dg.Failure(str(error), allow_retries=False) from error
    except (EncoderError, TransientError) as error:
        context.log.error(str(error))
        raise _retry(context) from error
    refused.update({failure.key: failure.reason for failure in outcome.failures if not failure.transient})
    if any(failure.transient for failure in outcome.failures) and context.retry_number < _RETRIES:
        raise _retry(context)
    _refused.pop(context.run_id, None)
    return outcome


def _retry(context: dg.OpExecutionContext) -> dg.RetryRequested:
    return dg.RetryRequested(max_retries=_RETRIES, seconds_to_wait=_RETRY_SECONDS * 2**context.retry_number)
