"""Change files: which rows differ between two versions of a partition's file; what the change feed is made of.

    .changes/<space>/rows/<Unix seconds>-<version before>-<version after>.parquet

A change file has the ids of the rows that were added, changed or deleted. Texts and vectors are not copied into it:
whoever reads the feed takes them from the partition's file, so that they are always those of the file, and a change
file of four rows has less than 2 KB. It is written before the file that it leads to. A run that dies between the two
leaves a change file that leads to no file, and nobody follows it.

Versions are random (`FileFacts.rows_version`), so the names alone say how a version came to be. Where a change file is
missing or damaged, a reader gives the whole partition instead.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from surge_dagster.engine.errors import Cancelled, SurgeError
from surge_dagster.engine.feed.confirmations import CHANGES, confirmed_versions, consumers, write_table
from surge_dagster.engine.files.facts import WRITER, InvalidFile, guarded_metadata, invalid_when_damaged
from surge_dagster.engine.files.parquet import read_guarded
from surge_dagster.engine.run.superbatch import ADDED, OpenPartition
from surge_dagster.engine.store.store import Store

log = logging.getLogger(__name__)

FORMAT = "changes 1"
DELETED = 3  # beside the operations of `RowChanges`
DEFAULT_KEEP_DAYS = 7.0
# Ids that a reader holds; where more rows changed, no file is written, and consumers take the whole partition.
MOST_IDS = 1_000_000
_NAME = re.compile(r"(?P<time>\d{1,12})-(?P<before>[0-9a-f]{32})-(?P<after>[0-9a-f]{32})\.parquet")
_DAY_SECONDS = 24 * 60 * 60
_OPERATIONS = pa.field("operation", pa.int8(), nullable=False)


@dataclass(frozen=True, slots=True)
class ChangeFacts:
    """The facts in the footer of a change file; `before` and `after` are versions of the partition's rows."""

    partition_key: str
    space: str
    before: str
    after: str
    rows: int
    writer: str = WRITER


@dataclass(frozen=True, slots=True)
class ChangeFile:
    """A change file by its name."""

    name: str
    before: str
    after: str
    written_at: int  # Unix seconds


@dataclass(frozen=True, slots=True)
class ChangeFeed:
    """Writes the change files of one run into a space, and removes those that nobody needs any more."""

    store: Store
    space: str

    def write(self, partition: OpenPartition, after: str, ids: Sequence[pa.Array]) -> None:
        """Write how a partition differs from the file that it is about to replace, where that is known.

        Args:
            after: version of its new rows.
            ids: of the rows that were added or changed, in order (`changed_ids`).

        Raises:
            TransientError, OSError: the store does not take it.
        """
        changes = partition.changes
        if changes is None:
            return
        operations = changes.operations[changes.operations != 0]
        kinds = {column.type for column in (*ids, changes.deleted) if len(column)} or {changes.deleted.type}
        if len(operations) + len(changes.deleted) > MOST_IDS or len(kinds) > 1:
            return
        columns = pa.schema([_OPERATIONS, pa.field("id", kinds.pop(), nullable=False)])
        both = np.concatenate([operations, np.full(len(changes.deleted), DELETED)]).astype(np.int8)
        named = pa.chunked_array(
            [column for column in (*ids, changes.deleted) if len(column)], columns.field("id").type
        )
        before = changes.previous_rows_version
        facts = ChangeFacts(partition.key, self.space, before, after, len(both))
        table = pa.Table.from_arrays([pa.chunked_array([both]), named], schema=columns)
        name = f"{_folder(self.space)}/{int(time.time())}-{before}-{after}.parquet"
        write_table(self.store, name, table, guarded_metadata(facts, FORMAT))

    def remove_passed(self, *, keep_days: float, keep_all: bool) -> None:
        """Remove the change files that are too old, and those that no named consumer needs.

        They do no harm: where they cannot be removed, the log says so and the next run tries again.

        Args:
            keep_all: keep also those that no named consumer needs, for consumers without a name.
        """
        try:
            files = ChangeFiles(self.store, self.space)
            oldest = time.time() - keep_days * _DAY_SECONDS
            wanted = set() if keep_all else files.ahead_of(_versions_of_consumers(self.store, self.space))
            for file in files:
                if file.written_at < oldest or not (keep_all or file.name in wanted):
                    self.store.delete(file.name)
        except (SurgeError, OSError, Cancelled) as error:
            log.warning("old change files of %s could not be removed: %s", self.space, error)


class ChangeFiles:
    """The change files of a space, as one listing shows them."""

    def __init__(self, store: Store, space: str) -> None:
        self._store = store
        self._space = space
        self._by_after: dict[str, ChangeFile] = {}
        folder = _folder(space)
        for stored in store.list(folder):
            match = _NAME.fullmatch(stored.name.removeprefix(f"{folder}/"))
            if match is not None:
                found = ChangeFile(stored.name, match["before"], match["after"], int(match["time"]))
                self._by_after[found.after] = found

    def __iter__(self) -> Iterator[ChangeFile]:
        return iter(self._by_after.values())

    def chain(self, before: str, after: str) -> list[ChangeFile] | None:
        """The files that lead from one version of a partition's rows to a later one, in order; None where one lacks."""
        found: list[ChangeFile] = []
        while after != before:
            last = self._by_after.get(after)
            if last is None or len(found) > len(self._by_after):
                return None
            found.append(last)
            after = last.before
        return found[::-1]

    def ahead_of(self, versions: Iterable[str]) -> set[str]:
        """Names of the files that lead from these versions to later ones."""
        leading: dict[str, list[ChangeFile]] = {}
        for file in self._by_after.values():
            leading.setdefault(file.before, []).append(file)
        names: set[str] = set()
        reached = list(versions)
        while reached:
            for file in leading.pop(reached.pop(), ()):
                names.add(file.name)
                reached.append(file.after)
        return names

    def read(self, file: ChangeFile, key: str) -> pa.Table:
        """The rows of a change file: operation (int8: added 1, changed 2, deleted 3) and id.

        Raises:
            InvalidFile: it is damaged, or is not what its name says.
            OSError: it is not there any more, or cannot be read now.
        """
        with self._store.open(file.name) as source, invalid_when_damaged("content"):
            reader = pq.ParquetFile(source, page_checksum_verification=True)
            facts = read_guarded(reader.metadata, ChangeFacts, FORMAT)
            expected = ChangeFacts(key, self._space, file.before, file.after, facts.rows, facts.writer)
            if facts != expected or facts.rows > MOST_IDS:
                raise InvalidFile(f"it states {facts}; expected {expected}")
            table = reader.read(use_threads=False).replace_schema_metadata(None)
        operations = table.column("operation").to_numpy()
        if table.num_rows != facts.rows or not np.isin(operations, (ADDED, ADDED + 1, DELETED)).all():
            raise InvalidFile(f"it has {table.num_rows:,} rows of {facts.rows:,}, or operations that there are not")
        return table


def wanted_feed(store: Store, space: str, *, always: bool) -> ChangeFeed | None:
    """What writes the change files of a run; None where none are wanted.

    Args:
        always: they are wanted even if no consumer is registered.

    Raises:
        TransientError: the store does not answer.
    """
    store.sweep(f"{CHANGES}/{space}")
    return ChangeFeed(store, space) if always or consumers(store, space) else None


def changed_ids(operations: np.ndarray, ids: Iterable[pa.Array]) -> list[pa.Array]:
    """The ids of the rows that were added or changed.

    Args:
        operations: of all rows, int8 [rows].
        ids: of all rows, in pieces.
    """
    found, row = [], 0
    for piece in ids:
        is_changed = operations[row : row + len(piece)] != 0
        row += len(piece)
        if is_changed.any():
            found.append(piece.filter(pa.array(is_changed)))
    return found


def _versions_of_consumers(store: Store, space: str) -> set[str]:
    return {
        version
        for consumer in consumers(store, space)
        for version in (confirmed_versions(store, space, consumer) or {}).values()
    }


def _folder(space: str) -> str:
    return f"{CHANGES}/{space}/rows"
