"""What the files in a bucket state about themselves, kept on the local disk so that a run need not read them again.

There is one file per output and space, under the project's cache folder. It can be deleted at any time: whatever it
does not have is read from the bucket. An entry counts only for the name, size and etag that it was made for. A digest
over the whole file ties it to its output and space, and is compared before Arrow parses anything.

The file is written as a whole, under another name, and renamed: of two processes the last one wins, and what the other
one found is read again. It is an Arrow stream because 40,000 entries take 4 MB and are loaded in a fraction of a
second; a database needs locks, and JSON has no bytes.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import pyarrow as pa

from surge_dagster.engine.files.facts import FileFacts, InvalidFile, entry_names, facts_of_values, values_of
from surge_dagster.engine.files.formats import PublishedFile
from surge_dagster.engine.store.store import StoredObject
from surge_dagster.engine.support import disk_cache

_FORMAT = "surge footers 3"
_SCHEMA = pa.schema(
    [("name", pa.string()), ("size", pa.int64()), ("etag", pa.string())]
    + [(entry.decode(), pa.binary()) for entry in entry_names(FileFacts)]
    + [("columns", pa.binary())]
)
_WRITTEN = pa.ipc.IpcWriteOptions(compression="zstd")
_DIGEST_BYTES = hashlib.sha256().digest_size


class FooterCache:
    """The facts and columns of one space's files, as they were kept; reading it never fails.

    Args:
        identity: tells the output from every other one (`Store.identity`); only a digest of it is written.
        space: the space's name.
    """

    def __init__(self, identity: str, space: str) -> None:
        self._place = hashlib.sha256(f"{identity}\0{space}".encode("utf-8", "surrogatepass")).hexdigest()[:32]
        self._file = f"footers/{self._place}"
        columns = [column.to_pylist() for column in self._load().columns]  # value by value takes ten times as long
        self._rows: dict[str, tuple[Any, ...]] = dict(zip(columns[0], zip(*columns, strict=True), strict=True))
        self._new: list[tuple[Any, ...]] = []
        self._lock = threading.Lock()

    @property
    def has_grown(self) -> bool:
        """Whether so much is new that it is worth saving now: by half, so that saving costs in proportion."""
        return len(self._new) > len(self._rows) // 2

    def file(self, stored: StoredObject) -> PublishedFile | None:
        """The file that lies there; None when that is not known for certain."""
        row = self._rows.get(stored.name)
        if row is None or row[:3] != stored:
            return None
        try:
            return PublishedFile(stored, facts_of_values(row[3:-1], FileFacts, _FORMAT), _columns(row[-1]))
        except (InvalidFile, OSError, pa.ArrowException):
            return None

    def add(self, file: PublishedFile) -> None:
        """Keep what was read of a file; from any thread."""
        if not file.stored.etag:
            return
        row = (*file.stored, *values_of(file.facts, _FORMAT), file.columns.serialize().to_pybytes())
        with self._lock:
            self._new.append(row)

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
        disk_cache.write_bytes(self._file, self._digest(stream) + stream)

    def _load(self) -> pa.Table:
        content = disk_cache.read_bytes(self._file) or b""
        stream = memoryview(content)[_DIGEST_BYTES:]
        if content[:_DIGEST_BYTES] != self._digest(stream):
            return _SCHEMA.empty_table()
        try:
            table = pa.ipc.open_stream(stream).read_all()
        except (OSError, pa.ArrowException):
            return _SCHEMA.empty_table()
        return table if table.schema.equals(_SCHEMA) else _SCHEMA.empty_table()

    def _digest(self, stream: bytes | memoryview) -> bytes:
        digest = hashlib.sha256(f"{_FORMAT}\0{self._place}\0".encode())
        digest.update(stream)
        return digest.digest()


@lru_cache(maxsize=64)
def _columns(schema: bytes) -> pa.Schema:
    return pa.ipc.read_schema(pa.BufferReader(schema))
