"""The assets `lancedb` and `pgvector`: tables that follow the vectors, with a check that compares them with the files.

Each is materialized by the job `hand_over`, which the sensor `hand_over_changes` launches when runs have changed
embeddings. A hand-over that dies is repeated by the next one, and does nothing twice.

Dagster reads the annotations of assets while it makes them, so they must not be strings here.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import dagster as dg

from surge_dagster.consumers.comparison import Comparison, compare
from surge_dagster.consumers.target import HandOver, Target
from surge_dagster.engine.errors import SurgeError, TransientError
from surge_dagster.engine.feed.changes import changes
from surge_dagster.engine.support.counts import counted
from surge_dagster.orchestration.active_runs import record_process
from surge_dagster.orchestration.failures import failure_table
from surge_dagster.orchestration.names import CatalogNames

CHECK = "table_matches_files"
_NAMED = 5


def target_asset(names: CatalogNames, key: dg.AssetKey, kind: str, target: Target) -> dg.AssetsDefinition:
    """The asset of a table.

    Args:
        key: of the asset; also the name under which the table confirms what it has.
        kind: of the database, shown on the asset's page.
    """
    check = dg.AssetCheckSpec(
        CHECK,
        asset=key,
        description=(
            "Every partition has as many rows in the table as in its file, and of a sample the vectors are equal bit "
            "for bit."
        ),
    )

    @dg.asset(
        key=key,
        deps=[names.embeddings],
        check_specs=[check],
        group_name=names.group,
        kinds={kind},
        required_resource_keys={names.output_resource},
        description=f"{target.place[0].upper()}{target.place[1:]}, which has the rows of the embedding files.",
    )
    def hand_over(context: dg.AssetExecutionContext) -> Iterator[Any]:
        """Send what changed since the last time, and compare the table with the files."""
        record_process(context.op_execution_context)
        store = getattr(context.resources, names.output_resource).open()
        try:
            done = target.apply(partial(changes, store, key.to_user_string()))
            found = compare(done.feed, target)
            if found.wrong:
                target.forget(done.feed, found.wrong)
        except SurgeError as error:
            raise dg.Failure(str(error), allow_retries=isinstance(error, TransientError)) from error
        yield dg.MaterializeResult(metadata=_metadata(done, found), check_results=[_result(found)])
        if done.failures:
            named = " ".join(map(str, list(done.failures.values())[:_NAMED]))
            raise dg.Failure(
                f"{counted(len(done.failures), 'partition')} could not be handed over; the others were. {named}",
                allow_retries=False,
            )

    return hand_over


def _metadata(done: HandOver, found: Comparison) -> dict[str, Any]:
    return {
        "space": done.feed.space.name,
        "partitions": done.partitions,
        "rows_sent": done.rows_sent,
        "rows_deleted": done.rows_deleted,
        "commits": done.commits,
        "dagster/row_count": found.rows_found,
        "partitions_failed": len(done.failures),
    }


def _result(found: Comparison) -> dg.AssetCheckResult:
    line = f"{found.rows_found:,} rows, {found.rows_expected:,} expected; {found.vectors_compared:,} vectors compared"
    if found.interrupted:
        line += f"; the others of the sample could not be compared: {found.interrupted}"
    if found.wrong:
        line += f"; the next hand-over loads {counted(len(found.wrong), 'partition')} whole, because of differences"
    return dg.AssetCheckResult(
        check_name=CHECK,
        passed=not found.wrong and not found.interrupted,
        description=line,
        metadata={
            "rows_expected": found.rows_expected,
            "rows_found": found.rows_found,
            "vectors_compared": found.vectors_compared,
            "failed": failure_table(list(found.wrong.items())),
        },
    )
