"""The content digest of a partition's streamed rows, and the search for repeated ids.

The digest does not depend on batches: lengths and bytes of each column are hashed as streams of
their own, and the digest is the hash of them all. Arrow's buffers are hashed in place.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from surge_dagster.engine.errors import DataError
from surge_dagster.engine.sources.partition import Partition, RowBatch, row_in_words
from surge_dagster.engine.support.values import Buffer, value_streams

_SUSPECTS = 4096
_ID_BYTES = 9
_INT64 = pa.int64()


class ContentDigest:
    """SHA-256 over the rows of one partition with their carried columns, or over raw columns."""

    def __init__(self) -> None:
        self._streams: list[hashlib._Hash] = []
        self._kind = b""
        self._rows = 0

    def update(self, batch: RowBatch) -> None:
        """Add checked rows."""
        kind = str(batch.ids.type).encode()
        id_lengths = b""
        if batch.id_offsets is not None:
            id_lengths = _lengths(batch.id_offsets)
        parts = [id_lengths, batch.id_values, _lengths(batch.text_offsets), batch.text_values]
        if batch.carried is not None:
            kind += b"\0" + _described(batch.carried)
            parts += [part for column in batch.carried.columns for part in value_streams(column)]
        self._kind = self._kind or kind
        self._add(len(batch), parts)

    def update_raw(self, columns: pa.RecordBatch) -> None:
        """Add unchecked rows in canonical types, without types that no source may select."""
        self._kind = self._kind or b"raw\0" + _described(columns)
        parts = [part for column in columns.columns for part in _raw_streams(column)]
        self._add(len(columns), parts)

    def _add(self, rows: int, parts: Sequence[Buffer]) -> None:
        self._rows += rows
        self._streams = self._streams or [hashlib.sha256() for _ in parts]
        for stream, part in zip(self._streams, parts, strict=True):
            stream.update(part)

    def hexdigest(self) -> str:
        """Return 32 hex digits for the rows so far."""
        head = b"surge.content.1\0" + self._kind + b"\0" + self._rows.to_bytes(8, "little")
        streams = b"".join(stream.digest() for stream in self._streams)
        return hashlib.sha256(head + streams).hexdigest()[:32]


def _described(columns: pa.RecordBatch) -> bytes:
    shown = columns.schema.to_string(show_schema_metadata=False, show_field_metadata=False)
    return shown.encode("utf-8", "surrogatepass")


def _raw_streams(column: pa.Array) -> list[Buffer]:
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    try:
        return value_streams(column)
    except TypeError:
        return []


class IdSet:
    """A few bytes per id of one partition, which show that an id is repeated."""

    def __init__(self) -> None:
        self._hashes = array("q")

    @property
    def bytes(self) -> int:
        return self.bytes_after(0)

    def bytes_after(self, rows: int) -> int:
        """Return the memory after more rows; an array has a sixteenth more room than it needs."""
        return _ID_BYTES * (len(self._hashes) + rows)

    def add(self, ids: pa.Array) -> None:
        self._hashes.frombytes(id_keys(ids).data.cast("B"))

    def repeated(self) -> np.ndarray:
        """Return repeated hashes, int64, sorted. It sorts in place: add nothing afterwards."""
        known = np.frombuffer(self._hashes, np.int64)
        known.sort()
        return np.unique(known[1:][known[1:] == known[:-1]])


def refuse_repeated_id(partition: Partition, repeated: np.ndarray) -> None:
    """Read a partition again, and raise `DataError` if an id and not only a hash is repeated."""
    if not len(repeated):
        return
    # More would take much memory, and thousands do not share their hashes by chance.
    suspects = repeated[:_SUSPECTS]
    seen: dict[object, str] = {}
    row = 0
    for batch in partition.read():
        for offset in np.flatnonzero(np.isin(id_keys(batch.ids), suspects)).tolist():
            value = batch.ids[offset].as_py()
            place = row_in_words(row + offset)
            if batch.place:
                place = batch.place(offset)
            if value in seen:
                raise DataError(
                    partition.key,
                    f"the id {value!r} stands at {seen[value]} already; ids must be unique within "
                    "a partition",
                    "Remove one of the two rows or give it another id.",
                    row + offset,
                    place,
                )
            seen[value] = place
        row += len(batch)


def _lengths(offsets: np.ndarray) -> memoryview:
    """Return the bytes of each value as 32-bit numbers, whatever Arrow's offsets are."""
    return (offsets[1:] - offsets[:-1]).astype("<u4", copy=False).data


def id_keys(ids: pa.Array) -> np.ndarray:
    """Return a number for each id, int64, which is equal for equal ids within this process."""
    # An integer stands for itself: Python's hashes of -1 and -2 are equal.
    if ids.type == _INT64:
        return ids.to_numpy(zero_copy_only=True)
    return np.fromiter(map(hash, ids.to_pylist()), dtype=np.int64, count=len(ids))
