"""Change files: which rows differ between two versions of a partition's file.

    .changes/<space>/rows/<Unix seconds>-<version before>-<version after>-<ids>.parquet

A change file has the ids of the rows that were added, changed or deleted. The rows themselves are
in the partition's own file. A change file is written before the file that it leads to; a run that
dies between the two leaves one that nobody follows.

Versions are random (`FileFacts.rows_version`), so that names are enough to follow a partition's
history. If a change file is missing or damaged, a reader gives the whole partition.

    .changes/<space>/consumers/<encoded name>.json

has the versions that a named consumer has applied. A consumer is registered by its first
confirmation. To forget one, remove its file. A damaged file counts as empty, so that the consumer
gets everything again.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from surge_dagster.engine.errors import Cancelled, SurgeError
from surge_dagster.engine.files.facts import FileFacts, InvalidFile, explained
from surge_dagster.engine.files.parquet import OutputFile
from surge_dagster.engine.files.rows import carried_columns
from surge_dagster.engine.output.spaces import list_spaces, read_document, write_document
from surge_dagster.engine.run.old_values import LOOKUP_BYTES, NO_ROW, OldValues
from surge_dagster.engine.sources.partition import RowBatch
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.keys import encode_key
from surge_dagster.engine.support.values import same_values

log = logging.getLogger(__name__)

CHANGES = ".changes"
DEFAULT_KEEP_DAYS = 7.0
# Ids that a reader keeps in memory. If more rows changed, no file is written, and consumers get the
# whole partition.
MOST_IDS = 1_000_000
_NAME = re.compile(r"(\d{1,12})-([0-9a-f]{32})-([0-9a-f]{32})-(\d{1,7})\.parquet")
_DAY_SECONDS = 24 * 60 * 60
_COPIES = 2  # of the ids: as they are read, and in one piece


def has_consumers(store: Store, space: str) -> bool:
    """Return whether a consumer of a space is registered."""
    return any(True for _ in store.list(_consumers_folder(space)))


def confirmed_versions(store: Store, space: str, consumer: str) -> dict[str, str] | None:
    """Return the version of each partition's rows that a consumer has applied; None if it is not
    registered."""
    name = _file(space, consumer)
    try:
        return dict(read_document(store, name)["versions"])
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as error:
        place = store.location(name)
        log.warning("%s counts as empty, so that the consumer gets everything: %s", place, error)
        return None


def confirm_versions(store: Store, space: str, consumer: str, versions: Mapping[str, str]) -> None:
    """Replace the confirmations of a consumer; they are durable when this returns."""
    name = _file(space, consumer)
    write_document(store, name, {"consumer": consumer, "versions": versions}, lambda: None)


def forget_elsewhere(store: Store, space: str, consumer: str) -> None:
    """Remove what a consumer has confirmed of other spaces, before its copy is of this one.

    Otherwise it would get only the latest changes when it comes back to such a space, and its copy
    would have vectors of two spaces.
    """
    for other in list_spaces(store):
        if other.name != space:
            store.delete(_file(other.name, consumer))


def _file(space: str, consumer: str) -> str:
    return f"{_consumers_folder(space)}/{encode_key(consumer)}.json"


def _consumers_folder(space: str) -> str:
    return f"{CHANGES}/{space}/consumers"


@dataclass(frozen=True, slots=True)
class ChangeFile:
    name: str
    before: str
    after: str
    ids: int
    written_at: int  # Unix seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeFeed:
    """Whether a run writes change files, and when it removes old ones.

    Attributes:
        always: write them even if no consumer is registered in the output.
        keep_days: how long they are kept.
    """

    always: bool = False
    keep_days: float = DEFAULT_KEEP_DAYS

    def begin(self, store: Store, space: str) -> bool:
        """Prepare the folder of change files; return whether somebody wants them."""
        store.sweep(f"{CHANGES}/{space}")
        return self.always or has_consumers(store, space)

    def end(self, store: Store, space: str) -> None:
        """Remove the change files that are too old.

        They do no harm: if they cannot be removed, the next run tries again.
        """
        oldest = time.time() - self.keep_days * _DAY_SECONDS
        try:
            for file in ChangeFiles(store, space):
                if file.written_at < oldest:
                    store.delete(file.name)
        except (SurgeError, OSError, Cancelled) as error:
            log.warning("old change files of %s could not be removed: %s", space, error)


class ChangeFiles:
    """The change files of a space, as one listing shows them."""

    def __init__(self, store: Store, space: str) -> None:
        self._store = store
        self._by_after: dict[str, ChangeFile] = {}
        folder = _rows_folder(space)
        for stored in store.list(folder):
            match = _NAME.fullmatch(stored.name.removeprefix(f"{folder}/"))
            if match is not None:
                written_at, before, after, ids = match.groups()
                self._by_after[after] = ChangeFile(
                    stored.name, before, after, int(ids), int(written_at)
                )

    def __iter__(self) -> Iterator[ChangeFile]:
        return iter(self._by_after.values())

    def chain(self, before: str, after: str) -> list[ChangeFile] | None:
        """Return the files that lead from one version of a partition's rows to a later one.

        They are in order; None if one is missing.
        """
        chain: list[ChangeFile] = []
        while after != before:
            last = self._by_after.get(after)
            if last is None or len(chain) > len(self._by_after):
                return None
            chain.append(last)
            after = last.before
        return chain[::-1]

    def read(self, file: ChangeFile) -> pa.ChunkedArray:
        """Return the ids of a change file."""
        with self._store.open(file.name) as source, explained(self._store.location(file.name)):
            reader = pq.ParquetFile(source, page_checksum_verification=True)
            ids = reader.read(use_threads=False).column(0)
        # Pages have checksums, and the footer that counts the rows has none.
        if len(ids) != file.ids:
            raise InvalidFile(f"it has {len(ids):,} ids; expected {file.ids:,}")
        return ids


def write_changes(store: Store, facts: FileFacts, changes: RowChanges) -> None:
    """Write how a partition differs from the file that one with these facts is about to replace."""
    ids = pa.chunked_array([*changes.changed, changes.deleted])
    versions = f"{changes.previous_rows_version}-{facts.rows_version}"
    name = f"{int(time.time())}-{versions}-{len(ids)}.parquet"
    with store.create(f"{_rows_folder(facts.space)}/{name}") as upload:
        pq.write_table(
            pa.table({"id": ids}),
            upload.sink,
            compression="zstd",
            write_statistics=False,
            store_schema=False,
            write_page_checksum=True,
        )
        upload.publish(lambda: None)


def _rows_folder(space: str) -> str:
    return f"{CHANGES}/{space}/rows"


@dataclass(frozen=True, slots=True)
class RowChanges:
    """How a partition's rows differ from those of the file that it replaces, compared by id.

    Attributes:
        changed: ids of rows that were added or changed, in pieces: all except those that the old
            file has with the same text, carried columns and vector, bit for bit. All rows of a file
            with other columns are changed.
        deleted: ids of the old file that the partition no longer has.
        previous_rows_version: of the old file.
    """

    changed: Sequence[pa.Array]
    deleted: pa.Array
    previous_rows_version: str


class RowComparison:
    """Finds the rows of an old file by their ids.

    Args:
        reserve: reserves bytes of memory; False if they do not fit.
        include_text: whether the new file has a text column.

    Attributes:
        is_possible: whether the ids could be read, and are of the partition's type.
    """

    def __init__(
        self, reader: OutputFile, reserve: Callable[[int], bool], *, include_text: bool
    ) -> None:
        self.is_possible = True
        self._reserve = reserve
        self._previous_version = reader.facts.rows_version
        self._has_same_text = include_text == ("text" in reader.columns.names)
        self._changed: list[pa.Array] = []
        carried = carried_columns(reader.columns)
        self._carried_names = [] if carried is None else carried.names
        parts: list[pa.RecordBatch] = []
        for batch in reader.read(columns=["id", *self._carried_names]):
            parts.append(batch)
            if not reserve(_COPIES * batch.nbytes + (LOOKUP_BYTES + 1) * len(batch)):
                self.is_possible = False
                return
        ids = pa.array([], reader.columns.field("id").type)
        self._carried: pa.Table | None = None
        if parts:
            ids = pa.concat_arrays([part.column("id") for part in parts])
            if self._carried_names:
                self._carried = pa.Table.from_batches(parts).drop_columns(["id"])
        self._ids = OldValues(ids)
        self._seen = np.zeros(reader.facts.rows, np.bool_)

    def old_rows(self, ids: pa.Array) -> np.ndarray | None:
        """Return the row of each of the next ids in the old file, -1 if it has none.

        None if the comparison is not possible.
        """
        if not self.is_possible or ids.type != self._ids.values.type:
            self.is_possible = False
            return None
        old = self._ids.rows(ids)
        self._seen[old[old != NO_ROW]] = True
        return old

    def add(self, batch: RowBatch, old_rows: np.ndarray, is_same: np.ndarray) -> None:
        """Add the next rows; `is_same` marks those with the text and vector of the old row."""
        is_same = is_same & self._has_same_carried(old_rows, batch.carried)
        changed = batch.ids.filter(pa.array(~is_same | (old_rows == NO_ROW)))
        self._changed.append(changed)
        if not self._reserve(changed.nbytes):
            self.is_possible = False

    def _has_same_carried(self, old_rows: np.ndarray, carried: pa.RecordBatch | None) -> np.ndarray:
        """Return which rows have the carried columns of the old row, or no old row."""
        names = [] if carried is None else carried.schema.names
        has_same_columns = self._has_same_text and names == self._carried_names
        same = np.full(len(old_rows), has_same_columns)
        if carried is None or self._carried is None or not has_same_columns:
            return same
        known = np.flatnonzero(old_rows != NO_ROW)
        old_columns = self._carried.take(pa.array(old_rows[known]))
        new_columns = carried.take(pa.array(known))
        for name in names:
            new = new_columns.column(name)
            old = old_columns.column(name).combine_chunks()
            if new.type != old.type:
                return np.zeros(len(old_rows), np.bool_)
            same[known] &= same_values(new, old)
        return same

    def result(self) -> RowChanges | None:
        """Return the changes after the last row; None if the rows could not be compared, or if too
        many differ."""
        if not self.is_possible:
            return None
        deleted = self._ids.values.filter(pa.array(~self._seen))
        if sum(map(len, self._changed)) + len(deleted) > MOST_IDS:
            return None
        return RowChanges(self._changed, deleted, self._previous_version)
