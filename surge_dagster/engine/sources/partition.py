"""What a catalog is: ordered partitions of (id, text) rows, each read as a stream of row batches, never whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import pyarrow as pa

from surge_dagster.engine.support.columns import value_parts

KEY_METADATA = b"surge.partition_key"
SOURCE_VERSION_METADATA = b"surge.source_version"

_INT64 = pa.int64()


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Consecutive rows of one partition, in the source's order.

    Attributes:
        ids: string, int64 or binary, without nulls.
        texts: as many, without nulls.
        id_offsets: where each id starts in its column's data, one entry more than rows; None where ids are numbers.
        id_values: the bytes of the ids, one behind the other; of numbers eight each.
        text_offsets, text_values: the same of the texts; their offsets are int64.
    """

    ids: pa.Array
    texts: pa.LargeStringArray
    # Found once: every stage that the rows pass asks for them, and a batch may have ten rows.
    id_offsets: np.ndarray | None = field(init=False, repr=False, compare=False)
    id_values: memoryview = field(init=False, repr=False, compare=False)
    text_offsets: np.ndarray = field(init=False, repr=False, compare=False)
    text_values: memoryview = field(init=False, repr=False, compare=False)

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

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def id_bytes(self) -> int:
        """Bytes of ids that are strings; 0 where they are numbers."""
        return 0 if self.id_offsets is None else len(self.id_values)

    @property
    def value_bytes(self) -> int:
        """Bytes of all ids and texts; Arrow's own `nbytes` lets other threads go first, which takes its time."""
        return len(self.id_values) + len(self.text_values)


@dataclass(frozen=True, slots=True)
class Partition:
    """One partition of a source.

    Attributes:
        key: any non-empty string.
        source_version: a cheap token that changes when the content may have changed.
        read: opens the partition anew and yields its rows; raises `DataError` at the first row that is refused.
        current_source_version: looks the token up again, None when the partition has gone.
        rows: number of rows where the source knows it without reading them.
        text_bytes: bytes of text, estimated, where the source knows them.
    """

    key: str
    source_version: str
    read: Callable[[], Iterator[RowBatch]]
    current_source_version: Callable[[], str | None]
    rows: int | None = None
    text_bytes: int | None = None


class Source(Protocol):
    """Where partitions come from. Iterating yields them in a stable order."""

    @property
    def url(self) -> str: ...

    def __iter__(self) -> Iterator[Partition]: ...
