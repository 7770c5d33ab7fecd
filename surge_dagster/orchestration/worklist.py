"""What a run has to do: the partitions that it was launched for, and which of them need work.

A fresh file that Dagster does not show as materialized is adopted: a run that was killed published
it without its event, or another program made it. A footer does not prove what a file has. So such a
file is first read in full and compared with its source, and its partition is encoded again if the
two differ.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import dagster as dg

from surge_dagster.engine.errors import StoreUnavailable, TransientError
from surge_dagster.engine.files.formats import PublishedFile
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.freshness import Freshness, OutputState
from surge_dagster.engine.run.report import Failure, Receipt
from surge_dagster.engine.sources.partition import Partition, Source
from surge_dagster.engine.store.concurrent_reads import reads_ahead
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.verify.verification import Violation, verify_partition
from surge_dagster.orchestration.footer_checks import FooterChecks, unreadable
from surge_dagster.orchestration.launch import LaunchConfig, require_known
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.partition_keys import (
    from_partition_key,
    is_canonical,
    to_partition_key,
    with_short_keys,
)
from surge_dagster.orchestration.records import Catalogued

_RECORDS_PER_PAGE = 1_000
# Tags that Dagster leaves out when an operator executes a run again as a whole.
_PARENT_RUN_TAG = "dagster/parent_run_id"
_CONTINUES_TAGS = ("dagster/is_resume_retry", "dagster/retry_number")


@dataclass(frozen=True, slots=True)
class Requested:
    """What a run was launched for.

    Attributes:
        partitions: that the catalog has, by key.
        removed: keys that the catalog no longer has; their files and events stay.
        unknown: partition keys of Dagster that are not how a key of the catalog is written.
    """

    partitions: dict[str, Partition]
    removed: list[str]
    unknown: list[str]


def requested_partitions(
    catalog: Source,
    registered: Collection[str],
    partition_keys: Sequence[str] | None,
    *,
    is_typed: bool,
) -> Requested:
    """Look up in the catalog what a run was launched for.

    Args:
        is_typed: whether an operator typed the keys, who may be mistaken.
    """
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
    """What Dagster has on record before a run.

    Attributes:
        failed: catalog keys that Dagster shows as failed.
        done: catalog keys that a forced run does not encode again; see `done_before`.
    """

    catalogued: Catalogued
    failed: set[str]
    done: set[str]

    def shows(self, file: PublishedFile, source_version: str) -> bool:
        key = file.facts.partition_key
        if key in self.failed:
            return False
        partition_key = to_partition_key(key)
        return self.catalogued.knows(partition_key, file.facts.desired_version, source_version)


def done_before(names: CatalogNames, context: dg.OpExecutionContext) -> set[str]:
    """Return the catalog keys that a forced run need not encode again.

    A run continues others if Dagster launched it after a failure, or an operator "from failure".
    One that is executed again as a whole starts from the beginning.
    """
    instance = context.instance
    done: set[str] = set()
    run = instance.get_run_by_id(context.run_id)
    while run is not None:
        parent = run.tags.get(_PARENT_RUN_TAG)
        if parent is None or not any(tag in run.tags for tag in _CONTINUES_TAGS):
            break
        done.update(_embedded(names, instance, parent))
        run = instance.get_run_by_id(parent)
    return done


def _embedded(names: CatalogNames, instance: dg.DagsterInstance, run_id: str) -> Iterator[str]:
    """Yield catalog keys that a run has embedded, without files that it only reported again."""
    kind = dg.DagsterEventType.ASSET_MATERIALIZATION
    cursor = None
    has_more = True
    while has_more:  # in pages: the events of a large run take many times the memory of its keys
        page = instance.get_records_for_run(run_id, cursor, kind, limit=_RECORDS_PER_PAGE)
        cursor = page.cursor
        has_more = page.has_more
        for record in page.records:
            event = record.asset_materialization
            if event is None or event.asset_key != names.embeddings or event.partition is None:
                continue
            if "reused" not in event.metadata:
                yield from_partition_key(event.partition)


@dataclass(frozen=True, slots=True)
class Worklist:
    """The partitions of a run, sorted once.

    Attributes:
        outputs: files of the run's space; those that differ from their source count as missing.
        todo: partitions that are selected and need work.
        known: their freshness, by catalog key.
        fresh: of files that stay as they are and are on record.
        adopted: of files that were read in full and are not on record.
        differing: how files differ from their facts, space or source.
        failures: partitions whose files cannot be read now.
    """

    outputs: OutputState
    todo: list[Partition] = field(default_factory=list)
    known: dict[str, Freshness] = field(default_factory=dict)
    fresh: list[Receipt] = field(default_factory=list)
    adopted: list[Receipt] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def add(self, partition: Partition, freshness: Freshness) -> None:
        self.todo.append(partition)
        self.known[partition.key] = freshness

    def receipt(self, file: PublishedFile) -> Receipt:
        location = self.outputs.store.location(file.stored.name)
        return Receipt.of(file.facts, file.stored, location, action="fresh")


def make_worklist(
    candidates: Sequence[Partition],
    outputs: OutputState,
    space: Space,
    config: LaunchConfig,
    record: OnRecord,
    checks: FooterChecks,
) -> Worklist:
    """Sort the partitions of a run into fresh ones and ones that need work; judge their footers."""
    work = Worklist(outputs)
    unrecorded: dict[str, PublishedFile] = {}
    for partition in outputs.looked_at(candidates):
        freshness = _judged(partition, work, space, checks)
        file = freshness.file
        is_fresh = file is not None and freshness.status == "fresh"
        is_selected = config.select.takes(freshness.status, partition.key in record.failed)
        is_forced = config.force and partition.key not in record.done

        if freshness.error is not None:
            work.failures.append(unreadable(partition.key, freshness.error))
        elif is_selected and (not is_fresh or is_forced):
            work.add(partition, freshness)
        elif file is None or not is_fresh:
            continue  # it needs work that this launch did not select
        elif record.shows(file, partition.source_version):
            work.fresh.append(work.receipt(file))
        else:
            unrecorded[partition.key] = file

    partitions = [partition for partition in candidates if partition.key in unrecorded]
    for partition, found in zip(
        partitions, read_back(partitions, outputs.store, space), strict=True
    ):
        file = unrecorded[partition.key]
        if found is None:
            work.adopted.append(work.receipt(file))
        elif isinstance(found, Failure):
            work.failures.append(found)
        else:
            work.differing.append(found)
            outputs.refuse(file, found)
            if config.select.takes("missing", partition.key in record.failed):
                work.add(partition, Freshness("missing"))
    return work


def _judged(partition: Partition, work: Worklist, space: Space, checks: FooterChecks) -> Freshness:
    """Return the freshness of a partition; a file whose footer is wrong counts as missing."""
    freshness = work.outputs.freshness(partition)
    violation = checks.record(partition, freshness, space)
    if violation is not None:
        work.differing.append(f"partition {partition.key!r}: {violation}")
        if freshness.file is not None:
            work.outputs.refuse(freshness.file, violation)
        return Freshness("missing")
    if freshness.invalid is not None:
        work.differing.append(f"partition {partition.key!r}: {freshness.invalid}.")
    return freshness


def read_back(
    partitions: Sequence[Partition], store: Store, space: Space
) -> Iterator[str | Failure | None]:
    """Read files in full; yield how each differs from its source, or why it cannot be read."""
    by_key = {partition.key: partition for partition in partitions}

    def read(store: Store, key: str) -> str | Failure | None:
        try:
            return difference(by_key[key], store, space)
        except StoreUnavailable:
            raise  # each further file would wait for the store again
        except TransientError as error:
            return unreadable(key, error)

    return reads_ahead(store, list(by_key), read)


def difference(partition: Partition, store: Store, space: Space) -> str | None:
    """Return how a partition's file differs from its source, row by row."""
    verified = verify_partition(partition, store, space)
    if not isinstance(verified, Violation):
        return None
    # A source that has changed since it was listed proves nothing: the next run will read it.
    if partition.current_source_version() != partition.source_version:
        return None
    if verified.kind == "unread":
        raise TransientError(verified.finding, partition.key)
    return f"partition {partition.key!r}: {verified.finding}"
