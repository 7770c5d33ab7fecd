"""The check that ends every run and covers what the run did.

A vector that cannot be right never gets as far as a file: the engine refuses it before it is published. What was
published is read back beside its source before Dagster hears of it, so a partition that Dagster calls materialized is
what a reader will find. The check says whether all of the run's partitions got there, and names those that did not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import dagster as dg
from dagster._core.events import AssetMaterializationPlannedData, DagsterEvent

from surge_dagster.assets.failure_table import cell, table_of_failures
from surge_dagster.assets.names import CatalogNames
from surge_dagster.assets.partition_keys import to_partition_key
from surge_dagster.assets.refresh import Outcome

_TABLE_ROWS = 200
_NAMED = 20
# Each costs an event of about 10 ms just before the run ends.
_MARKED_AS_FAILED = 1000


def run_check(names: CatalogNames) -> dg.AssetCheckSpec:
    """The check that ends every run."""
    return dg.AssetCheckSpec(
        names.run_check.name,
        asset=names.embeddings,
        blocking=True,
        description=(
            "Every partition of the run is published, and what was published reads back as it should: rows, ids, "
            "texts, dimension, finite values, unit length where the space has it, one space. Lists what failed and why."
        ),
    )


def run_check_metadata(outcome: Outcome) -> dict[str, Any]:
    """The run's figures, under the names of `embed --json`, and the table of what failed."""
    figures = {
        name: round(value, 4) if isinstance(value, float) else value for name, value in outcome.report.as_dict().items()
    }
    failed = [{"key": failure.key, "reason": failure.reason} for failure in outcome.failures]
    return figures | {"partitions_failed": dg.MetadataValue.json(failed), "failed": _table_of(outcome)}


def _table_of(outcome: Outcome) -> dg.MarkdownMetadataValue:
    return dg.MetadataValue.md(table_of_failures(outcome.failures))


def failure_table(rows: Sequence[tuple[str, str]]) -> str:
    """A markdown table of keys and reasons, cut to what a person will read."""
    if not rows:
        return "none"
    lines = ["| partition | reason |", "| --- | --- |"]
    lines += [f"| `{cell(key)}` | {cell(reason)} |" for key, reason in rows[:_TABLE_ROWS]]
    if len(rows) > _TABLE_ROWS:
        lines.append(f"| … | and {len(rows) - _TABLE_ROWS:,} more |")
    return "\n".join(lines)


def failure_of(names: CatalogNames, outcome: Outcome) -> dg.Failure:
    """What a run with refused partitions ends with; nothing that went wrong in the data gets better by trying again."""
    named = [failure.reason for failure in outcome.failures[:_NAMED]]
    if len(outcome.failures) > _NAMED:
        named.append(f"… and {len(outcome.failures) - _NAMED:,} more, listed in the check {names.run_check.name}")
    return dg.Failure(
        f"{len(outcome.failures):,} partitions failed; the others are published and will not be encoded again.\n"
        + "\n".join(named),
        metadata={"failed": _table_of(outcome)},
        allow_retries=False,
    )


def mark_as_failed(names: CatalogNames, context: dg.OpExecutionContext, keys: Iterable[str]) -> None:
    """Make Dagster show exactly these partitions as failed when the run has ended.

    Dagster shows a partition as failed when a failed run planned it and did not materialize it. Runs here plan their
    whole range in one event, without which fresh partitions that a failing run skipped would be shown as failed too.
    """
    step = str(context.op_handle)
    for key in list(dict.fromkeys(keys))[:_MARKED_AS_FAILED]:
        planned = AssetMaterializationPlannedData(names.embeddings, partition=to_partition_key(key))
        event = DagsterEvent.build_asset_materialization_planned_event(context.job_name, step, planned)
        context.instance.report_dagster_event(event, context.run_id)
