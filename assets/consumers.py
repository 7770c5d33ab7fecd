"""The assets `lancedb`, `pgvector` and `qdrant`: tables that follow the vectors, with a check that
compares them with the files.

Each is materialized by the job `hand_over`, which the sensor `hand_over_changes` launches when runs
have changed embeddings. A hand-over that dies is repeated by the next one, and does nothing twice.
"""
# Dagster reads annotations when it makes an asset or an op, so they must not be strings here.

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import dagster as dg
from pydantic import Field

from surge_dagster.assets.embeddings import files_metadata
from surge_dagster.config.settings import Settings
from surge_dagster.consumers.comparison import Comparison, apply_and_compare
from surge_dagster.consumers.settings import TargetSettings
from surge_dagster.consumers.target import HandOver
from surge_dagster.engine.errors import SurgeError
from surge_dagster.engine.feed.changes import changes
from surge_dagster.engine.support.counts import counted
from surge_dagster.orchestration.failures import errors_as_failures, failed_metadata, run_failure
from surge_dagster.orchestration.heartbeats import executing
from surge_dagster.orchestration.names import CatalogNames

CHECK = "table_matches_files"
_CHECK_DESCRIPTION = (
    "Every partition has as many rows in the table as in its file, and of a sample the vectors are "
    "equal bit for bit."
)
_NAMED = 5


class HandOverConfig(dg.Config):
    """Options of a hand-over."""

    compare_everything: bool = Field(
        False,
        description=(
            "Compare every vector of the table with the files, not a sample, and measure the "
            "recall of its index: once a week, say."
        ),
    )


def target_assets(names: CatalogNames, settings: Settings) -> list[dg.AssetsDefinition]:
    """Return the assets of the tables that the settings name."""
    columns = _columns(settings)
    targets = {
        names.lancedb: settings.lancedb,
        names.pgvector: settings.pgvector,
        names.qdrant: settings.qdrant,
    }
    return [_target_asset(names, key, each, columns) for key, each in targets.items() if each]


def _columns(settings: Settings) -> Mapping[str, Any]:
    """Return metadata of a table: its columns."""
    files = files_metadata(settings, settings.dtype, settings.dimension)
    columns = [dg.TableColumn("partition", "string", "key of the partition")]
    for column in files["dagster/column_schema"].columns:
        if column.name != "text_hash":
            columns.append(column)
    return {"dagster/column_schema": dg.TableSchema(columns)}


def _target_asset(
    names: CatalogNames, key: dg.AssetKey, settings: TargetSettings, columns: Mapping[str, Any]
) -> dg.AssetsDefinition:
    """Return the asset of a table; the table confirms what it has under the asset's key."""
    target = settings.target()

    @dg.asset(
        key=key,
        deps=[names.embeddings, names.current_space],
        check_specs=[dg.AssetCheckSpec(CHECK, asset=key, description=_CHECK_DESCRIPTION)],
        metadata=columns,
        group_name=names.group,
        kinds={key.path[-1]},
        required_resource_keys={names.output_resource},
        description=(
            f"{target.place[0].upper()}{target.place[1:]}, which has the rows of the embedding "
            f"files. The sensor `{names.hand_over_sensor}` launches the job "
            f"`{names.hand_over_job}`, which brings it up to date."
        ),
    )
    def hand_over(context: dg.AssetExecutionContext, config: HandOverConfig) -> Iterator[Any]:
        """Send what changed since the last time, and compare the table with the files."""
        op_context = context.op_execution_context
        store = getattr(context.resources, names.output_resource).open()
        open_feed = partial(changes, store, key.to_user_string())
        with executing(op_context), errors_as_failures(op_context):
            everything = config.compare_everything
            done, compared = apply_and_compare(target, open_feed, everything=everything)
        yield dg.MaterializeResult(
            metadata=_metadata(done, compared), check_results=[_result(compared, done.failures)]
        )
        if done.failures:
            raise run_failure(op_context, _failures(done, compared))

    return hand_over


def _failures(done: HandOver, compared: Comparison) -> str:
    """Say how many partitions failed, why the first ones did, and how many differ as well."""
    failed = counted(len(done.failures), "partition")
    reasons = " ".join(map(str, list(done.failures.values())[:_NAMED]))
    line = f"{failed} could not be handed over; the others were. {reasons}"
    if compared.wrong:
        differing = counted(len(compared.wrong), "partition")
        line += f" {differing} of the table differ from the files as well."
    return line


def _metadata(done: HandOver, compared: Comparison) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "space": done.feed.space.name,
        "partitions": done.partitions,
        "rows_sent": done.rows_sent,
        "rows_deleted": done.rows_deleted,
        "commits": done.commits,
        "dagster/row_count": compared.rows_found,
        "partitions_failed": len(done.failures),
    }
    if compared.index_recall is not None:
        metadata["index_recall_at_10"] = compared.index_recall
    return metadata


def _result(compared: Comparison, failures: Mapping[str, SurgeError]) -> dg.AssetCheckResult:
    sampled = compared.partitions_compared
    kind = "all"
    if sampled is not None:
        kind = "a sample of"
    vectors = counted(compared.vectors_compared, "vector")
    line = (
        f"{compared.rows_found:,} rows, {compared.rows_expected:,} expected; {kind} {vectors} "
        "compared"
    )
    if compared.interrupted:
        line += f"; others could not be compared: {compared.interrupted}"
    not_judged = compared.not_judged | failures.keys()
    if not_judged:
        line += f"; {counted(len(not_judged), 'partition')} not judged, because not handed over"
    if compared.wrong:
        line += (
            f"; the next hand-over loads {counted(len(compared.wrong), 'partition')} whole, "
            "because of differences"
        )
    return dg.AssetCheckResult(
        check_name=CHECK,
        passed=not (compared.wrong or compared.interrupted or not_judged),
        description=line,
        metadata={
            "rows_expected": compared.rows_expected,
            "rows_found": compared.rows_found,
            "vectors_compared": compared.vectors_compared,
            "partitions_compared": "all" if sampled is None else ", ".join(sampled),
            "partitions_not_judged": len(not_judged),
            **failed_metadata(
                [*compared.wrong.items(), *((key, str(error)) for key, error in failures.items())]
            ),
        },
    )
