"""What is remembered of a partition's rows while they stream by: a digest of all, and eight bytes of each id.

The digest does not depend on how the rows were cut into batches: lengths and bytes of ids and texts are hashed as four
separate streams, and the partition's digest is the hash of the four. Arrow's buffers are hashed as they lie.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from surge_dagster.engine.errors import DataError
from surge_dagster.engine.sources.partition import Partition, RowBatch

# Repeated ids looked for in one reading: a partition may hold each of its ids twice, and one is enough to refuse it.
_SUSPECTS = 4096
_FEW = 256
_INT64 = pa.int64()
_NONE = np.empty(0, np.int64)


class ContentDigest:
    """SHA-256 over the canonical (id, text) rows of one partition."""

    def __init__(self) -> None:
        self._streams: list[hashlib._Hash] | None = (
            None  # made with what is hashed first: most partitions are one batch
        )
        self._kind = b""
        self._rows = 0

    def update(self, batch: RowBatch) -> None:
        """Add the next rows."""
        if not self._kind:
            self._kind = str(batch.ids.type).encode()
        rows, id_offsets = len(batch.ids), batch.id_offsets
        if not rows:
            return
        self._rows += rows
        id_lengths = b"" if id_offsets is None else _lengths(id_offsets)
        parts = (id_lengths, batch.id_values, _lengths(batch.text_offsets), batch.text_values)
        if not self._streams:
            self._streams = [*map(hashlib.sha256, parts)]
            return
        for stream, part in zip(self._streams, parts, strict=True):
            stream.update(part)

    def hexdigest(self) -> str:
        """The digest so far, 32 hex digits."""
        head = b"surge.content.1\0" + self._kind + b"\0" + self._rows.to_bytes(8, "little")
        streams = self._streams or [hashlib.sha256()] * 4
        return hashlib.sha256(head + b"".join([stream.digest() for stream in streams])).hexdigest()[:32]


class IdSet:
    """Eight bytes per id of one partition, enough to notice that one comes twice."""

    def __init__(self) -> None:
        self._few = array("q")  # while they are few: numpy takes longer, and most partitions end there
        self._hashes = _NONE
        self._rows = self._room = 0

    @property
    def bytes(self) -> int:
        """Memory held, in bytes."""
        return self._room * 8

    def bytes_after(self, rows: int) -> int:
        """Memory held after `rows` more, in bytes."""
        return max(self._room, _rounded_up(self._rows + rows)) * 8

    def add(self, ids: pa.Array) -> None:
        """Add the next ids."""
        before = self._rows
        self._rows += len(ids)
        self._room = max(self._room, _rounded_up(self._rows))
        if self._rows <= _FEW:
            self._few.extend(_hashes(ids))
            return
        if self._hashes is _NONE:
            self._hashes = np.array(self._few)
        if self._room > self._hashes.size:
            self._hashes.resize(self._room, refcheck=False)
        self._hashes[before : self._rows] = _hash_ids(ids)

    def repeated(self) -> np.ndarray:
        """Hashes that came twice, sorted; sorts in place, so nothing can be added afterwards."""
        if self._rows <= _FEW and len(set(self._few)) == self._rows:
            return _NONE
        known = np.array(self._few) if self._hashes is _NONE else self._hashes[: self._rows]
        known.sort()
        again = known[1:] == known[:-1]
        return np.unique(known[1:][again]) if again.any() else known[:0]


def refuse_repeated_id(partition: Partition, repeated: np.ndarray) -> None:
    """Read a partition again and name an id that comes twice, if one really does.

    Args:
        repeated: hashes that came twice; two ids may share one without being equal.

    Raises:
        DataError: an id comes twice.
    """
    for start in range(0, len(repeated), _SUSPECTS):
        _refuse_one_of(partition, repeated[start : start + _SUSPECTS])


def _refuse_one_of(partition: Partition, suspects: np.ndarray) -> None:
    seen: dict[object, int] = {}
    row = 0
    for batch in partition.read():
        for offset in np.flatnonzero(np.isin(_hash_ids(batch.ids), suspects)):
            value = batch.ids[int(offset)].as_py()
            if value in seen:
                raise DataError(
                    partition.key,
                    f"the id {value!r} stands at row {seen[value]} already; ids must be unique within a partition",
                    "Remove one of the two rows or give it another id.",
                    row + int(offset),
                )
            seen[value] = row + int(offset)
        row += len(batch)


def _lengths(offsets: np.ndarray) -> memoryview:
    """Bytes of each value as unsigned 32-bit numbers; no value is longer, and Arrow's own are 32-bit or 64-bit."""
    return (offsets[1:] - offsets[:-1]).astype("<u4", copy=False).data


def _hash_ids(ids: pa.Array) -> np.ndarray:
    if ids.type == _INT64:
        return ids.to_numpy(zero_copy_only=True)
    return np.fromiter(_hashes(ids), dtype=np.int64, count=len(ids))


def _hashes(ids: pa.Array) -> Iterable[int]:
    # Those of integers are not their hashes in Python, where -1 and -2 share one.
    return ids.to_numpy(zero_copy_only=True).tolist() if ids.type == _INT64 else map(hash, ids.to_pylist())


def _rounded_up(rows: int) -> int:
    # Grows by a quarter, so that copying stays linear in the number of rows; few are copied soon enough.
    if rows <= _FEW:
        return rows
    size = 1024
    while size < rows:
        size += max(1024, size // 4)
    return size
