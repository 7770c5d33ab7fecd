"""What the footers in a bucket said when they were read last, kept on disk: a run need not ask for each of them again.

One file per output and space, under the project's cache folder. It can be deleted at any time, and every doubt about it
is settled by reading the footer: a file that is damaged or of another format is not looked into; an entry counts only
for the very name, size and etag that it was made for, and only while two digests confirm it, that of the footer's facts
and one that ties them to this object of this output.

It is written whole, aside and renamed: of two processes the last one wins, and what the other one found is read again.
An Arrow stream was chosen because 40,000 entries take 4 MB and are there in a fraction of a second; a database would
have to be locked, and JSON knows no bytes. A digest stands before
it, since Arrow is not made to read what was damaged.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from typing import Any, NamedTuple

import pyarrow as pa

from surge_dagster.engine.files.embedding_file import FileFacts, entry_names
from surge_dagster.engine.files.fact_values import facts_of_values, values_of
from surge_dagster.engine.store.store import StoredObject
from surge_dagster.engine.support import disk_cache

_MAGIC = b"surge footers 2\n"
_ENTRIES = [key.decode() for key in entry_names(FileFacts)]
_SCHEMA = pa.schema(
    [("name", pa.string()), ("size", pa.int64()), ("etag", pa.string())]
    + [(entry, pa.binary()) for entry in _ENTRIES]
    + [("columns", pa.binary()), ("tie", pa.binary())]
)
_WRITTEN = pa.ipc.IpcWriteOptions(compression="zstd")
_DIGEST_BYTES = hashlib.sha256().digest_size

Row = tuple[Any, ...]  # as in the schema


class Entry(NamedTuple):
    """What a footer says: the facts, and the columns as an Arrow schema, empty where nobody looked at them."""

    facts: FileFacts
    columns: bytes


class FooterCache:
    """The facts of one space's files, as they were kept; reading it never fails.

    Args:
        identity: tells the output from every other one (`Store.identity`); only a digest of it is written.
        space: the space's name.
    """

    def __init__(self, identity: str, space: str) -> None:
        self._place = hashlib.sha256(f"{identity}\0{space}".encode("utf-8", "surrogatepass")).hexdigest()[:32]
        self._file = f"footers/{self._place}"
        columns = [column.to_pylist() for column in self._load().columns]  # value by value takes ten times as long
        self._rows: dict[str, Row] = dict(zip(columns[0], zip(*columns, strict=True), strict=True))
        self._new: list[Row] = []
        self._lock = threading.Lock()

    @property
    def has_grown(self) -> bool:
        """Whether so much is new that it is worth saving now: by half, so that saving costs in proportion."""
        return len(self._new) > len(self._rows) // 2

    def facts(self, stored: StoredObject) -> FileFacts | None:
        """What the object's footer says, None when that is not known for certain."""
        entry = self.entry(stored)
        return entry.facts if entry is not None else None

    def entry(self, stored: StoredObject) -> Entry | None:
        """The same with the columns."""
        row = self._rows.get(stored.name)
        if row is None:
            return None
        name, size, etag, *entries, columns, tie = row
        if (name, size, etag) != tuple(stored) or tie != self._tie(stored, entries[-1], columns):
            return None
        facts = facts_of_values(entries)
        return Entry(facts, columns) if facts is not None else None

    def add(self, stored: StoredObject, facts: FileFacts, columns: bytes = b"") -> None:
        """Keep what was read of an object; from any thread."""
        if not stored.etag:
            return
        entries = values_of(facts)
        tie = self._tie(stored, entries[-1], columns)
        with self._lock:
            self._new.append((stored.name, stored.size, stored.etag, *entries, columns, tie))

    def save(self, listed: Mapping[str, StoredObject]) -> None:
        """Write what is known of the objects that are listed, if anything is new."""
        with self._lock:
            new, self._new = self._new, []
        if not new:
            return
        self._rows = {name: row for name, row in self._rows.items() if name in listed} | {row[0]: row for row in new}
        columns = zip(*self._rows.values(), strict=True)
        table = pa.Table.from_arrays(
            [pa.array(column, kind.type) for column, kind in zip(columns, _SCHEMA, strict=True)], schema=_SCHEMA
        )
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, _SCHEMA, options=_WRITTEN) as writer:
            writer.write_table(table)
        stream = sink.getvalue().to_pybytes()
        disk_cache.write_bytes(self._file, _MAGIC + hashlib.sha256(stream).digest() + stream)

    def _load(self) -> pa.Table:
        content = disk_cache.read_bytes(self._file) or b""
        begin = len(_MAGIC) + _DIGEST_BYTES
        stream = memoryview(content)[begin:]
        if content[:begin] != _MAGIC + hashlib.sha256(stream).digest():
            return _SCHEMA.empty_table()
        try:
            table = pa.ipc.open_stream(stream).read_all()
        except (OSError, pa.ArrowException):
            return _SCHEMA.empty_table()
        return table if table.schema.equals(_SCHEMA) else _SCHEMA.empty_table()

    def _tie(self, stored: StoredObject, facts_digest: bytes, columns: bytes) -> bytes:
        """Ties the facts with this digest, and these columns, to one version of one object of this output."""
        parts = (self._place, stored.name, str(stored.size), stored.etag)
        said = "\0".join(parts).encode("utf-8", "surrogatepass") + b"\0" + facts_digest + columns
        return hashlib.sha256(said).digest()[:16]
