"""Partitions that are read again at the end of a run, without rows whose texts ended workers.

Only the publisher learns that a text ended workers, when other rows of its partition may be
published or staged. So the partition is dropped and read from its beginning, once everything else
is encoded; what was staged of the rows before the text is not encoded again. Each time at least one
more text is found, or all that an encoder behind HTTP refuses in a SuperBatch. A partition that
would be read again more than `MOST_READS` times has another problem, and is refused, unless its
encoder is behind HTTP and refuses texts at no cost.

A text that is not tried again until its source changes is left out from the start, and so is one
that is left out of rows that an earlier run staged.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from surge_dagster.engine.output.ended_workers import EndedWorkers, ended_workers_in
from surge_dagster.engine.output.rejected import MOST_LISTED, rejected_from
from surge_dagster.engine.run.superbatch import PartitionToRead, SpaceTarget
from surge_dagster.engine.sources.partition import RejectedRow

MOST_READS = 16  # for each of them, a text costs about seven workers


class ReadAgain:
    """The partitions to read again; any thread may add one."""

    def __init__(self, target: SpaceTarget) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._found: dict[PartitionToRead, dict[str, RejectedRow]] = {}
        self._reads: Counter[str] = Counter()

    def add(self, partition: PartitionToRead, rows: Sequence[RejectedRow]) -> bool:
        """Take rows whose texts ended workers; return False if the partition must be refused."""
        new = {row.id: row for row in rows if row.id is not None}
        with self._lock:
            found = self._found.get(partition, {})
            is_too_often = self._reads[partition.key] >= MOST_READS
            if self._target.space.is_http:
                is_too_often = not new
            is_too_many = len({*partition.ended_workers.rows, *found, *new}) > MOST_LISTED
            if partition.range is not None or is_too_often or is_too_many:
                return False
            self._found[partition] = found | new
        return True

    def add_more(self, partition: PartitionToRead, rows: Sequence[RejectedRow]) -> None:
        """Take rows of what was under way when a partition was added; of others, nothing."""
        with self._lock:
            is_added = partition in self._found
        if is_added:
            self.add(partition, rows)

    def take(self) -> list[tuple[PartitionToRead, int]]:
        """Return the partitions that were added since, as they are to be read, each with the first
        row that is left out now: those before it keep their places."""
        with self._lock:
            found = self._found
            self._found = {}
            self._reads.update(partition.key for partition in found)
        again: list[tuple[PartitionToRead, int]] = []
        for partition, rows in found.items():
            ended_workers = EndedWorkers({**partition.ended_workers.rows, **rows})
            first_row = min(row.row for row in rows.values())
            again.append((replace(partition, ended_workers=ended_workers), first_row))
        return again

    def without_known(self, partition: PartitionToRead, left_out: EndedWorkers) -> PartitionToRead:
        """Return a partition without the texts that are left out of what is staged of it, and
        without the invalid ones that ended workers before its file was published, if that is still
        of the same source version."""
        if not partition.reuse:
            return partition
        rows = dict(left_out.rows)
        old = partition.old_file
        if old is not None and old.facts.source_version == partition.source.source_version:
            listed = rejected_from(self._target.store, self._target.space, old.facts)
            known = ended_workers_in(listed).rows
            rows |= {id: row for id, row in known.items() if row.kind == "invalid"}
        return replace(partition, ended_workers=EndedWorkers(rows)) if rows else partition
