"""What a catalog is: ordered partitions of (id, text) rows, and how a key becomes a file name.

A partition is read as a stream of row batches, never whole. Its key may be any non-empty string; on disk it is
percent-encoded so that no key can leave its folder, collide with another or be mangled by a shell. Short names can
be read back with `decode_key`; names of long keys carry a hash, and the key itself stands in the files' metadata.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Protocol
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from surge_dagster.engine.columns import value_parts
from surge_dagster.engine.disk_names import is_text, printable

KEY_METADATA = b"surge.partition_key"
SOURCE_VERSION_METADATA = b"surge.source_version"

_INT64 = pa.int64()
_REVERSIBLE_BYTES = 180
_PREFIX_BYTES = 120
_PLAIN = re.compile(rf"[A-Za-z0-9_-]{{1,{_REVERSIBLE_BYTES}}}", re.ASCII)
# Not urllib's `quote`: it leaves "." and "~" alone, and a dot could mean a parent folder, the tilde marks hashed names.
_ENCODED = [chr(byte) if _PLAIN.fullmatch(chr(byte)) else f"%{byte:02X}" for byte in range(256)]
_LONG_NAME = re.compile(r"^.{120}~[0-9a-f]{32}$", re.DOTALL)


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


@lru_cache(maxsize=1 << 16)  # the same keys, listing after listing
def encode_key(key: str) -> str:
    """The file or folder name of a key: ASCII, at most 180 bytes, different for different keys.

    Everything outside `A-Za-z0-9_-` is percent-encoded, `.` and `~` included. A name over 180 bytes is cut to 120
    bytes, `~` and the first 32 hex digits of the key's SHA-256.

    Raises:
        ValueError: the key is empty or is not valid Unicode.
    """
    if _PLAIN.fullmatch(key):
        return key  # most keys, and what follows takes twenty times as long
    if not key:
        raise ValueError("a partition key must not be empty")
    try:
        raw = key.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"partition key {key!r} is not valid Unicode text") from error
    name = "".join(map(_ENCODED.__getitem__, raw))
    if len(name) <= _REVERSIBLE_BYTES:
        return name
    return f"{name[:_PREFIX_BYTES]}~{hashlib.sha256(raw).hexdigest()[:32]}"


def is_hashed(name: str) -> bool:
    """Whether a name made by `encode_key` is one of a long key, which cannot be read back from it."""
    return bool(_LONG_NAME.match(name))


def decode_key(name: str) -> str | None:
    """The key of a name made by `encode_key`, or by another hive writer that escapes less; None for a hashed name.

    Raises:
        ValueError: the name is empty or does not decode to text.
    """
    if not name:
        raise ValueError("a partition name must not be empty")
    if not is_text(name):
        raise ValueError(f"partition name {printable(name)!r} is not UTF-8")
    if is_hashed(name):
        return None
    try:
        return unquote(name, errors="strict")
    except UnicodeDecodeError as error:
        raise ValueError(f"partition name {name!r} does not decode to UTF-8 text") from error
