"""What every source offers: ordered partitions of (id, text) rows, each streamed as row batches in
bounded memory.

A new kind of source implements `Source`. A `Selection` checks and converts the raw columns of its
partitions; `tests/engine/sources` has the examples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from surge_dagster.engine.errors import ConfigError, DataError, SurgeError
from surge_dagster.engine.support.columns import value_parts
from surge_dagster.engine.support.values import value_sizes

KEY_METADATA = b"surge.partition_key"
SOURCE_VERSION_METADATA = b"surge.source_version"
# the source version of a partition whose files could not be listed
UNREADABLE_VERSION = "unreadable"

Place = Callable[[int], str]  # says where the source has a row, such as "row 5 of part-1.csv"
_INT64 = pa.int64()
T = TypeVar("T")


class Source(Protocol):
    """Where partitions come from. Each iteration lists them anew, in a stable order, and reads no
    rows."""

    @property
    def url(self) -> str: ...

    def __iter__(self) -> Iterator[Partition]: ...


@dataclass(frozen=True, slots=True)
class Partition:
    """One partition of a source, as it was listed.

    Attributes:
        source_version: a cheap token that changes when the content may have changed.
        read: yields the rows, a few megabytes at a time; raises `DataError` at the first row that
            is refused, and `TransientError` where the storage does not answer.
        current_source_version: looks the token up again, None when the source no longer has the
            partition.
        rows: where they are known without reading, those that are skipped included.
        text_bytes: an estimate.
        page_bytes: memory that reading may take beside the rows that it yields.
        read_range: like `read`, the rows from one to before another, without those in front of
            them; None where the source cannot do that, or leaves rows out.
        borders: where row groups begin and end, ascending; () where that is unknown.
    """

    key: str
    source_version: str
    read: Callable[[], Iterator[RowBatch]]
    current_source_version: Callable[[], str | None]
    rows: int | None = None
    text_bytes: int | None = None
    page_bytes: int = 0
    read_range: Callable[[int, int], Iterator[RowBatch]] | None = None
    borders: Callable[[], Sequence[int]] = tuple


@dataclass(frozen=True, slots=True)
class PartitionRange:
    """Rows start..stop of one version of a partition, which a run encodes without the others.

    Raises:
        ConfigError: there is no such range.
    """

    key: str
    source_version: str
    start: int
    stop: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.stop:
            raise ConfigError(
                f"{self} are no range. Expected a first row of at least 0 and an end behind it."
            )

    def __str__(self) -> str:
        return f"rows {self.start:,} to {self.stop:,} of partition {self.key!r}"


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Consecutive rows of one partition, in the source's order.

    Attributes:
        ids: string, int64 or binary, without nulls; so are the texts.
        skipped: rows of the source that were left out in front of, between or behind these.
        carried: as many rows of further columns, which may be null.
        place: of one of these rows.
        carried_sizes: bytes of these columns in each row, int64 [rows].
        id_offsets: where each id starts in its values, one entry more than rows; None where ids are
            numbers.
        id_values: the bytes of the ids, one behind the other; of numbers eight each.
    """

    ids: pa.Array
    texts: pa.LargeStringArray
    skipped: int = 0
    carried: pa.RecordBatch | None = None
    place: Place | None = field(default=None, repr=False, compare=False)
    # Computed once: every stage needs them, and a batch may have only ten rows.
    id_offsets: np.ndarray | None = field(init=False, repr=False, compare=False)
    id_values: memoryview = field(init=False, repr=False, compare=False)
    text_offsets: np.ndarray = field(init=False, repr=False, compare=False)
    text_values: memoryview = field(init=False, repr=False, compare=False)
    carried_sizes: np.ndarray | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        ids = self.ids
        if ids.type == _INT64:
            offsets, values = None, ids.to_numpy(zero_copy_only=True).view(np.uint8).data
        else:
            offsets, values = value_parts(ids)
        put = object.__setattr__
        put(self, "id_offsets", offsets)
        put(self, "id_values", values)
        offsets, values = value_parts(self.texts)
        put(self, "text_offsets", offsets)
        put(self, "text_values", values)
        sizes = None
        if self.carried is not None:
            sizes = sum(map(value_sizes, self.carried.columns), np.zeros(len(ids), np.int64))
        put(self, "carried_sizes", sizes)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def value_bytes(self) -> int:
        """Bytes of all columns; Arrow's own `nbytes` releases the GIL, and taking it again costs
        time."""
        size = len(self.id_values) + len(self.text_values)
        return size if self.carried_sizes is None else size + int(self.carried_sizes.sum())

    def rows(self, start: int, stop: int) -> RowBatch:
        """Rows start..stop as a batch of their own, without a copy."""
        carried = None if self.carried is None else self.carried.slice(start, stop - start)
        return RowBatch(self.ids[start:stop], self.texts[start:stop], carried=carried)  # pyright: ignore[reportArgumentType]


def row_in_words(row: int) -> str:
    """A zero-based row as messages name it; a CSV file's header is none."""
    return f"row {row:,}"


def located(partition: Partition, error: DataError) -> DataError:
    """An error whose row was counted among the rows that were read, with its place, for which they
    are read again."""
    row = error.row or 0
    with contextlib.suppress(SurgeError, OSError):
        for batch in partition.read() if error.row is not None and error.place is None else ():
            if row < len(batch):
                place = batch.place and batch.place(row)
                return DataError(error.key, error.reason, error.remedy, error.row, place)
            row -= len(batch)
    return error


def read_rows(partition: Partition, rows: PartitionRange | None = None) -> Iterator[RowBatch]:
    """The rows of a partition, or those of a range; their further columns have one type each."""
    columns: list[pa.Field] = []
    batches, row = partition.read, 0
    if rows is not None:
        assert partition.read_range is not None  # `decide` refuses other partitions
        batches, row = partial(partition.read_range, rows.start, rows.stop), rows.start
    for batch in batches():
        if batch.carried is not None:
            columns = columns or list(batch.carried.schema)
            for first, now in zip(columns, batch.carried.schema, strict=True):
                if now != first:
                    raise DataError(
                        partition.key,
                        f"the column {first.name!r} has type {now.type} from this row on, and {first.type} before it; "
                        "a partition has one type for each column",
                        "Write its files again with the same types, or leave the column out of columns.",
                        row,
                    )
        yield batch
        row += len(batch)


def within(
    parts: Iterable[T], start: int, stop: int, length: Callable[[Any], int] = len
) -> Iterator[tuple[T, int, int]]:
    """Of consecutive parts those with some of the rows start..stop, and where these begin and end
    in the part."""
    row = 0
    for part in parts:
        rows = length(part)
        first, last = max(start - row, 0), min(stop - row, rows)
        if first < last:
            yield part, first, last
        row += rows
        if row >= stop:
            return
