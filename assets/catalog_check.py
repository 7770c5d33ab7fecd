"""Checks that read everything: each partition beside its file, and each file of the space beside
the catalog.

They judge `embeddings`, except for truncation, which is the texts' and so judges
`source_partitions`. The job `catalog_check` evaluates them. Rows are streamed; what grows with the
catalog is the list of violations.

Runs of `embeddings` evaluate two of them as well, `dimensions_match` and `row_counts_match`, which
therefore belong to the op of that asset.

Dagster plans the other checks in every backfill and in every materialization from the UI. A
backfill does not start if its plan lacks one. But their op is always skipped there: it depends on
an output of the asset's op, which has none, because it logs its events itself. Dagster shows these
checks as skipped until the job evaluates them again.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import dagster as dg

from surge_dagster.assets.checks import check_result, evaluation_of, is_of_runs
from surge_dagster.assets.derived_spaces import lag_results
from surge_dagster.config.check_policy import CheckName, CheckPolicy
from surge_dagster.config.nested_settings import DerivedSettings
from surge_dagster.engine.errors import ConfigError, SurgeError
from surge_dagster.engine.support.counts import counted
from surge_dagster.engine.tables.opening import release
from surge_dagster.engine.verify.verification import Kind, Verified, Violation, verify
from surge_dagster.orchestration.discovery import existing_space
from surge_dagster.orchestration.failures import errors_as_failures, run_failure
from surge_dagster.orchestration.heartbeats import executing
from surge_dagster.orchestration.launch import job_of
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.outcome import Truncation, Violations

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
        ("damaged", "vectors"),
    ),
    "dimensions_match": ("Each file's vectors have the space's dimension.", ("dimension",)),
    "vectors_are_finite": ("No vector holds a NaN or an infinity.", ("finite",)),
    "vectors_have_length_1": (
        "Each vector has length 1, where the space is normalized.",
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
}
_CHECK_OF: dict[Kind, CheckName] = {
    kind: name for name, (_, kinds) in _GROUPS.items() for kind in kinds
}


def catalog_checks(names: CatalogNames, policy: CheckPolicy) -> dg.AssetChecksDefinition:
    """Return the checks that only `catalog_check` evaluates.

    Raises:
        ConfigError: all that `catalog_check` does is off.
    """
    wanted = _wanted(policy)
    if not wanted:
        raise ConfigError(
            "the setting checks turns off everything that catalog_check does; leave one check on"
        )

    specs: list[dg.AssetCheckSpec] = []
    for name in wanted:
        if not is_of_runs(name):
            description, _ = _GROUPS[name]
            specs.append(
                dg.AssetCheckSpec(name, asset=_asset(names, name), description=description)
            )

    @dg.multi_asset_check(
        name=names.catalog_checks_op,
        specs=specs,
        can_subset=True,
        required_resource_keys=names.resource_keys,
    )
    def evaluate(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
        """Read the whole catalog and the whole output, where only checks are executed."""
        chosen = [key.name for key in context.selected_asset_check_keys]
        with executing(context.op_execution_context):
            compared = _compare(names, policy, context.op_execution_context)
        yield from [result for result in compared if result.check_name in chosen]

    return evaluate


def catalog_check(
    names: CatalogNames, policy: CheckPolicy, derived: Sequence[DerivedSettings]
) -> dg.JobDefinition:
    """Return the job that evaluates the catalog's checks, and how far derived spaces lag behind.

    It is not a job of asset checks: those that runs evaluate too can be selected only with their
    asset.
    """

    @dg.op(
        name=names.compare_op, out=dg.Out(dg.Nothing), required_resource_keys=names.resource_keys
    )
    def compare(
        context: dg.OpExecutionContext,
    ) -> Iterator[dg.AssetCheckEvaluation | dg.Output[None]]:
        """Read the whole catalog and the whole output, and evaluate the checks."""
        with executing(context):
            compared = _compare(names, policy, context)
        yield from [evaluation_of(names, result, context.instance) for result in compared]
        yield from [
            evaluation_of(names, result, context.instance)
            for result in lag_results(names, context, derived)
        ]
        yield dg.Output(None)

    return job_of(names.check_job, compare, "Compares the whole catalog with the whole output.")


def _wanted(policy: CheckPolicy) -> list[CheckName]:
    return [name for name in _GROUPS if policy.severity(name) != "off"]


def _asset(names: CatalogNames, name: CheckName) -> dg.AssetKey:
    return names.source_partitions if name == "few_texts_are_truncated" else names.embeddings


def _compare(
    names: CatalogNames, policy: CheckPolicy, context: dg.OpExecutionContext
) -> list[dg.AssetCheckResult]:
    """Read everything once; the results of all checks that are on."""
    resources = names.resources(context)
    with errors_as_failures(context):
        source, store = resources.catalog.open(), resources.output.open()
        space = existing_space(names, resources, store, "check")
    wanted = _wanted(policy)
    listed: dict[CheckName, Violations] = {name: [] for name in _GROUPS}
    truncation = Truncation(policy.max_truncated_share)
    unread: Violations = []
    # partitions by the check that they violate; None: not read
    faults: Counter[CheckName | None] = Counter()
    fault: Violation | None = None
    partitions = violations = 0
    try:
        for judged in verify(source, store, space):
            if isinstance(judged, Violation):
                violations += 1
                group = unread if judged.kind == "unread" else listed[_CHECK_OF[judged.kind]]
                group.append((judged.key, judged.reason))
                fault = judged
            elif isinstance(judged, Verified):
                partitions += 1
                if fault is not None and fault.key == judged.key:
                    faults[_CHECK_OF.get(fault.kind)] += 1
                else:
                    truncation.add(judged.key, judged.rows, judged.truncated)
    except SurgeError as error:
        # It is not transient: all of it would be read once more.
        raise run_failure(
            context,
            f"no check was evaluated: the reading ended after {counted(partitions, 'partition')}. "
            f"{error} Launch {names.check_job} again.",
        ) from error
    release(source)
    read = f"{counted(partitions, 'partition')} with {counted(truncation.rows, 'row')}"
    context.log.info(f"Read {read}: {counted(violations, 'violation')}")
    listed["few_texts_are_truncated"] = truncation.above
    # No check knows about partitions that were not read; one of the evaluated checks lists them.
    lists_unread: CheckName = "files_are_whole" if "files_are_whole" in wanted else wanted[0]
    listed[lists_unread].extend(unread)
    common = {
        "space_title": space.title,
        "space": space.name,
        "partitions": partitions,
        "rows": truncation.rows,
    }
    metrics: dict[CheckName, dict[str, Any]] = {"few_texts_are_truncated": truncation.metrics()}
    now = f" (catalog_check of {datetime.now(UTC):%Y-%m-%d %H:%M} UTC)"

    def result(name: CheckName) -> dg.AssetCheckResult:
        others = sum(faults.values()) - faults[None] - faults[name]
        unjudged = {"could not be read": faults[None], "with a violation of another check": others}
        if name == "no_orphan_files":  # it looks for files without a partition
            unjudged = {}
        judged = partitions - sum(unjudged.values())
        of_check = common | metrics.get(name, {})
        checked = check_result(
            _asset(names, name), name, policy, listed[name], judged, unjudged, of_check, now
        )
        # One that could judge nothing says nothing, unless it looks for files without a partition.
        return checked if judged or name == "no_orphan_files" else checked._replace(passed=False)

    return [result(name) for name in wanted]
