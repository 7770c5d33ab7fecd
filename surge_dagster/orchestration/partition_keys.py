"""Converts catalog keys to Dagster partition keys and back.

Dagster accepts almost any text as a dynamic partition key, with exceptions: it refuses `...` and
control characters, and its range and list syntax (commas, brackets, quotes, a bare `*`) makes other
keys impossible to select by hand. Only those characters are percent-encoded, so that ordinary keys
look the same in the UI and in the catalog.

Keys are limited in length: an index entry of Postgres holds 2,704 bytes, the key and its neighbours
together, and Postgres refuses every row that is stored together with a longer one. A partition
whose key is too long gets the name of its folder as its key and is refused like other bad data.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar
from urllib.parse import unquote

from surge_dagster.engine.errors import DataError
from surge_dagster.engine.sources.partition import Partition, RowBatch
from surge_dagster.engine.support.keys import encode_key

# of a partition key; Dagster's tags of runs and its asset keys need room as well
MOST_BYTES = 1_000
_VALUES_PER_STATEMENT = 10_000  # SQLite takes 32,766 parameters
# White space around a key, syntax of Dagster, control characters and line separators, half a
# surrogate pair, and `...`.
_UNSAFE = re.compile(r'\A\s+|\s+\Z|[%,\[\]"*|\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]|\.{3,}')

T = TypeVar("T")


def to_partition_key(key: str) -> str:
    """Return the Dagster partition key of a catalog key.

    Raises:
        ValueError: the key is empty or not valid Unicode.
    """
    if not key:
        raise ValueError("a partition key must not be empty")
    return _UNSAFE.sub(_escape, key)


def from_partition_key(partition_key: str) -> str:
    """Return the catalog key of a Dagster partition key; `%FF` and such are returned unchanged."""
    try:
        return unquote(partition_key, errors="strict")
    except UnicodeDecodeError:
        return partition_key


def with_short_keys(partitions: Iterable[Partition]) -> Iterator[Partition]:
    """Yield the partitions; reading one raises `DataError` if its key is too long."""
    for partition in partitions:
        size = len(to_partition_key(partition.key).encode())
        if size <= MOST_BYTES:
            yield partition
        else:
            name = encode_key(partition.key)
            yield replace(partition, key=name, read=partial(_refuse, name, partition.key, size))


def in_groups(values: Sequence[T], size: int = _VALUES_PER_STATEMENT) -> Iterator[list[T]]:
    """Yield keys or ids in groups that one statement of Dagster's storage accepts as parameters."""
    for start in range(0, len(values), size):
        yield list(values[start : start + size])


def _escape(unsafe: re.Match[str]) -> str:
    text = unsafe.group()
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{text!r} is not valid Unicode text") from error
    return "".join(f"%{byte:02X}" for byte in encoded)


def _refuse(name: str, key: str, size: int) -> Iterator[RowBatch]:
    raise DataError(
        name,
        f"its key, which begins with {key[:40]!r}, has {size:,} bytes as a partition key of "
        f"Dagster, and a database may have no room for more than {MOST_BYTES:,}",
        "Give it a shorter key.",
    )
