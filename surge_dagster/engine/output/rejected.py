"""Lists of the rows that were set aside, one for each partition that has some.

    <space>/.rejected/<encoded key>.parquet

A list has one row for each row of the source that its partition's file lacks because it is bad. It
is written before that file is published. So a file that states such rows has its list, and a list
whose file states none, or another source version, is left from a run that died: readers pass over
it, and the next run over the partition replaces it.

Most bad rows are found again by whoever reads the source. Rows whose texts ended workers are not;
the list says which of its rows these are, and `ended_workers.py` leaves them out of what is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from surge_dagster.engine.files.facts import FileFacts, InvalidFile, explained
from surge_dagster.engine.files.formats import SUFFIX, PublishedFile
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.sources.partition import (
    KEY_METADATA,
    SOURCE_VERSION_METADATA,
    RejectedRow,
)
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.keys import encode_key

FOLDER = ".rejected"
# Rows of one partition that are named, because a run keeps them in memory; all are counted.
MOST_LISTED = 10_000
_MOST_BYTES = 4 * 1024 * 1024
COLUMNS = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("place", pa.string(), nullable=False),
        pa.field("id", pa.string()),
        pa.field("reason", pa.string(), nullable=False),
        pa.field("kind", pa.string(), nullable=False),
        pa.field("ended_worker", pa.bool_(), nullable=False),
    ]
)
NONE_LISTED = pa.Table.from_batches([], COLUMNS)  # `empty_table` imports pandas


def folder_of(space: str) -> str:
    """Return the folder of a space's lists."""
    return f"{space}/{FOLDER}"


def list_name(space: str, key: str) -> str:
    """Return the name of a partition's list within the store."""
    return f"{folder_of(space)}/{encode_key(key)}{SUFFIX}"


@dataclass(frozen=True, slots=True)
class RejectedRows:
    """Rows of one partition that were set aside.

    Attributes:
        table: the first `MOST_LISTED` of them, with the columns of a list.
        rows: how many there are.
        transient: those that the next run tries again.
    """

    table: pa.Table
    rows: int = 0
    transient: int = 0


NONE_REJECTED = RejectedRows(NONE_LISTED)


class RejectedRowsBuilder:
    """Collects the rows of a partition that are set aside, as they come."""

    def __init__(self) -> None:
        self._parts: list[pa.RecordBatch] = []
        self._bytes = 0
        self._listed = 0
        self._rows = 0
        self._transient = 0

    def add(self, rows: Sequence[RejectedRow]) -> None:
        """Add the next rows."""
        room = max(0, MOST_LISTED - self._listed)
        if self._bytes > _MOST_BYTES:
            room = 0
        # These are listed in any case: whoever reads the source does not find them.
        ended_workers = [row for row in rows if row.ended_worker]
        others = [row for row in rows if not row.ended_worker]
        self._append([*ended_workers, *others[:room]])
        self._rows += len(rows)
        self._transient += sum(1 for row in rows if row.kind == "transient")

    def _append(self, rows: Sequence[RejectedRow]) -> None:
        if not rows:
            return
        columns: dict[str, list[Any]] = {}
        for name in COLUMNS.names:
            columns[name] = [_storable(getattr(row, name)) for row in rows]
        part = pa.RecordBatch.from_pydict(columns, schema=COLUMNS)
        self._parts.append(part)
        self._bytes += part.nbytes
        self._listed += len(rows)

    def rejected(self) -> RejectedRows:
        """Return all of them, after the last row of the partition."""
        if not self._rows:
            return NONE_REJECTED
        table = pa.Table.from_batches(self._parts, schema=COLUMNS)
        return RejectedRows(table, self._rows, self._transient)


def _storable(value: Any) -> Any:
    """Return a value as Parquet can have it: with escapes for what UTF-8 lacks."""
    if not isinstance(value, str):
        return value
    return value.encode("utf-8", "backslashreplace").decode()


class RejectedLists:
    """The lists of one space, as a run writes them; they are listed once, at its beginning."""

    def __init__(self, store: Store, space: str) -> None:
        self._store = store
        self._space = space
        self._names = {stored.name for stored in store.list(folder_of(space))}

    def write(
        self, facts: FileFacts, rejected: RejectedRows, still_wanted: Callable[[], None]
    ) -> None:
        """Write the list of a file that is about to be published, if it has one; it is durable
        then. `still_wanted` is as in `Upload.publish`."""
        if not rejected.rows:
            return
        key = facts.partition_key
        name = list_name(self._space, key)
        write_list(self._store, name, key, facts.source_version, rejected.table, still_wanted)
        self._store.sync(folder_of(self._space))

    def remove_old(self, facts: FileFacts) -> None:
        """Remove the list of a published file that has no such rows any more."""
        if facts.rejected_rows or not self._names:
            return
        name = list_name(self._space, facts.partition_key)
        if name in self._names:
            self._store.delete(name)


def write_list(
    store: Store,
    name: str,
    key: str,
    source_version: str,
    rows: pa.Table,
    still_wanted: Callable[[], None] = lambda: None,
) -> None:
    """Write a list; `still_wanted` is as in `Upload.publish`."""
    metadata = {
        KEY_METADATA: _encoded(key),
        SOURCE_VERSION_METADATA: _encoded(source_version),
    }
    with store.create(name) as upload:
        pq.write_table(
            rows.replace_schema_metadata(metadata),
            upload.sink,
            compression="zstd",
            write_page_checksum=True,
        )
        upload.publish(still_wanted)


def rejected_from(store: Store, space: Space, facts: FileFacts) -> pa.Table:
    """Return the list of a file of a space with these facts, as `read_rejected`. The lists of a
    derived space are those of its parent."""
    if not facts.rejected_rows:
        return NONE_LISTED
    return read_rejected(store, space.encoded_name, facts.partition_key, facts.source_version)


def read_rejected(store: Store, space: str, key: str, source_version: str) -> pa.Table:
    """Return the list of a partition; see `read_list`."""
    return read_list(store, list_name(space, key), source_version)


def read_list(store: Store, name: str, source_version: str) -> pa.Table:
    """Return a list; it has no rows if it is not there, is damaged, or is of another source
    version."""
    try:
        with explained(store.location(name)), store.open(name) as source:
            reader = pq.ParquetFile(source, page_checksum_verification=True)
            metadata = reader.schema_arrow.metadata or {}
            if metadata.get(SOURCE_VERSION_METADATA) != _encoded(source_version):
                return NONE_LISTED
            return reader.read(use_threads=False).replace_schema_metadata(None).cast(COLUMNS)
    except (FileNotFoundError, InvalidFile, ValueError):
        return NONE_LISTED


def _encoded(value: str) -> bytes:
    return value.encode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True)
class RejectedOfPartition:
    """What was set aside of one partition.

    Attributes:
        listed: rows of its list, with the columns as keys; empty if the list cannot be read.
    """

    key: str
    rows: int
    transient: int
    listed: list[dict[str, Any]]


def rejected_of_space(store: Store, space: Space) -> Iterator[RejectedOfPartition]:
    """Yield the partitions of a space of whose rows some were set aside, by the names of their
    files."""
    for file in OutputState(store, space.name).files().values():
        if not isinstance(file, PublishedFile) or not file.facts.rejected_rows:
            continue
        facts = file.facts
        yield RejectedOfPartition(
            facts.partition_key,
            facts.rejected_rows,
            facts.transient_rows,
            rejected_from(store, space, facts).to_pylist(),
        )
