"""What a run has to do: the partitions that it was launched for, and which of them need work.

A fresh file that Dagster does not show as materialized is adopted: a run that was killed published
it without its event, or another program made it. A footer states what a file should hold and does
not prove it. So such a file is first read in full beside its source, and its partition is encoded
again when the two differ.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import dagster as dg

from surge_dagster.engine.files.formats import PublishedFile
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.freshness import Freshness, OutputState
from surge_dagster.engine.run.report import Failure, Receipt
from surge_dagster.engine.sources.partition import Partition, Source
from surge_dagster.orchestration.footer_checks import FooterChecks
from surge_dagster.orchestration.launch import LaunchConfig, require_known
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.partition_keys import (
    from_partition_key,
    is_canonical,
    to_partition_key,
    with_short_keys,
)
from surge_dagster.orchestration.read_back import read_back, unreadable
from surge_dagster.orchestration.records import Catalogued

_RECORDS_PER_PAGE = 1_000
# Tags that Dagster leaves out when an operator executes a run again as a whole.
_PARENT_RUN_TAG = "dagster/parent_run_id"
_CONTINUES_TAGS = ("dagster/is_resume_retry", "dagster/retry_number")


@dataclass(frozen=True, slots=True)
class Requested:
    partitions: dict[str, Partition]  # those that the catalog has, by key
    # keys that the catalog no longer has; the run leaves their files and events as they are
    removed: list[str]
    # partition keys of Dagster's that are not how a key of the catalog is written
    unknown: list[str]


def requested_partitions(
    catalog: Source,
    registered: Collection[str],
    partition_keys: Sequence[str] | None,
    *,
    is_typed: bool,
) -> Requested:
    """Look up what a run was launched for in the catalog; an operator who typed the keys may be
    mistaken."""
    listed = {partition.key: partition for partition in with_short_keys(catalog, registered)}
    if partition_keys is None:
        return Requested(listed, [], [])
    if is_typed:
        require_known(partition_keys, {to_partition_key(key) for key in listed}, catalog.url)

    wanted = dict[str, None]()
    unknown = list[str]()
    for partition_key in partition_keys:
        key = from_partition_key(partition_key)
        if key in listed or is_canonical(partition_key):
            wanted[key] = None
        else:  # an operator can add any text to Dagster's partitions
            unknown.append(partition_key)
    partitions = {key: partition for key, partition in listed.items() if key in wanted}
    return Requested(partitions, [key for key in wanted if key not in partitions], unknown)


@dataclass(frozen=True, slots=True)
class OnRecord:
    catalogued: Catalogued
    failed: set[str]  # partition keys that Dagster shows as failed
    done: set[str]  # partition keys that a forced run does not encode again, see `done_before`

    def shows(self, file: PublishedFile, source_version: str) -> bool:
        key = to_partition_key(file.facts.partition_key)
        return key not in self.failed and self.catalogued.knows(
            key, file.facts.desired_version, source_version
        )


def done_before(names: CatalogNames, context: dg.OpExecutionContext) -> set[str]:
    """Return the partition keys that the runs before this one have embedded, if a launch says
    `force`.

    A run continues others if Dagster launched it after a failure, or an operator "from failure".
    One that is executed again as a whole starts from the beginning.
    """
    instance = context.instance
    earlier_runs = list[str]()
    run = instance.get_run_by_id(context.run_id)
    while (
        run
        and (parent := run.tags.get(_PARENT_RUN_TAG))
        and any(tag in run.tags for tag in _CONTINUES_TAGS)
    ):
        earlier_runs.append(parent)
        run = instance.get_run_by_id(parent)
    return {key for run_id in earlier_runs for key in _embedded(names, instance, run_id)}


def _embedded(names: CatalogNames, instance: dg.DagsterInstance, run_id: str) -> Iterator[str]:
    """Partition keys that a run has embedded, without fresh files that it only reported again."""
    cursor, has_more = None, True
    while has_more:  # in pages: the events of a large run take many times the memory of its keys
        page = instance.get_records_for_run(
            run_id, cursor, dg.DagsterEventType.ASSET_MATERIALIZATION, limit=_RECORDS_PER_PAGE
        )
        cursor, has_more = page.cursor, page.has_more
        for record in page.records:
            event = record.asset_materialization
            if (
                event
                and event.asset_key == names.embeddings
                and event.partition
                and "reused" not in event.metadata
            ):
                yield event.partition


@dataclass(frozen=True, slots=True)
class Worklist:
    # of the run's space; files that differ from their source count as missing there
    outputs: OutputState
    # partitions that are selected and need work
    todo: list[Partition] = field(default_factory=list)
    # of files that stay as they are and are on record
    fresh: list[Receipt] = field(default_factory=list)
    # of files that were read back and are not on record
    adopted: list[Receipt] = field(default_factory=list)
    # how files differ from their facts, space or source
    differing: list[str] = field(default_factory=list)
    refused: list[PublishedFile] = field(default_factory=list)  # those of them that look fresh
    # partitions whose files cannot be read now
    failures: list[Failure] = field(default_factory=list)


def make_worklist(
    candidates: Sequence[Partition],
    outputs: OutputState,
    space: Space,
    config: LaunchConfig,
    record: OnRecord,
    checks: FooterChecks,
) -> Worklist:
    """Sort the partitions of a run into fresh ones and ones that need work; judge their footers."""
    work, unrecorded = Worklist(outputs), dict[str, tuple[Partition, PublishedFile]]()
    for partition in outputs.looked_at(candidates):
        partition_key = to_partition_key(partition.key)
        freshness = outputs.freshness(partition)
        violation = checks.record(partition, freshness, space)
        if violation is not None:
            work.differing.append(f"partition {partition.key!r}: {violation}")
            if freshness.file is not None:
                work.refused.append(freshness.file)
                outputs.refuse(freshness.file, violation)
            freshness = Freshness("missing")
        elif freshness.invalid is not None:
            work.differing.append(f"partition {partition.key!r}: {freshness.invalid}.")
        status, file = freshness.status, freshness.file
        if freshness.error is not None:
            work.failures.append(unreadable(partition.key, freshness.error))
            continue
        is_selected = config.select.takes(status, partition_key in record.failed)
        is_forced = config.force and partition_key not in record.done
        if is_selected and (status != "fresh" or is_forced):
            work.todo.append(partition)
        elif file is None or status != "fresh":
            continue  # it needs work that this launch did not select
        elif record.shows(file, partition.source_version):
            work.fresh.append(_receipt(outputs, file))
        else:
            unrecorded[partition.key] = partition, file
    differences = read_back(
        [partition for partition, _ in unrecorded.values()], outputs.store, space
    )
    for key, (partition, file) in unrecorded.items():
        match differences[key]:
            case None:
                work.adopted.append(_receipt(outputs, file))
            case Failure() as failure:
                work.failures.append(failure)
            case difference:
                work.differing.append(difference)
                work.refused.append(file)
                outputs.refuse(file, difference)
                if config.select.takes("missing", to_partition_key(key) in record.failed):
                    work.todo.append(partition)
    return work


def _receipt(outputs: OutputState, file: PublishedFile) -> Receipt:
    return Receipt.of(
        file.facts, file.stored, outputs.store.location(file.stored.name), action="fresh"
    )
