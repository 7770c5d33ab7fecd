"""What a run has to do: the partitions that it was launched for, and which of them need work.

A fresh file that Dagster does not show as materialized is adopted: a run that was killed published it without its
event, or another program made it. A footer states what a file should hold and does not prove it. So such a file is
first read in full beside its source, and its partition is encoded again when the two differ.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import dagster as dg

from surge_dagster.engine.errors import StoreUnavailable, TransientError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.report import Failure, Receipt
from surge_dagster.engine.sources.partition import Partition, Source
from surge_dagster.orchestration.launch import LaunchConfig, catalog_keys
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.partition_keys import (
    from_partition_key,
    is_canonical,
    to_partition_key,
    with_short_keys,
)
from surge_dagster.orchestration.read_back import read_back, unanswered
from surge_dagster.orchestration.records import Catalogued, failed_on_record

_RECORDS_PER_PAGE = 1_000
# Tags that Dagster leaves out when an operator executes a run again as a whole.
_PARENT_RUN_TAG = "dagster/parent_run_id"
_CONTINUES_TAGS = ("dagster/is_resume_retry", "dagster/retry_number")


@dataclass(frozen=True, slots=True)
class Requested:
    """What a run was launched for.

    Attributes:
        partitions: those that the catalog has, by key.
        removed: keys that the catalog no longer has.
        unknown: partition keys of Dagster's that are not how a key of the catalog is written.
    """

    partitions: dict[str, Partition]
    removed: list[str]
    unknown: list[str]


def requested_partitions(
    catalog: Source, registered: Collection[str], partition_keys: Iterable[str] | None, *, is_typed: bool
) -> Requested:
    """Look up what a run was launched for in the catalog.

    Args:
        catalog: as it is now.
        registered: partition keys that Dagster has.
        partition_keys: what was launched, None for the whole catalog.
        is_typed: an operator named the keys, as in the catalog or as Dagster shows them, and may be mistaken.

    Raises:
        ConfigError: a typed key is not in the catalog, or could mean two of its keys.
    """
    listed = {partition.key: partition for partition in with_short_keys(catalog, registered)}
    if partition_keys is None:
        return Requested(listed, [], [])
    wanted, unknown = dict[str, None](), list[str]()
    if is_typed:
        wanted = dict.fromkeys(catalog_keys(partition_keys, listed, catalog.url))
    else:
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
    """What Dagster's records say before a run.

    Attributes:
        catalogued: of the whole catalog; the run adds what it observes.
        failed: partition keys that Dagster shows as failed.
        done: partition keys that earlier attempts at the same run have embedded, where the launch forces encoding.
    """

    catalogued: Catalogued
    failed: set[str]
    done: set[str]

    @classmethod
    def read(
        cls, names: CatalogNames, context: dg.OpExecutionContext, config: LaunchConfig, catalogued: Catalogued
    ) -> OnRecord:
        """Read what the records say for a run."""
        done = _done_before(names, context) if config.force else set[str]()
        return cls(catalogued, failed_on_record(names, context.instance), done)

    def shows(self, receipt: Receipt, partition: Partition | None) -> bool:
        """Whether Dagster shows a file as materialized from the source version that its partition has.

        Args:
            receipt: of the file.
            partition: None where the catalog no longer has it.
        """
        key = to_partition_key(receipt.key)
        source_version = None if partition is None else partition.source_version
        return key not in self.failed and self.catalogued.knows(key, receipt.desired_version, source_version)


@dataclass(frozen=True, slots=True)
class Worklist:
    """Partitions by what a run has to do with them.

    Attributes:
        fresh: receipts of files that stay as they are.
        adopted: keys of those that are not on record and were read back.
        todo: what is selected and needs work.
        damaged: keys of those whose files look fresh and differ from their source, with the reason.
        unreadable: partitions whose files cannot be read now.
    """

    fresh: list[Receipt] = field(default_factory=list)
    adopted: set[str] = field(default_factory=set)
    todo: list[Partition] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    unreadable: list[Failure] = field(default_factory=list)


def make_worklist(
    candidates: Sequence[Partition],
    outputs: OutputState | None,
    space: Space | None,
    config: LaunchConfig,
    record: OnRecord,
) -> Worklist:
    """Sort the partitions of a run into fresh ones and ones that need work.

    Args:
        candidates: the partitions of the run.
        outputs, space: the files of the run's space; None where the output has no such space yet.
        config: what was selected at the launch.
        record: what Dagster knows.

    Raises:
        StoreUnavailable: the store is down.
    """
    work, select = Worklist(), config.select
    if outputs is None or space is None:
        work.todo.extend(p for p in candidates if select.takes("missing", to_partition_key(p.key) in record.failed))
        return work
    found: list[tuple[Partition, Receipt | None, bool]] = []  # and whether the partition's state is selected
    for partition in outputs.looked_at(candidates):
        partition_key = to_partition_key(partition.key)
        try:
            status = outputs.status(partition)
            selected = select.takes(status, partition_key in record.failed)
            again = config.force and selected and partition_key not in record.done
            receipt = published(outputs, partition.key) if status == "fresh" and not again else None
        except StoreUnavailable:
            raise  # each further partition would wait for the store again
        except TransientError as error:
            work.unreadable.append(unanswered(partition.key, error))
            continue
        found.append((partition, receipt, selected))
    unrecorded = [part for part, receipt, _ in found if receipt is not None and not record.shows(receipt, part)]
    answers = dict(read_back(unrecorded, outputs.store, space))
    for partition, receipt, selected in found:
        answer = answers.get(partition.key)
        if isinstance(answer, TransientError):
            work.unreadable.append(unanswered(partition.key, answer))
            continue
        if isinstance(answer, Failure):
            work.damaged[partition.key] = answer.reason
            receipt, selected = None, select.takes("missing", to_partition_key(partition.key) in record.failed)
        elif partition.key in answers:
            work.adopted.add(partition.key)
        if receipt:
            work.fresh.append(receipt)
        elif selected:
            work.todo.append(partition)
    return work


def published(outputs: OutputState, key: str) -> Receipt | None:
    """The receipt of a partition's valid file of the space; None where there is none.

    Raises:
        TransientError: the file cannot be read now.
    """
    file = outputs.file(key)
    if file is None or file.facts.space != outputs.space:
        return None
    return Receipt.of(file.facts, file.stored, outputs.store.location(file.stored.name), action="fresh")


def _done_before(names: CatalogNames, context: dg.OpExecutionContext) -> set[str]:
    """Partition keys that earlier attempts at this run have embedded.

    Fresh partitions are encoded again only if the launch says `force`. Then the files do not show what is done, and
    Dagster's records do. Attempts are those of the run itself, and the runs that it continues: launched by Dagster
    after a crash, or by an operator "from failure". A run that is executed again as a whole starts from the beginning.
    """
    instance = context.instance
    attempts = [context.run_id] if context.retry_number else []
    run = instance.get_run_by_id(context.run_id)
    while run and (parent := run.tags.get(_PARENT_RUN_TAG)) and any(tag in run.tags for tag in _CONTINUES_TAGS):
        attempts.append(parent)
        run = instance.get_run_by_id(parent)
    return {key for run_id in attempts for key in _embedded(names, instance, run_id)}


def _embedded(names: CatalogNames, instance: dg.DagsterInstance, run_id: str) -> Iterator[str]:
    cursor, more = None, True
    while more:  # in pages: the events of a large run take many times the memory of its keys
        page = instance.get_records_for_run(
            run_id, cursor, dg.DagsterEventType.ASSET_MATERIALIZATION, limit=_RECORDS_PER_PAGE
        )
        cursor, more = page.cursor, page.has_more
        for record in page.records:
            event = record.asset_materialization
            if event and event.asset_key == names.embeddings and event.partition and "reused" not in event.metadata:
                yield event.partition
