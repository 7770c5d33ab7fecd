"""The checks that end every run and cover what the run did.

A vector that cannot be right never gets as far as a file: the engine refuses it before it is published. What was
published is read back beside its source before Dagster hears of it, so a partition that Dagster calls materialized is
what a reader will find. One check says whether all of the run's partitions got there, names those that did not, and
carries the run's figures and pictures. The others look at what was encoded and warn.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import dagster as dg
from dagster._core.events import AssetMaterializationPlannedData, DagsterEvent

from surge_dagster.assets.failure_table import cell, table_of_failures
from surge_dagster.assets.names import CatalogNames
from surge_dagster.assets.partition_keys import to_partition_key
from surge_dagster.assets.refresh import Outcome
from surge_dagster.assets.run_findings import Listed
from surge_dagster.assets.run_pictures import run_pictures
from surge_dagster.check_policy import CheckName, CheckPolicy

_TABLE_ROWS = 200
_NAMED = 20
# Each costs an event of about 10 ms just before the run ends.
_MARKED_AS_FAILED = 1000

SEVERITIES = {"error": dg.AssetCheckSeverity.ERROR, "warn": dg.AssetCheckSeverity.WARN}
_DESCRIPTIONS: dict[CheckName, str] = {
    "few_texts_are_truncated": (
        "In no partition that was encoded are more texts than `max_truncated_share` longer than the model reads."
    ),
    "vectors_have_not_drifted": (
        "Texts that were encoded again got the vectors that they had: on a sample of each replaced file, the mean "
        "cosine is at least `min_previous_cosine`. Else the model or a device does not compute what it did."
    ),
}


def run_checks(names: CatalogNames, policy: CheckPolicy) -> list[dg.AssetCheckSpec]:
    """The checks that end every run, those left out that are off."""
    return [
        dg.AssetCheckSpec(
            names.run_check.name,
            asset=names.embeddings,
            blocking=True,
            description=(
                "Every partition of the run is published, and what was published reads back as it should: rows, ids, "
                "texts, dimension, finite values, unit length where the space has it, one space. Lists what failed and "
                "why."
            ),
        ),
        *(
            dg.AssetCheckSpec(name, asset=names.embeddings, description=description)
            for name, description in _DESCRIPTIONS.items()
            if policy.severity(name) != "off"
        ),
    ]


def run_check_results(names: CatalogNames, policy: CheckPolicy, outcome: Outcome) -> Iterator[dg.AssetCheckResult]:
    """What the checks of one run found; the blocking one last."""
    truncation, previous = outcome.findings.truncation, outcome.findings.previous
    mean_cosine = previous.mean_cosine
    found: dict[CheckName, tuple[Listed, dict[str, Any]]] = {
        "few_texts_are_truncated": (
            truncation.above,
            {
                "texts": truncation.rows,
                "truncated": truncation.truncated,
                "truncated_share": round(truncation.share, 4),
                "allowed_share": policy.max_truncated_share,
            },
        ),
        "vectors_have_not_drifted": (
            previous.below,
            {"compared_partitions": previous.partitions, "compared_rows": previous.rows}
            | ({} if mean_cosine is None else {"mean_cosine": round(mean_cosine, 6)})
            | {"least_cosine_due": policy.min_previous_cosine},
        ),
    }
    for name, (listed, figures) in found.items():
        if policy.severity(name) != "off":
            yield check_result(names.embeddings, name, policy, listed, figures)
    yield dg.AssetCheckResult(
        asset_key=names.embeddings,
        check_name=names.run_check.name,
        passed=not outcome.failures,
        metadata=_run_check_metadata(outcome),
    )


def check_result(
    asset: dg.AssetKey, name: CheckName, policy: CheckPolicy, listed: Listed, figures: dict[str, Any]
) -> dg.AssetCheckResult:
    """What one check of a catalog or a run found: its figures, and the partitions for which it does not hold."""
    violations = {"violations": listed.count, "failed": dg.MetadataValue.md(failure_table(listed.rows, listed.count))}
    return dg.AssetCheckResult(
        asset_key=asset,
        check_name=name,
        passed=not listed.count,
        severity=SEVERITIES[policy.severity(name)],
        metadata=figures | violations,
    )


def evaluation_of(names: CatalogNames, result: dg.AssetCheckResult) -> dg.AssetCheckEvaluation:
    """The same for an op of a job, which can log evaluations only."""
    return dg.AssetCheckEvaluation(
        asset_key=names.embeddings,
        check_name=result.check_name or "",
        passed=result.passed,
        metadata=result.metadata,
        severity=result.severity,
        blocking=result.check_name == names.run_check.name,
    )


def _run_check_metadata(outcome: Outcome) -> dict[str, Any]:
    """The run's figures, under the names of `embed --json`, the table of what failed, and pictures of the run."""
    figures = {
        name: round(value, 4) if isinstance(value, float) else value for name, value in outcome.report.as_dict().items()
    }
    failed = [{"key": failure.key, "reason": failure.reason} for failure in outcome.failures]
    pictures = run_pictures(outcome.report, outcome.findings)
    return figures | pictures | {"partitions_failed": dg.MetadataValue.json(failed), "failed": _table_of(outcome)}


def _table_of(outcome: Outcome) -> dg.MarkdownMetadataValue:
    return dg.MetadataValue.md(table_of_failures(outcome.failures))


def failure_table(rows: Sequence[tuple[str, str]], count: int | None = None) -> str:
    """A markdown table of keys and reasons, cut to what a person will read.

    Args:
        count: of all, where `rows` has only the first ones.
    """
    if not rows:
        return "none"
    count = len(rows) if count is None else count
    lines = ["| partition | reason |", "| --- | --- |"]
    lines += [f"| `{cell(key)}` | {cell(reason)} |" for key, reason in rows[:_TABLE_ROWS]]
    if count > _TABLE_ROWS:
        lines.append(f"| … | and {count - _TABLE_ROWS:,} more |")
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
