"""What a run has to do: the partitions that it was launched for, and which of them need work.

A fresh file that Dagster does not show as materialized is adopted: a run that was killed published
it without its event, or another program made it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

import dagster as dg

from surge_dagster.engine.files.formats import PublishedFile
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.freshness import Freshness, OutputState, Status
from surge_dagster.engine.run.report import Failure, Receipt
from surge_dagster.engine.sources.partition import Partition, Source
from surge_dagster.orchestration.file_checks import FileChecks
from surge_dagster.orchestration.launch import LaunchConfig, Select, require_known
from surge_dagster.orchestration.partition_keys import (
    from_partition_key,
    to_partition_key,
    with_short_keys,
)
from surge_dagster.orchestration.records import Catalogued

log = logging.getLogger(__name__)

# When the first attempt of a forced run began. Dagster copies it to the runs that continue it. Its
# UI leaves out tags with this prefix.
_FORCED_SINCE_TAG = ".dagster/surge/forced_since"
# Tags that Dagster leaves out when an operator executes a run again as a whole.
_CONTINUES_TAGS = ("dagster/is_resume_retry", "dagster/retry_number")


def requested_partitions(
    catalog: Source, partition_keys: Sequence[str] | None, *, is_typed: bool
) -> tuple[dict[str, Partition], list[str]]:
    """Return the partitions that a run was launched for, by key, and keys that the catalog does not
    have, whose files and events stay.

    Args:
        is_typed: whether an operator typed the keys, who may be mistaken.
    """
    listed = {partition.key: partition for partition in with_short_keys(catalog)}
    if partition_keys is None:
        return listed, []
    if is_typed:
        require_known(partition_keys, {to_partition_key(key) for key in listed}, catalog.url)

    wanted = dict.fromkeys(map(from_partition_key, partition_keys))
    partitions = {key: partition for key, partition in listed.items() if key in wanted}
    return partitions, [key for key in wanted if key not in listed]


@dataclass(frozen=True, slots=True)
class OnRecord:
    """What Dagster has on record before a run.

    Attributes:
        failed: partition keys that Dagster shows as failed.
        forced_since: a forced run does not encode again what was encoded since then, in UTC.
    """

    catalogued: Catalogued
    failed: set[str]
    forced_since: str | None

    def shows(self, file: PublishedFile, source_version: str) -> bool:
        key = to_partition_key(file.facts.partition_key)
        if key in self.failed:
            return False
        return self.catalogued.knows(key, file.facts.desired_version, source_version)

    def has_forced(self, file: PublishedFile | None) -> bool:
        """Return whether an earlier attempt of a forced run has encoded a file."""
        if file is None or self.forced_since is None:
            return False
        return file.facts.oldest_encoded_at >= self.forced_since


def forced_since(context: dg.OpExecutionContext) -> str | None:
    """Return when the first attempt of a forced run began; None if this run is the first one.

    A run continues another one if Dagster launched it after a failure, or an operator "from
    failure". One that is executed again as a whole starts from the beginning. An attempt that ended
    before its worklist has encoded nothing and does not count.
    """
    tags: Mapping[str, str] = context.run_tags
    is_continuation = any(tag in tags for tag in _CONTINUES_TAGS)
    if is_continuation and _FORCED_SINCE_TAG in tags:
        return tags[_FORCED_SINCE_TAG]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    context.instance.add_run_tags(context.run_id, {_FORCED_SINCE_TAG: now})
    return None


@dataclass(frozen=True, slots=True)
class Worklist:
    """The partitions of a run, sorted once.

    Attributes:
        outputs: files of the run's space; those that differ from their source count as missing.
        todo: partitions that are selected and need work.
        freshness: of each of them, by catalog key.
        fresh: of files that stay as they are and are on record.
        adopted: of files that stay as they are and are not on record.
        failures: partitions whose files cannot be read now.
    """

    outputs: OutputState
    todo: list[Partition] = field(default_factory=list)
    freshness: dict[str, Freshness] = field(default_factory=dict)
    fresh: list[Receipt] = field(default_factory=list)
    adopted: list[Receipt] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def receipt(self, file: PublishedFile) -> Receipt:
        location = self.outputs.store.location(file.stored.name)
        return Receipt.of(file.facts, file.stored, location, action="fresh")


def make_worklist(
    candidates: Sequence[Partition],
    outputs: OutputState,
    space: Space,
    config: LaunchConfig,
    record: OnRecord,
    checks: FileChecks,
) -> Worklist:
    """Sort the partitions of a run into fresh ones and ones that need work; judge their files."""
    work = Worklist(outputs)
    for partition in outputs.looked_at(candidates):
        freshness = _examine(partition, work, space, checks)
        fresh_file = freshness.file if freshness.status == "fresh" else None
        has_failed = to_partition_key(partition.key) in record.failed
        is_selected = _is_selected(config.select, freshness.status, has_failed)
        must_be_forced = config.force and not record.has_forced(fresh_file)

        if freshness.error is not None:
            reason = str(freshness.error)
            work.failures.append(Failure(partition.key, reason, transient=True))
        elif is_selected and (fresh_file is None or must_be_forced):
            work.todo.append(partition)
            work.freshness[partition.key] = freshness
        elif fresh_file is not None:
            is_on_record = record.shows(fresh_file, partition.source_version)
            receipts = work.fresh if is_on_record else work.adopted
            receipts.append(work.receipt(fresh_file))
    return work


def _is_selected(select: Select, status: Status, has_failed: bool) -> bool:
    if select is Select.failed:
        return has_failed
    return select is Select.all or status == select.value


def _examine(partition: Partition, work: Worklist, space: Space, checks: FileChecks) -> Freshness:
    """Judge the file of a partition and return its freshness; a wrong file counts as missing."""
    freshness = work.outputs.freshness(partition)
    if freshness.invalid is not None:
        checks.record_invalid(partition.key, freshness.invalid)
        log.warning("partition %r: %s.", partition.key, freshness.invalid)
    if freshness.file is None or freshness.status != "fresh":
        return freshness

    checks.record(partition, work.receipt(freshness.file), space)
    fault = checks.fault(partition.key)
    if not fault:
        return freshness
    log.warning("partition %r: %s", partition.key, fault)
    work.outputs.refuse(freshness.file, fault)
    return Freshness("missing")
