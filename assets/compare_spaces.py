"""The job `compare_spaces` compares two spaces, and `switch_current_space` may require that the new
one is good enough.

The result is an observation of `current_space`, with tables in Markdown.
"""
# Dagster reads annotations when it makes an asset or an op, so they must not be strings here.

from functools import partial
from typing import Any

import dagster as dg
from pydantic import Field

from surge_dagster.config.query_pool import query_pool
from surge_dagster.engine.compare.comparison import SAMPLE, compare
from surge_dagster.engine.compare.queries import read_queries
from surge_dagster.engine.compare.report import Comparison
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.current_space import named_space, space_of_readers
from surge_dagster.engine.store.store import Store
from surge_dagster.orchestration.asset_events import DATA_VERSION_TAG
from surge_dagster.orchestration.events import report_events
from surge_dagster.orchestration.failures import errors_as_failures, markdown_table, run_failure
from surge_dagster.orchestration.heartbeats import executing
from surge_dagster.orchestration.launch import POOL, job_of
from surge_dagster.orchestration.names import CatalogNames, CatalogResources


class QueriesConfig(dg.Config):
    queries: str | None = Field(
        None,
        description="CSV file on the run's machine: query, and id or partition,id of relevant rows",
    )
    load_models: bool = Field(
        False, description="load a model that only the output names, if you trust the output"
    )


class CompareConfig(QueriesConfig):
    space: str | None = Field(None, description="name of a space; unset: the current one")
    with_space: str = Field(description="name of the space to compare it with")
    sample: int = Field(SAMPLE, ge=1, description="without queries: rows to draw as queries")


def compare_spaces(names: CatalogNames) -> dg.JobDefinition:
    """Return the job that compares two spaces."""

    @dg.op(
        name=names.compare_op,
        out=dg.Out(dg.Nothing),
        required_resource_keys=names.resource_keys,
        pool=POOL,
    )
    def compare_op(context: dg.OpExecutionContext, config: CompareConfig) -> None:
        """Compare two spaces by what searches find in them."""
        resources = names.resources(context)
        with executing(context), errors_as_failures(context):
            store = resources.output.open()
            current = space_of_readers(store)
            first = space_of_readers(store, config.space)
            second = named_space(store, config.with_space)
            found = _compare(resources, store, first, second, config, config.sample)
        context.log.info(found.in_words())
        event = dg.AssetObservation(
            names.current_space,
            description=found.in_words(),
            metadata=_metadata(found),
            # else what depends on the asset would be stale
            tags={DATA_VERSION_TAG: current.name},
        )
        report_events(context.instance, context, [event])

    return job_of(
        names.compare_job,
        compare_op,
        "Compares what searches find in two spaces, and shows the result as an observation of "
        f"`{names.current_space.path[-1]}`.",
    )


def require_ndcg(
    context: dg.OpExecutionContext,
    resources: CatalogResources,
    store: Store,
    space: Space,
    config: QueriesConfig,
    min_ratio: float,
) -> dict[str, Any]:
    """Return metadata of a comparison with the current space; raise the run's failure if nDCG@10 is
    less than this ratio of the current one."""
    if config.queries is None:
        raise ConfigError("min_ndcg_ratio needs labelled queries. Set queries to a CSV file.")
    found = _compare(resources, store, space_of_readers(store), space, config, 0)
    shortfall = found.shortfall(min_ratio)
    if shortfall:
        raise run_failure(context, shortfall, metadata=_metadata(found))
    return _metadata(found)


def _compare(
    resources: CatalogResources,
    store: Store,
    first: Space,
    second: Space,
    config: QueriesConfig,
    sample: int,
) -> Comparison:
    queries = read_queries(config.queries) if config.queries else sample
    open_pool = partial(query_pool, resources.encoder, store, yes=config.load_models)
    return compare(store, first, second, queries, open_pool)


def _metadata(found: Comparison) -> dict[str, Any]:
    tables = {title: markdown_table(rows) for title, rows in found.tables().items()}
    return {"comparison": dg.MetadataValue.json(found.as_dict()), **tables}
