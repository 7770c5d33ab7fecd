"""Checks that read everything: each partition with its file, and each file with the catalog.

They judge `embeddings`, except for truncation, which is the texts' and so judges
`source_partitions`. The job `catalog_check` evaluates them. Rows are streamed; what grows with the
catalog is the list of violations.

Runs of `embeddings` evaluate three of them as well, `dimensions_match`, `row_counts_match` and
`few_rows_are_set_aside`, which therefore belong to the op of that asset. The job logs their results
as events.

Dagster plans the other checks in every backfill and in every materialization from the UI. A
backfill does not start if its plan lacks one. But their op is always skipped there: it depends on
an output of the asset's op, which has none, because it logs its events itself. Dagster shows these
checks as skipped until the job evaluates them again.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import dagster as dg

from surge_dagster.assets.checks import (
    Findings,
    check_result,
    log_result,
    outputs_without_result,
)
from surge_dagster.assets.derived_spaces import lag_results
from surge_dagster.config.nested_settings import CheckName
from surge_dagster.config.settings import Settings
from surge_dagster.engine.errors import ConfigError, SurgeError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.support.counts import counted
from surge_dagster.engine.verify.verification import (
    Kind,
    Verified,
    Violation,
    unjudged_kinds,
    verify,
)
from surge_dagster.orchestration.failures import errors_as_failures, run_failure
from surge_dagster.orchestration.heartbeats import executing
from surge_dagster.orchestration.launch import RUN_TAGS
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.outcome import SetAside, Truncation, Violations
from surge_dagster.orchestration.spaces import existing_space

# What each check judges, and the kinds of violations that it covers; none for a check that counts.
_GROUPS: dict[CheckName, tuple[str, tuple[Kind, ...]]] = {
    "every_partition_is_embedded": (
        "Every partition of the catalog has a file of its present source version.",
        ("missing", "stale", "source", "refused"),
    ),
    "row_counts_match": ("Each file has as many rows as its source.", ("rows",)),
    "ids_match": ("Each file has its source's ids, once each and in the same order.", ("ids",)),
    "texts_match": (
        "Each file has its source's texts and carried columns, in order.",
        ("texts", "columns"),
    ),
    "files_are_whole": (
        "Each file can be read in full, checksums included.",
        ("damaged", "vectors", "unread"),
    ),
    "dimensions_match": ("Each file's vectors have the space's dimension.", ("dimension",)),
    "vectors_are_finite": ("No vector holds a NaN or an infinity.", ("finite",)),
    "vectors_have_length_1": (
        "Each vector has length 1. It is skipped if the space is not normalized.",
        ("length",),
    ),
    "one_space": ("No file of the space holds vectors of another one.", ("space",)),
    "no_orphan_files": (
        "No file and no staged rows belong to a partition that was removed from the catalog.",
        ("orphan", "unused"),
    ),
    "few_texts_are_truncated": (
        "In no partition are more texts than `max_truncated_share` longer than the model reads.",
        (),
    ),
    "few_rows_are_set_aside": (
        "In no partition are more rows than `max_set_aside_share` set aside because they are bad.",
        (),
    ),
}
_OF_RUNS = ("dimensions_match", "row_counts_match", "few_rows_are_set_aside")
_CHECK_OF: dict[Kind, CheckName] = {
    kind: name for name, (_, kinds) in _GROUPS.items() for kind in kinds
}


def catalog_checks(names: CatalogNames, settings: Settings) -> dg.AssetChecksDefinition:
    """Return the checks that only `catalog_check` evaluates.

    Raises:
        ConfigError: all of them are off.
    """
    specs = _specs(names, settings)

    @dg.multi_asset_check(
        name=names.catalog_checks_op,
        specs=specs,
        can_subset=True,
        required_resource_keys=names.resource_keys,
    )
    def evaluate(
        context: dg.AssetCheckExecutionContext,
    ) -> Iterator[dg.AssetCheckResult | dg.Output[None]]:
        """Read the whole catalog and the whole output, and evaluate the checks."""
        op_context = context.op_execution_context
        with executing(op_context):
            results = _compare(names, settings, op_context)
        is_whole = op_context.job_name == names.check_job
        if is_whole:
            results += lag_results(names, op_context, settings.derived)

        chosen = context.selected_asset_check_keys
        yield from outputs_without_result([spec for spec in specs if spec.key in chosen], results)
        for result in results:
            key = dg.AssetCheckKey(result.asset_key or names.embeddings, result.check_name or "")
            if key in chosen:
                yield result
            elif is_whole:  # a check of an asset's own op
                log_result(names, op_context, result)

    return evaluate


def catalog_check(names: CatalogNames, checks: dg.AssetChecksDefinition) -> Any:
    """Return the job that evaluates the catalog's checks, and how far derived spaces lag behind."""
    return dg.define_asset_job(
        names.check_job,
        selection=dg.AssetSelection.checks(checks),
        executor_def=dg.in_process_executor,
        run_tags=RUN_TAGS,
        description="Compares the whole catalog with the whole output.",
    )


def _specs(names: CatalogNames, settings: Settings) -> list[dg.AssetCheckSpec]:
    specs: list[dg.AssetCheckSpec] = []
    for name in _wanted(settings):
        if name not in _OF_RUNS:
            description, _ = _GROUPS[name]
            asset = _asset(names, name)
            specs.append(dg.AssetCheckSpec(name, asset=asset, description=description))
    if not specs:
        raise ConfigError(
            "the setting checks turns off everything that only catalog_check does; leave one "
            "check on"
        )
    return specs


def _wanted(settings: Settings) -> list[CheckName]:
    return [name for name in _GROUPS if settings.severity(name) != "off"]


def _asset(names: CatalogNames, name: CheckName) -> dg.AssetKey:
    return names.source_partitions if name == "few_texts_are_truncated" else names.embeddings


def _compare(
    names: CatalogNames, settings: Settings, context: dg.OpExecutionContext
) -> list[dg.AssetCheckResult]:
    """Read everything once; return the results of all checks that are on."""
    resources = names.resources(context)
    with errors_as_failures(context):
        store = resources.output.open()
        space = existing_space(names, resources, store, "check")
        source = resources.open_source(resources.encoder.reaching(space.loadable))
    comparison = _Comparison(settings)
    try:
        for judged in verify(source, store, space):
            if isinstance(judged, Violation):
                comparison.add_violation(judged)
            elif isinstance(judged, Verified):
                comparison.add_partition(judged)
    except SurgeError as error:
        # It is not transient: all of it would be read once more.
        read = counted(comparison.partitions, "partition")
        raise run_failure(
            context,
            f"no check was evaluated: the reading ended after {read}. {error} Launch "
            f"{names.check_job} again.",
        ) from error
    context.log.info(comparison.in_words())
    return comparison.results(names, space)


class _Comparison:
    """What the reading of the catalog and the output has found."""

    def __init__(self, settings: Settings) -> None:
        self.partitions = 0
        self._settings = settings
        self._violations: dict[CheckName, Violations] = {name: [] for name in _GROUPS}
        self._truncation = Truncation(settings.max_truncated_share)
        self._set_aside = SetAside(settings.max_set_aside_share)
        # partitions by the check that they violate, which the other checks did not judge
        self._faults: Counter[CheckName] = Counter()
        self._last: Violation | None = None

    def add_violation(self, violation: Violation) -> None:
        self._last = violation
        listed = self._violations[_CHECK_OF[violation.kind]]
        listed.append((violation.key, violation.reason))

    def add_partition(self, verified: Verified) -> None:
        """Count a partition, whose violation came before it."""
        self.partitions += 1
        if self._last is not None and self._last.key == verified.key:
            self._faults[_CHECK_OF[self._last.kind]] += 1
        else:
            self._truncation.add(verified.key, verified.rows, verified.truncated)
            self._set_aside.add(verified.key, verified.rejected_rows, verified.source_rows)

    def in_words(self) -> str:
        rows = counted(self._truncation.rows, "row")
        violations = counted(sum(map(len, self._violations.values())), "violation")
        return f"Read {counted(self.partitions, 'partition')} with {rows}: {violations}"

    def results(self, names: CatalogNames, space: Space) -> list[dg.AssetCheckResult]:
        self._violations["few_texts_are_truncated"] = self._truncation.above
        self._violations["few_rows_are_set_aside"] = self._set_aside.above
        common = {
            "space_title": space.title,
            "space": space.name,
            "partitions": self.partitions,
            "rows": self._truncation.rows,
        }
        unjudged = unjudged_kinds(space)
        results: list[dg.AssetCheckResult] = []
        for name in _wanted(self._settings):
            _, kinds = _GROUPS[name]
            if not kinds or not unjudged.issuperset(kinds):
                results.append(self._result(names, name, common))
        return results

    def _result(
        self, names: CatalogNames, name: CheckName, common: dict[str, Any]
    ) -> dg.AssetCheckResult:
        metrics = common
        if name == "few_texts_are_truncated":
            metrics = common | self._truncation.metrics()
        if name == "few_rows_are_set_aside":
            metrics = common | self._set_aside.metrics()
        unjudged = self._faults.total() - self._faults[name]
        if name == "no_orphan_files":  # it looks for files without a partition
            unjudged = 0
        judged = self.partitions - unjudged
        not_judged = {"with a violation of another check": unjudged}
        findings = Findings(name, self._violations[name], judged, not_judged, metrics)
        result = check_result(_asset(names, name), self._settings, findings)
        if not judged and name != "no_orphan_files":
            return result._replace(passed=False)  # nothing was judged
        return result
