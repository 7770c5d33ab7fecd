"""Checks that read everything: each partition beside its file, and each file of the space beside the catalog.

They belong to `source_partitions`, which nothing executes: every backfill of `embeddings` would execute checks of that
asset, and only the job `catalog_check` should read the whole catalog. Rows are streamed; what grows with the catalog is
the list of violations.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import dagster as dg

from surge_dagster.assets.checks import check_result
from surge_dagster.check_policy import CheckName, CheckPolicy
from surge_dagster.engine.errors import ConfigError, SurgeError
from surge_dagster.engine.verify import Kind, Verified, Violation, verify
from surge_dagster.orchestration.active_runs import record_process
from surge_dagster.orchestration.discovery import known_space
from surge_dagster.orchestration.launch import RUN_TAGS
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.outcome import Truncation, Violations


@dataclass(frozen=True, slots=True)
class _Group:
    """The kinds of violations that one check covers; none for a check that counts."""

    kinds: tuple[Kind, ...]
    description: str


_GROUPS: dict[CheckName, _Group] = {
    "every_partition_is_embedded": _Group(
        ("missing", "stale", "source", "refused"),
        "Every partition of the catalog has a file of its present source version.",
    ),
    "row_counts_match": _Group(("rows",), "Each file has as many rows as its source."),
    "ids_match": _Group(("ids",), "Each file has its source's ids, once each and in the same order."),
    "texts_match": _Group(("texts",), "Each file was made from its source's texts, in the same order."),
    "files_are_whole": _Group(("damaged", "vectors"), "Each file can be read in full, checksums included."),
    "dimensions_match": _Group(("dimension",), "Each file's vectors have the space's dimension."),
    "vectors_are_finite": _Group(("finite",), "No vector holds a NaN or an infinity."),
    "vectors_have_length_1": _Group(("length",), "Each vector has length 1, where the space is normalized."),
    "one_space": _Group(("space",), "No file of the space holds vectors of another one."),
    "no_orphan_files": _Group(
        ("orphan",), "No file and no staged rows belong to a partition that was removed from the catalog."
    ),
    "few_texts_are_truncated": _Group(
        (), "In no partition are more texts than `max_truncated_share` longer than the model reads."
    ),
}


# Faults of a file that looks fresh, so that a run skips it unless the launch forces it.
_ENCODED_AGAIN: frozenset[Kind] = frozenset({"damaged", "rows", "ids", "texts", "dimension", "finite", "length"})


def catalog_checks(names: CatalogNames, policy: CheckPolicy) -> dg.AssetChecksDefinition:
    """The checks of one catalog, all evaluated by one op that reads everything once.

    Raises:
        ConfigError: every one is off.
    """
    groups = {name: group for name, group in _GROUPS.items() if policy.severity(name) != "off"}
    if not groups:
        raise ConfigError("the setting checks turns off everything that catalog_check does; leave one check on")

    @dg.multi_asset_check(
        name=names.compare_op,
        specs=[
            dg.AssetCheckSpec(name, asset=names.source_partitions, description=group.description)
            for name, group in groups.items()
        ],
        can_subset=True,  # else the UI cannot execute them
        required_resource_keys=names.resource_keys,
    )
    def compare(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
        """Read the whole catalog and the whole output, and evaluate the checks."""
        record_process(context.op_execution_context)
        yield from list(_compare(names, policy, context))

    return compare


def catalog_check(names: CatalogNames, checks: dg.AssetChecksDefinition) -> Any:
    """The job that evaluates the catalog's checks."""
    return dg.define_asset_job(
        names.check_job,
        selection=dg.AssetSelection.checks(checks),
        executor_def=dg.in_process_executor,
        run_tags=RUN_TAGS,
        description="Compares the whole catalog with the whole output.",
    )


def _compare(
    names: CatalogNames, policy: CheckPolicy, context: dg.AssetCheckExecutionContext
) -> Iterator[dg.AssetCheckResult]:
    resources = names.resources(context.resources)
    try:
        source, store = resources.catalog.open(), resources.output.open()
        space = known_space(names, store, resources.encoder.encoding_spec(), unattended=False)
        if space is None:
            model = resources.encoder.model
            raise ConfigError(f"the output {store.url!r} holds nothing of {model!r} with these settings yet")
    except SurgeError as error:
        raise dg.Failure(str(error), allow_retries=False) from error
    wanted: list[CheckName] = [name for name in _GROUPS if _key(names, name) in context.selected_asset_check_keys]
    listed: dict[CheckName, Violations] = {name: [] for name in _GROUPS}
    group_of: dict[Kind, CheckName] = {kind: name for name, group in _GROUPS.items() for kind in group.kinds}
    truncation = Truncation(policy.max_truncated_share)
    unread: Violations = []
    partitions = violations = 0
    try:
        for found in verify(source, store, space):
            match found:
                case Violation():
                    violations += 1
                    group = unread if found.kind == "unread" else listed[group_of[found.kind]]
                    group.append((found.key, _reason(names, found)))
                case Verified():
                    partitions += 1
                    truncation.add(found.key, found.rows, found.truncated)
    except SurgeError as error:
        raise dg.Failure(
            f"no check was evaluated: the reading ended after {partitions:,} partitions. {error} Launch "
            f"{names.check_job} again.",
            allow_retries=False,  # all of it would be read once more
        ) from error
    context.log.info(f"{partitions:,} partitions with {truncation.rows:,} rows were read; {violations:,} violations")
    listed["few_texts_are_truncated"] = truncation.above
    # No check knows about partitions that were not read; one of the evaluated checks lists them.
    lists_unread: CheckName = "files_are_whole" if "files_are_whole" in wanted else wanted[0]
    listed[lists_unread].extend(unread)
    common = {"space": space.name, "partitions": partitions, "rows": truncation.rows}
    metrics: dict[CheckName, dict[str, Any]] = {
        "few_texts_are_truncated": {
            "truncated": truncation.truncated,
            "truncated_share": round(truncation.share, 4),
            "allowed_share": policy.max_truncated_share,
        },
    }
    for name in _GROUPS:
        if name in wanted:
            yield check_result(names.source_partitions, name, policy, listed[name], common | metrics.get(name, {}))


def _reason(names: CatalogNames, found: Violation) -> str:
    """The violation and what to do about it in Dagster, where an operator cannot remove a file."""
    if found.kind not in _ENCODED_AGAIN or not found.remedy:
        return found.reason
    return f"{found.finding} Launch {names.embed_job} with this key and force: true."


def _key(names: CatalogNames, name: CheckName) -> dg.AssetCheckKey:
    return dg.AssetCheckKey(names.source_partitions, name)
