"""What every source offers: ordered partitions of (id, text) rows, streamed in bounded memory.

A new kind of source implements `Source`, and `checked_rows` checks and converts raw columns. A new
format of files needs less: see `formats`. A run computes the digest of a partition's rows while it
reads them, and finds repeated ids.

The digest does not depend on batches: lengths and bytes of each column are hashed as streams of
their own, and the digest is the hash of them all. Arrow's buffers are hashed in place.
"""

from __future__ import annotations

import contextlib
import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from surge_dagster.engine.errors import ConfigError, DataError, SurgeError
from surge_dagster.engine.support.values import Buffer, value_parts, value_sizes, value_streams

KEY_METADATA = b"surge.partition_key"
SOURCE_VERSION_METADATA = b"surge.source_version"

Place = Callable[[int], str]  # names a row for messages, such as "row 5 of part-1.csv"
_SUSPECTS = 4096
_INT64 = pa.int64()
_BYTES = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
T = TypeVar("T")


class Source(Protocol):
    """Where partitions come from. Each iteration lists them again in a stable order."""

    @property
    def url(self) -> str: ...

    def __iter__(self) -> Iterator[Partition]: ...


@dataclass(frozen=True, slots=True)
class Partition:
    """One partition of a source, as it was listed.

    Attributes:
        source_version: a cheap token that changes when the content may have changed.
        read: yields the rows, a few megabytes at a time; raises `DataError` at the first row that
            is refused, and `TransientError` if the storage does not answer.
        current_source_version: reads the token again; None if the partition was removed.
        rows: if known without reading; skipped rows are counted.
        source_rows: the same of the source, if other rows are made of its rows, such as chunks of
            documents.
        text_bytes: an estimate.
        page_bytes: memory that reading may take in addition to the rows that it yields.
        id_bytes: memory for each row that was read, if reading sets repeated ids aside; 0 if the
            run has to find them.
        read_range: like `read`, from one row to before another; None if the source cannot do that.
    """

    key: str
    source_version: str
    read: Callable[[], Iterator[RowBatch]]
    current_source_version: Callable[[], str | None]
    rows: int | None = None
    text_bytes: int | None = None
    page_bytes: int = 0
    id_bytes: int = 0
    read_range: Callable[[int, int], Iterator[RowBatch]] | None = None
    source_rows: int | None = None

    def __post_init__(self) -> None:
        if self.source_rows is None:
            object.__setattr__(self, "source_rows", self.rows)

    def bytes_of_ids(self, rows: int) -> int:
        """Return the memory for finding repeated ids among these rows."""
        return (self.id_bytes or IdSet.ROW_BYTES) * rows


@dataclass(frozen=True, slots=True)
class PartitionRange:
    """Rows start..stop of one version of a partition, which a run encodes without the others."""

    key: str
    source_version: str
    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ConfigError(f"{self} are not a range. Use a first row of at least 0 and an end.")

    def __str__(self) -> str:
        return f"rows {self.start:,} to {self.stop:,} of partition {self.key!r}"


@dataclass(frozen=True, slots=True)
class RejectedRow:
    """A row of the source that was set aside because it is bad.

    Attributes:
        row: zero-based, in the partition's own order.
        place: where the source has it, such as "row 5 of part-1.csv".
        id: as text; None if the row has none that can be read.
        reason: what was expected and what came.
        kind: "invalid" until the source changes; "transient" if the next run tries it again.
        ended_worker: whether its text ended every worker that encoded it.
    """

    row: int
    place: str
    id: str | None
    reason: str
    kind: Literal["invalid", "transient"] = "invalid"
    ended_worker: bool = False


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Consecutive rows of one partition, in the source's order.

    Attributes:
        ids: string, int64 or binary, without nulls; so are the texts.
        skipped: rows of the source that were left out before, between or after these.
        carried: further columns, with as many rows; their values may be null.
        place: of one of these rows.
        source_rows: rows of the source that these are made of; without another number, each is one.
        rejected: rows of the source that were set aside before, between or after these.
        numbers: of these rows in the partition, int64 [rows]; None if they follow each other.
        passages: where the selection's `passage` starts and ends in each text, in characters, int64
            [rows, 2].
        carried_sizes: bytes of these columns in each row, int64 [rows].
        id_offsets: where each id starts in `id_values`, [rows + 1]; None if ids are numbers.
        id_values: the bytes of the ids; eight for each number.
    """

    ids: pa.Array
    texts: pa.LargeStringArray
    skipped: int = 0
    carried: pa.RecordBatch | None = None
    place: Place | None = field(default=None, repr=False, compare=False)
    source_rows: int = -1
    rejected: tuple[RejectedRow, ...] = ()
    numbers: np.ndarray | None = field(default=None, repr=False, compare=False)
    passages: np.ndarray | None = field(default=None, repr=False, compare=False)
    # Computed once: every stage needs them, and a batch may have only ten rows.
    id_offsets: np.ndarray | None = field(init=False, repr=False, compare=False)
    id_values: memoryview = field(init=False, repr=False, compare=False)
    text_offsets: np.ndarray = field(init=False, repr=False, compare=False)
    text_values: memoryview = field(init=False, repr=False, compare=False)
    carried_sizes: np.ndarray | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        put = partial(object.__setattr__, self)
        if self.source_rows < 0:
            put("source_rows", len(self))
        if self.ids.type == _INT64:
            put("id_offsets", None)
            put("id_values", self.ids.to_numpy(zero_copy_only=True).view(np.uint8).data)
        else:
            offsets, values = value_parts(self.ids)
            put("id_offsets", offsets)
            put("id_values", values)
        offsets, values = value_parts(self.texts)
        put("text_offsets", offsets)
        put("text_values", values)
        sizes = None
        if self.carried is not None:
            sizes = sum(map(value_sizes, self.carried.columns), np.zeros(len(self), np.int64))
        put("carried_sizes", sizes)

    def __len__(self) -> int:
        return len(self.ids)

    def row_numbers(self, first_row: int) -> np.ndarray:
        """Return the numbers of these rows in the partition, if so many rows of the source come
        before the batch."""
        if self.numbers is not None:
            return self.numbers
        numbers = np.arange(first_row, first_row + len(self) + len(self.rejected))
        return np.setdiff1d(numbers, [row.row for row in self.rejected])[: len(self)]

    @property
    def value_bytes(self) -> int:
        """Bytes of all columns; Arrow's `nbytes` releases the GIL, and taking it again is slow."""
        size = len(self.id_values) + len(self.text_values)
        if self.carried_sizes is not None:
            size += int(self.carried_sizes.sum())
        return size

    def rows(self, start: int, stop: int) -> RowBatch:
        """Return rows start..stop as a batch of their own, without a copy."""
        carried = self.carried
        if carried is not None:
            carried = carried.slice(start, stop - start)
        return RowBatch(self.ids[start:stop], self.texts[start:stop], carried=carried)  # pyright: ignore[reportArgumentType]


def row_in_words(row: int) -> str:
    """Return a zero-based row as messages name it; a CSV file's header is not counted."""
    return f"row {row:,}"


def located(partition: Partition, error: DataError) -> DataError:
    """Return an error with the place of its row, for which the partition is read again.

    The row was counted among the rows that were read; skipped rows of the source were not.
    """
    if error.row is None or error.place is not None:
        return error
    row = error.row
    with contextlib.suppress(SurgeError, OSError):
        for batch in partition.read():
            if row < len(batch):
                place = batch.place and batch.place(row)
                return DataError(error.key, error.reason, error.remedy, error.row, place)
            row -= len(batch)
    return error


def read_rows(partition: Partition, rows: PartitionRange | None = None) -> Iterator[RowBatch]:
    """Yield the rows of a partition or of a range; ids and each further column have one type."""
    row = 0
    batches = partition.read
    if rows is not None:
        assert partition.read_range is not None  # `decide` refuses other partitions
        row = rows.start
        batches = partial(partition.read_range, rows.start, rows.stop)
    types: dict[str, pa.DataType] = {}
    for batch in batches():
        for name, kind in _types(batch).items():
            if types.setdefault(name, kind) != kind:
                raise DataError(
                    partition.key,
                    f"the column {name!r} has type {kind} from this row on, and {types[name]} "
                    "before it; a partition has one type for each column",
                    "Write its files with the same types, or leave it out of columns.",
                    row,
                    batch.place(0) if batch.place and len(batch) else None,
                )
        yield batch
        row += len(batch)


def _types(batch: RowBatch) -> dict[str, pa.DataType]:
    types = {"id": batch.ids.type}
    if batch.carried is not None:
        types |= {field.name: field.type for field in batch.carried.schema}
    return types


def within(
    parts: Iterable[T], start: int, stop: int, length: Callable[[Any], int] = len
) -> Iterator[tuple[T, int, int]]:
    """Yield the parts that have some of the rows start..stop, with where these begin and end."""
    row = 0
    for part in parts:
        rows = length(part)
        first = max(start - row, 0)
        last = min(stop - row, rows)
        if first < last:
            yield part, first, last
        row += rows
        if row >= stop:
            return


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

    ROW_BYTES = 9  # an array has a sixteenth more room than it needs

    def __init__(self) -> None:
        self._hashes = array("q")

    def add(self, ids: pa.Array) -> None:
        self._hashes.frombytes(id_keys(ids).data.cast("B"))

    def repeated(self) -> np.ndarray:
        """Return repeated hashes, int64, sorted. It sorts in place: add nothing afterwards."""
        known = np.frombuffer(self._hashes, np.int64)
        known.sort()
        repeated = known[1:][known[1:] == known[:-1]]
        return np.unique(repeated) if len(repeated) else repeated


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
                    "Remove one of the two rows, give it another id, or set bad_rows to set_aside.",
                    row + offset,
                    place,
                )
            seen[value] = place
        row += len(batch)


def _lengths(offsets: np.ndarray) -> memoryview:
    """Return the bytes of each value as 32-bit numbers, whatever Arrow's offsets are."""
    return (offsets[1:] - offsets[:-1]).astype("<u4", copy=False).data


def id_keys(ids: pa.Array) -> np.ndarray:
    """Return a number for each id, int64, which is equal for equal ids within this process.

    An integer stands for itself. Others have Python's hash, of which whoever writes ids cannot know
    the key. It needs an object for each id, 0.06 µs, for few ids as for many. Sums over the bytes
    of a column fed a null encoder 5 % faster, but took 28 µs for ten ids of five lengths.
    """
    if ids.type == _INT64:
        return ids.to_numpy(zero_copy_only=True)
    if ids.type in _BYTES:  # those of an old file need not be UTF-8
        ids = ids.view(_BYTES[ids.type])
    return np.fromiter(map(hash, ids.to_pylist()), np.int64, len(ids))
