"""Checks that read everything: each partition beside its file, and each file of the space beside the catalog.

They stand on `source_partitions`, which nothing executes. A check on `embeddings` would be executed by every backfill
of it, and a look at the whole catalog belongs to the job `catalog_check` alone. Everything streams, so the size of the
catalog costs time and no memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import dagster as dg

from surge_dagster.assets.checks import failure_table
from surge_dagster.assets.names import CatalogNames
from surge_dagster.assets.outputs import known_space
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.verify import Kind, Violation, verify

_LISTED = 200


@dataclass(frozen=True, slots=True)
class _Group:
    """Kinds of violations that one check stands for."""

    name: str
    kinds: frozenset[Kind]
    description: str
    severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR


_GROUPS = (
    _Group(
        "every_partition_is_embedded",
        frozenset(("missing", "stale", "source", "refused")),
        "Every partition of the catalog has a file, made from its present source version.",
    ),
    _Group(
        "rows_and_ids_match",
        frozenset(("rows", "ids", "texts")),
        "Each file has its source's rows: as many, the same ids once each, in the same order, with the same texts.",
    ),
    _Group(
        "vectors_are_valid",
        frozenset(("damaged", "vectors")),
        "Each file is whole, and its vectors have the space's dimension, finite values, and length 1 where normalized.",
    ),
    _Group("one_space", frozenset(("space",)), "No file of the space holds vectors of another one."),
    _Group(
        "nothing_is_left_over",
        frozenset(("orphan",)),
        "No file, and nothing staged, belongs to a partition that the catalog no longer has.",
        dg.AssetCheckSeverity.WARN,
    ),
)


def catalog_checks(names: CatalogNames) -> dg.AssetChecksDefinition:
    """The checks of one catalog, all evaluated by one op that reads everything once."""

    @dg.multi_asset_check(
        name=names.compare_op,
        specs=[
            dg.AssetCheckSpec(group.name, asset=names.source_partitions, description=group.description)
            for group in _GROUPS
        ],
        can_subset=True,  # else the UI cannot execute them
        required_resource_keys=names.resource_keys,
    )
    def compare(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
        """Read the whole catalog and the whole output, and say what does not hold."""
        yield from _compare(names, context)

    return compare


def _compare(names: CatalogNames, context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
    resources = names.resources(context.resources)
    try:
        source, store = resources.catalog.open(), resources.output.open()
        space = known_space(names, store, resources.encoder.spec(), unattended=False)
        if space is None:
            model = resources.encoder.model
            raise ConfigError(f"the output {store.url!r} holds nothing of {model!r} with these settings yet")
    except ConfigError as error:
        raise dg.Failure(str(error), allow_retries=False) from error
    listed: dict[str, list[tuple[str, str]]] = {group.name: [] for group in _GROUPS}
    counts = dict.fromkeys(listed, 0)
    group_of = {kind: group.name for group in _GROUPS for kind in group.kinds}
    partitions = rows = 0
    for found in verify(source, store, space):
        if isinstance(found, Violation):
            name = group_of[found.kind]
            counts[name] += 1
            if len(listed[name]) < _LISTED:
                listed[name].append((found.key, found.reason))
        else:
            partitions += 1
            rows += found.rows
    context.log.info(f"{partitions:,} partitions with {rows:,} rows were read; {sum(counts.values()):,} violations")
    for group in _GROUPS:
        if dg.AssetCheckKey(names.source_partitions, group.name) not in context.selected_asset_check_keys:
            continue
        yield dg.AssetCheckResult(
            asset_key=names.source_partitions,
            check_name=group.name,
            passed=not counts[group.name],
            severity=group.severity,
            metadata={
                "space": space.name,
                "partitions": partitions,
                "rows": rows,
                "violations": counts[group.name],
                "failed": dg.MetadataValue.md(failure_table(listed[group.name])),
            },
        )
