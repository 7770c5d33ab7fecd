"""One asset per derived space that the settings list, and the job that brings all of them up to date.

A run derives what is missing or stale among its partitions, or in the whole space, and reports each file that it wrote;
in a run of a backfill also those that are fresh, because Dagster ends a backfill as failed when a partition that it
covers has no event. No encoder is started.
"""
# Dagster reads annotations when it makes an asset or an op, so they must not be strings here.

import itertools
from collections.abc import Iterable, Iterator, Sequence

import dagster as dg
from pydantic import Field

from surge_dagster.config.nested_settings import DerivedSettings
from surge_dagster.engine.derived.derive import DeriveRun
from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.files.facts import desired_version
from surge_dagster.engine.run.report import Failure, Receipt
from surge_dagster.orchestration.active_runs import record_process
from surge_dagster.orchestration.asset_events import derived_embedding
from surge_dagster.orchestration.discovery import existing_space
from surge_dagster.orchestration.events import BATCH_EVENTS, report_events
from surge_dagster.orchestration.failures import RETRIES, errors_as_failures, failure_table
from surge_dagster.orchestration.launch import job_of
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.partition_keys import from_partition_key, to_partition_key


class DeriveConfig(dg.Config):
    delete_removed: bool = Field(
        False, description="delete files whose partition was removed from the parent; only a run of the job finds them"
    )


def derived_spaces(names: CatalogNames, wanted: Sequence[DerivedSettings]) -> list[dg.AssetsDefinition]:
    """An asset with a file per partition for each derived space."""
    return [_derived_space(names, each) for each in wanted]


def _derived_space(names: CatalogNames, wanted: DerivedSettings) -> dg.AssetsDefinition:
    key = names.derived(wanted.label)

    @dg.multi_asset(
        name=names.derived_op(wanted.label),
        specs=[
            dg.AssetSpec(
                key,
                deps=[names.embeddings],
                skippable=True,
                group_name=names.group,
                kinds={wanted.dtype},
                description=(
                    f"The embeddings as {wanted.title}, computed from their float32 files without a model. A run skips "
                    "partitions that are up to date."
                ),
            )
        ],
        partitions_def=names.partitions,
        backfill_policy=dg.BackfillPolicy.single_run(),
        required_resource_keys=names.resource_keys,
    )
    def derive(context: dg.AssetExecutionContext, config: DeriveConfig) -> Iterator[dg.MaterializeResult]:
        """Derive the partitions of this run that are missing or stale."""
        has_keys = context.has_partition_key or context.has_partition_key_range
        keys = [from_partition_key(key) for key in context.partition_keys] if has_keys else None
        _run(names, context.op_execution_context, [wanted], config, keys)
        yield from ()  # a function that yields nothing materializes nothing by itself

    return derive


def derive_job(names: CatalogNames, wanted: Sequence[DerivedSettings]) -> list[dg.JobDefinition]:
    """The job that brings all derived spaces up to date in one run; none where the settings list no space."""

    @dg.op(name=names.derive_all_op, out=dg.Out(dg.Nothing), required_resource_keys=names.resource_keys)
    def derive(context: dg.OpExecutionContext, config: DeriveConfig) -> None:
        """Derive every partition that is missing or stale in a derived space."""
        _run(names, context, wanted, config, None)

    text = "Computes what is missing or stale in the derived spaces, in one run, without a model."
    return [job_of(names.derive_job, derive, text)] if wanted else []


def _run(
    names: CatalogNames,
    context: dg.OpExecutionContext,
    wanted: Sequence[DerivedSettings],
    config: DeriveConfig,
    keys: Sequence[str] | None,
) -> None:
    """Bring derived spaces up to date and report their files; permanent failures end the run after the others."""
    record_process(context)
    resources = names.resources(context)
    failures: list[Failure] = []
    with errors_as_failures():
        store = resources.output.open()
        parent = existing_space(names, resources, store, "derive")
        for each in wanted:
            removed = "delete" if config.delete_removed else "report"
            run = DeriveRun(store, parent, each.dtype, each.dimension, removed=removed)
            events = _events(names, context, run, each, keys)
            while batch := list(itertools.islice(events, BATCH_EVENTS)):  # stored in one transaction
                report_events(context.instance, context, batch)
            failures += run.report.partitions_failed
            context.log.info(f"{run.report.space}: {run.report.in_words()}")
        if failures and all(failure.transient for failure in failures) and context.retry_number < RETRIES:
            raise TransientError(failures[0].reason)
    if failures:
        listed = failure_table([(failure.key, failure.reason) for failure in failures])
        raise dg.Failure(
            f"{len(failures):,} partitions could not be derived. The first one: {failures[0].reason}",
            metadata={"failed": listed},
            allow_retries=False,
        )


def _events(
    names: CatalogNames,
    context: dg.OpExecutionContext,
    run: DeriveRun,
    wanted: DerivedSettings,
    keys: Iterable[str] | None,
) -> Iterator[dg.AssetMaterialization]:
    in_backfill = "dagster/backfill" in context.run_tags
    kind = dg.DagsterEventType.ASSET_MATERIALIZATION
    pointers = context.instance.get_latest_storage_id_by_partition(names.embeddings, kind)
    for event in run.events(keys):
        if isinstance(event, Receipt) and (event.action == "derived" or in_backfill):
            version = desired_version(event.content_digest, run.report.parent)
            pointer = pointers.get(to_partition_key(event.key))
            yield derived_embedding(names, names.derived(wanted.label), event, version, pointer)
        elif isinstance(event, Failure):
            context.log.error(event.reason)
