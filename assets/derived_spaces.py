"""One asset per derived space that the settings list, and the job that brings all of them up to
date.

A run derives what is missing or stale among its partitions, or in the whole space, and reports each
file that it wrote; in a run of a backfill also those that are fresh. No encoder is started.

The sensor `hand_over_changes` launches the job when runs have changed embeddings. It does not
depend on the check of `embeddings` that blocks: a refused partition keeps back only its own derived
file. A run of both assets, as in a backfill, derives nothing when a partition is refused, and the
sensor's run makes up for it.
"""
# Dagster reads annotations when it makes an asset or an op, so they must not be strings here.

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import dagster as dg
from pydantic import Field

from surge_dagster.assets.checks import log_result
from surge_dagster.assets.embeddings import files_metadata
from surge_dagster.config.nested_settings import DerivedSettings
from surge_dagster.config.settings import Settings
from surge_dagster.engine.derived.derive import DeriveRun
from surge_dagster.engine.derived.parent_files import find_lag
from surge_dagster.engine.files.facts import desired_version
from surge_dagster.engine.run.report import Failure, Receipt
from surge_dagster.engine.support.counts import counted
from surge_dagster.orchestration.asset_events import derived_embedding
from surge_dagster.orchestration.events import BATCH_EVENTS, report_events
from surge_dagster.orchestration.failures import (
    errors_as_failures,
    failed_metadata,
    failure_table,
    run_failure,
)
from surge_dagster.orchestration.heartbeats import executing
from surge_dagster.orchestration.launch import in_backfill, job_of, partition_keys_of
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.partition_keys import from_partition_key, to_partition_key
from surge_dagster.orchestration.spaces import existing_space, report_whole_output

CHECK = "every_partition_is_derived"


class DeriveConfig(dg.Config):
    delete_removed: bool = Field(
        False,
        description=(
            "delete files whose partition was removed from the parent; only a run of the job "
            "finds them"
        ),
    )


def derived_space(
    names: CatalogNames, settings: Settings, wanted: DerivedSettings
) -> dg.AssetsDefinition:
    """Return an asset with a file per partition for a derived space."""
    spec = _derived_spec(names, settings, wanted)
    check = dg.AssetCheckSpec(
        CHECK,
        asset=spec.key,
        description=(
            "Every file of `embeddings` has a file in this space with the same rows. A warning "
            "counts those that lag behind, and those that could not be judged: launch "
            f"{names.derive_job}."
        ),
    )

    @dg.multi_asset(
        name=f"{names.embeddings_op}_{wanted.label}",
        specs=[spec],
        check_specs=[check],
        partitions_def=names.partitions,
        backfill_policy=dg.BackfillPolicy.single_run(),
        required_resource_keys=names.resource_keys,
    )
    def derive(
        context: dg.AssetExecutionContext, config: DeriveConfig
    ) -> Iterator[dg.AssetCheckResult]:
        """Derive the partitions of this run that are missing or stale."""
        keys = partition_keys_of(context)
        failures = _run(names, context.op_execution_context, [wanted], config, keys)
        yield from lag_results(names, context.op_execution_context, [wanted])
        _end(context.op_execution_context, failures)

    return derive


def _derived_spec(names: CatalogNames, settings: Settings, wanted: DerivedSettings) -> dg.AssetSpec:
    return dg.AssetSpec(
        names.derived(wanted.label),
        deps=[names.embeddings],
        skippable=True,
        group_name=names.group,
        kinds={wanted.dtype},
        metadata=files_metadata(settings, wanted.dtype, wanted.dimension or settings.dimension),
        description=(
            f"The embeddings as {wanted.title}, computed from their float32 files without a model. "
            "A run skips partitions that are up to date."
        ),
    )


def derive_job(
    names: CatalogNames, wanted: Sequence[DerivedSettings], resources: Mapping[str, Any]
) -> list[dg.JobDefinition]:
    """Return the job that brings all derived spaces up to date, if the settings list some."""

    @dg.op(
        name=names.derive_all_op, out=dg.Out(dg.Nothing), required_resource_keys=names.resource_keys
    )
    def derive(context: dg.OpExecutionContext, config: DeriveConfig) -> None:
        """Derive every partition that is missing or stale in a derived space."""
        failures = _run(names, context, wanted, config, None)
        for result in lag_results(names, context, wanted):
            log_result(names, context, result)
        _end(context, failures)

    text = "Computes what is missing or stale in the derived spaces, in one run, without a model."
    return [job_of(names.derive_job, derive, text, resources)] if wanted else []


def lag_results(
    names: CatalogNames, context: dg.OpExecutionContext, wanted: Sequence[DerivedSettings]
) -> Iterator[dg.AssetCheckResult]:
    """Yield how far each derived space lags behind the files of its parent."""
    with errors_as_failures(context):
        resources = names.resources(context)
        store = resources.output.open()
        parent = existing_space(names, resources, store, "derive")
        for each in wanted:
            lag = find_lag(store, parent, each.dtype, each.dimension)
            behind = [(key, "it has no valid file in this space") for key in lag.missing]
            behind += [
                (key, f"its file was derived from earlier rows of {parent.name}")
                for key in lag.stale
            ]
            yield dg.AssetCheckResult(
                asset_key=names.derived(each.label),
                check_name=CHECK,
                passed=lag.fresh > 0 and not (behind or lag.not_judged),
                severity=dg.AssetCheckSeverity.WARN,
                description=lag.in_words(),
                metadata={
                    "space": lag.space,
                    "partitions_judged": lag.judged,
                    "partitions_not_judged": len(lag.not_judged),
                    "partitions_missing": len(lag.missing),
                    "partitions_stale": len(lag.stale),
                    **failed_metadata([*behind, *lag.not_judged]),
                },
            )


def _run(
    names: CatalogNames,
    context: dg.OpExecutionContext,
    wanted: Sequence[DerivedSettings],
    config: DeriveConfig,
    keys: Sequence[str] | None,
) -> list[Failure]:
    """Bring derived spaces up to date and report their files; return what failed."""
    resources = names.resources(context)
    failures: list[Failure] = []
    with executing(context), errors_as_failures(context):
        store = resources.output.open()
        parent = existing_space(names, resources, store, "derive")
        removed = "delete" if config.delete_removed else "report"
        for each in wanted:
            run = DeriveRun(store, parent, each.dtype, each.dimension, removed=removed)
            events = _events(names, context, run, each, keys)
            # stored in one transaction
            while batch := list(itertools.islice(events, BATCH_EVENTS)):
                report_events(context.instance, context, batch)
            done = run.report.in_words()
            context.log.info(f"{run.report.space}: {done}")
            failed = run.report.partitions_failed
            if run.report.partitions_written or not failed:
                report_whole_output(context, names.derived(each.label), store, run.space, done)
            failures += failed
    return failures


def _end(context: dg.OpExecutionContext, failures: Sequence[Failure]) -> None:
    """End the run as failed if a partition failed; the others are derived."""
    if failures:
        listed = failure_table([(failure.key, failure.reason) for failure in failures])
        raise run_failure(
            context,
            f"{counted(len(failures), 'partition')} could not be derived. The first one: "
            f"{failures[0].reason}",
            is_transient=all(failure.transient for failure in failures),
            metadata={"failed": listed},
        )


def _events(
    names: CatalogNames,
    context: dg.OpExecutionContext,
    run: DeriveRun,
    wanted: DerivedSettings,
    keys: Iterable[str] | None,
) -> Iterator[dg.AssetMaterialization]:
    reports_fresh = in_backfill(context)
    kind = dg.DagsterEventType.ASSET_MATERIALIZATION
    pointers = context.instance.get_latest_storage_id_by_partition(names.embeddings, kind)
    catalog_keys = None if keys is None else map(from_partition_key, keys)
    for event in run.events(catalog_keys):
        if isinstance(event, Receipt) and (event.action == "derived" or reports_fresh):
            version = desired_version(event.content_digest, run.report.parent)
            pointer = pointers.get(to_partition_key(event.key))
            yield derived_embedding(names, names.derived(wanted.label), event, version, pointer)
        elif isinstance(event, Failure):
            context.log.error(event.reason)
