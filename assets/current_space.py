"""The asset `current_space` names the space that readers use; the job `switch_current_space` makes
another one current.

The asset is external, so that neither "Materialize all" nor a backfill changes what readers get.
The job asks for the name of a space, refuses a space that lacks a partition, or with
`min_ndcg_ratio` one that gives worse results, reports the space's files as materializations of
`embeddings`, and logs each switch as one of `current_space`. Runs that embed report the first
space, and what was switched or begun elsewhere. The asset's data version is the space: only another
space for readers makes downstream assets stale.
"""
# Dagster reads annotations when it makes an asset or an op, so they must not be strings here.

from typing import Any

import dagster as dg
from pydantic import Field

from surge_dagster.assets.compare_spaces import QueriesConfig, require_ndcg
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.current_space import named_space
from surge_dagster.engine.sources import Source
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.verify.verification import Switched, SwitchRefused, switch_space
from surge_dagster.orchestration.failures import errors_as_failures, failure_table, run_failure
from surge_dagster.orchestration.heartbeats import executing
from surge_dagster.orchestration.launch import job_of
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.spaces import report_files, report_readers_space


class SwitchConfig(QueriesConfig):
    """The space to switch to, and how good it has to be."""

    space: str = Field(description="name of the space, as the asset current_space lists it")
    min_ndcg_ratio: float | None = Field(
        None,
        ge=0,
        description="refuse a space whose nDCG@10 for the queries is less than this ratio of the "
        "current space's",
    )


def current_space(names: CatalogNames) -> dg.AssetSpec:
    """Return the external asset that stands for the space that readers use."""
    return dg.AssetSpec(
        names.current_space,
        deps=[names.embeddings, names.next_space],
        group_name=names.group,
        kinds={"json"},
        description=(
            f"The vector space that readers use. Only the job `{names.switch_job}` and the "
            "command `surge-dagster switch` change it. Each switch of the job is an event here, "
            f"and each run of `{names.refresh_job}` or `{names.embed_job}` reports what has "
            "changed otherwise."
        ),
    )


def next_space(names: CatalogNames) -> dg.AssetSpec:
    """Return the external asset of the files that readers do not use, with the partitions of
    `embeddings`."""
    return dg.AssetSpec(
        names.next_space,
        deps=[names.source_partitions, names.superbatches],
        partitions_def=names.partitions,
        group_name=names.group,
        kinds={"parquet"},
        description=(
            "The files of a vector space that readers do not use, such as that of a new model: "
            f"`{names.refresh_job}` and `{names.embed_job}` report them here instead of "
            f"`{names.embeddings.path[-1]}`, until `{names.switch_job}` makes the space current."
        ),
    )


def switch_current_space(names: CatalogNames) -> dg.JobDefinition:
    """Return the job that verifies a space and makes it the current one."""

    @dg.op(
        name=names.current_space_op,
        out=dg.Out(dg.Nothing),
        required_resource_keys=names.resource_keys,
    )
    def switch(context: dg.OpExecutionContext, config: SwitchConfig) -> None:
        """Verify a space and make it the current one."""
        resources = names.resources(context)
        with executing(context), errors_as_failures(context):
            store = resources.output.open()
            space = named_space(store, config.space)
            more: dict[str, Any] = {}
            if config.min_ndcg_ratio is not None:
                ratio = config.min_ndcg_ratio
                more = require_ndcg(context, resources, store, space, config, ratio)
            source = resources.open_source(resources.encoder.reaching(space.loadable))
            switched = _switch(context, source, store, space)
        verb = "was already"
        more["previous_space"] = switched.current.previous
        if switched.changed:
            verb = "is now"
            more |= {"partitions": switched.partitions, "rows": switched.rows}
        context.log.info(f"{space.title} ({space.name}) {verb} the current space of {store.url}")
        with errors_as_failures(context):
            report_files(names, context, store)
        report_readers_space(names, context, store, more)

    return job_of(
        names.switch_job,
        switch,
        "Verifies a space against the catalog and makes it the one that readers use. Its config "
        "names the space.",
    )


def _switch(context: dg.OpExecutionContext, source: Source, store: Store, space: Space) -> Switched:
    """Make a space the current one, or raise the run's failure with what is wrong with it."""
    try:
        return switch_space(source, store, space)
    except SwitchRefused as refused:
        listed = failure_table(
            [(violation.key, violation.reason) for violation in refused.violations]
        )
        metadata = {"counts": dg.MetadataValue.json(dict(refused.counts)), "failed": listed}
        raise run_failure(context, str(refused), metadata=metadata) from refused
