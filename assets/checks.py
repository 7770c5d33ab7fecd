"""The checks at the end of every run that was not interrupted; they cover what the run did.

The engine refuses a vector that cannot be right before it is published. One check says whether all
of the run's partitions are published, names those that are not, and carries the run's metrics.
Three judge the files that the run published or found fresh: two compare them with the space and the
source (`FileChecks`), one counts rows that were set aside. The others look at what was encoded and
warn.

A check that judged nothing has no result of the run. Dagster shows it as skipped if it planned the
check, and keeps its earlier result otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import dagster as dg

from surge_dagster.config.nested_settings import RUN_CHECK, AnyCheckName, CheckName
from surge_dagster.config.settings import Settings
from surge_dagster.engine.run.report import SLOW_PACE
from surge_dagster.engine.support.counts import counted
from surge_dagster.orchestration.dagster_internals import latest_target
from surge_dagster.orchestration.failures import failed_metadata, table_of_failures
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.outcome import Outcome, PaceOfRun, Violations

_SEVERITIES = {"error": dg.AssetCheckSeverity.ERROR, "warn": dg.AssetCheckSeverity.WARN}
_DESCRIPTIONS: dict[AnyCheckName, str] = {
    RUN_CHECK: "Every partition of the run is published. Lists what failed and why.",
    "dimensions_match": (
        "Each file's vectors have the space's dimension. Runs judge the files that "
        "they published or found up to date; the job `catalog_check` judges all files."
    ),
    "row_counts_match": (
        "Each file has as many rows as its source. Runs judge the footers of the files that they "
        "published or found up to date; the job `catalog_check` judges all files, row by row."
    ),
    "few_texts_are_truncated": (
        "In no partition that was encoded are more texts than `max_truncated_share` longer than "
        "the model reads."
    ),
    "few_rows_are_set_aside": (
        "In no partition are more rows than `max_set_aside_share` set aside because they are bad. "
        "Runs judge the files that they published or found up to date; the job `catalog_check` "
        "judges all files."
    ),
    "vectors_have_not_drifted": (
        "A sample of old rows, encoded again before the run reused any, got the same vectors, as "
        "exactly as the precision promises. Otherwise the model or a device computes other "
        "vectors than before, and the run reuses none."
    ),
    "encode_not_slow": (
        f"No encode call took over {SLOW_PACE:g} times as long as the calls of about its size "
        "before it in the run. Otherwise something else uses the device, or slows it down."
    ),
}

_MOST_SLOW_SHOWN = 20
# An operator would compare them with the run's: of the encoding, and of the engine's run.
_OTHER_DURATIONS = ("wall_seconds", "run_seconds")
_COSTS = ("cost", "cost_per_million_texts")  # may be far below 1


def run_checks(names: CatalogNames, settings: Settings) -> list[dg.AssetCheckSpec]:
    """Return the checks that end every run, without those that are off."""
    specs: list[dg.AssetCheckSpec] = []
    for name, description in _DESCRIPTIONS.items():
        if settings.severity(name) != "off":
            spec = dg.AssetCheckSpec(
                name,
                asset=names.embeddings,
                blocking=name == RUN_CHECK,
                description=description,
            )
            specs.append(spec)
    return specs


@dataclass(frozen=True, slots=True)
class Findings:
    """What a check found.

    Attributes:
        judged: how many partitions, or whatever `unit` says.
        unjudged: partitions that the check could not judge, by what was wrong with them.
    """

    name: CheckName
    violations: Violations
    judged: int
    unjudged: Mapping[str, int]
    metrics: Mapping[str, Any] = field(default_factory=dict)
    unit: str = "partition"


def _faults(judged: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(key, fault) for key, fault in judged.items() if fault]


def run_check_results(
    names: CatalogNames, settings: Settings, outcome: Outcome, failed_elsewhere: int
) -> list[dg.AssetCheckResult]:
    """Return the results of the checks that judged something in a run, the blocking one last.

    Args:
        failed_elsewhere: partitions that failed in earlier runs and were no part of this one.
    """
    results: list[dg.AssetCheckResult] = []
    for findings in _findings(outcome):
        if findings.judged and settings.severity(findings.name) != "off":
            results.append(check_result(names.embeddings, settings, findings))
    if outcome.pace.judged and settings.severity("encode_not_slow") != "off":
        results.append(_pace_result(names, settings, outcome.pace))
    line = f"Last run: {outcome.summary}"
    if failed_elsewhere:
        others = counted(failed_elsewhere, "other partition")
        line += f". {others} failed in earlier runs; their pages say why"
    results.append(
        dg.AssetCheckResult(
            asset_key=names.embeddings,
            check_name=names.run_check.name,
            passed=not outcome.failures and outcome.ended_by is None,
            severity=_SEVERITIES[settings.severity(RUN_CHECK)],
            description=line,
            metadata={
                **_run_check_metadata(outcome),
                "partitions_failed_in_earlier_runs": failed_elsewhere,
            },
        )
    )
    return results


def _findings(outcome: Outcome) -> list[Findings]:
    files = outcome.files
    truncation = outcome.truncation
    set_aside = outcome.set_aside
    drift = outcome.drift
    failed = {"failed": len(outcome.failures)}
    uncounted = len(files.dimensions.keys() - files.rows.keys())
    without_count = {"without a row count of the source": uncounted}
    dimensions = _faults(files.dimensions)
    rows = _faults(files.rows)
    texts = {"texts": truncation.rows, **truncation.metrics()}
    return [
        Findings("dimensions_match", dimensions, len(files.dimensions), failed),
        Findings("row_counts_match", rows, len(files.rows), failed | without_count),
        Findings("few_texts_are_truncated", truncation.above, truncation.partitions, failed, texts),
        Findings(
            "few_rows_are_set_aside",
            set_aside.above,
            set_aside.partitions,
            failed,
            set_aside.metrics(),
        ),
        Findings(
            "vectors_have_not_drifted", drift.below, drift.rows, failed, drift.metrics(), "row"
        ),
    ]


def _pace_result(names: CatalogNames, settings: Settings, pace: PaceOfRun) -> dg.AssetCheckResult:
    line = f"{counted(pace.judged, 'SuperBatch')} judged, {len(pace.slow):,} slow."
    metadata: dict[str, Any] = {
        "superbatches_judged": pace.judged,
        "slowest_pace_ratio": round(pace.slowest, 2),
    }
    if pace.slow:
        metadata["slow"] = dg.MetadataValue.md(
            "\n".join(f"- {message}" for message in pace.slow[:_MOST_SLOW_SHOWN])
        )
    return dg.AssetCheckResult(
        asset_key=names.embeddings,
        check_name="encode_not_slow",
        passed=not pace.slow,
        severity=_SEVERITIES[settings.severity("encode_not_slow")],
        description=" ".join([line, *pace.slow[:1]]),
        metadata=metadata,
    )


def outputs_without_result(
    specs: Iterable[dg.AssetCheckSpec], results: Iterable[dg.AssetCheckResult]
) -> Iterator[dg.Output[None]]:
    """Yield an empty output for each check without a result: Dagster shows the check as skipped,
    but fails an op that lacks an output of one."""
    judged = {result.check_name for result in results}
    for spec in specs:
        if spec.name not in judged:
            yield dg.Output(None, output_name=spec.get_python_identifier())


def check_result(asset: dg.AssetKey, settings: Settings, findings: Findings) -> dg.AssetCheckResult:
    """Return what one check of a catalog or a run found."""
    violations = findings.violations
    unjudged = findings.unjudged
    parts = [
        f"{counted(findings.judged, findings.unit)} judged",
        counted(len(violations), "violation"),
    ]
    parts += [f"{count:,} {reason}" for reason, count in unjudged.items() if count]

    metadata = dict(findings.metrics)
    if metadata:
        metadata["partitions_judged"] = findings.judged
        metadata["partitions_not_judged"] = sum(unjudged.values())
        metadata["violations"] = len(violations)
    return dg.AssetCheckResult(
        asset_key=asset,
        check_name=findings.name,
        passed=not violations,
        severity=_SEVERITIES[settings.severity(findings.name)],
        description=", ".join(parts),
        metadata=metadata | failed_metadata(violations),
    )


def log_result(
    names: CatalogNames, context: dg.OpExecutionContext, result: dg.AssetCheckResult
) -> None:
    """Log a result as an event: the op of a job cannot return check results."""
    asset_key = result.asset_key or names.embeddings
    evaluation = dg.AssetCheckEvaluation(
        asset_key=asset_key,
        check_name=result.check_name or "",
        passed=result.passed,
        description=result.description,
        metadata=result.metadata,
        severity=result.severity,
        blocking=result.check_name == names.run_check.name,
        target_materialization_data=latest_target(context.instance, asset_key),
    )
    context.log_event(evaluation)  # pyright: ignore[reportArgumentType]


def _run_check_metadata(outcome: Outcome) -> dict[str, Any]:
    """Return the run's metrics, named as by `embed --json`, and the table of failures."""
    # also the partitions that the worklist found fresh
    fresh = outcome.fresh - outcome.published
    report = replace(
        outcome.report, partitions_written=len(outcome.published), partitions_skipped=len(fresh)
    )
    metrics: dict[str, Any] = {}
    for name, value in report.as_dict().items():
        if value in (None, [], {}) or name in _OTHER_DURATIONS:
            continue
        # Dagster would plot what was not measured as zeros.
        if not value and not report.superbatches:
            continue
        is_rounded = isinstance(value, float) and name not in _COSTS
        metrics[name] = round(value, 4) if is_rounded else value

    metrics["run_seconds"] = round(outcome.seconds, 4)
    if outcome.machines:
        metrics["machines"] = outcome.table_of_machines()

    failures = list(outcome.failures.values())
    failed = [{"key": failure.key, "reason": failure.reason} for failure in failures]
    if outcome.removed:
        metrics["partitions_removed"] = len(outcome.removed)
    if failures:
        metrics["partitions_failed"] = dg.MetadataValue.json(failed)
    if failures or outcome.ended_by:
        metrics["failed"] = table_of_failures(outcome)
    return metrics
