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
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar
from urllib.parse import quote, unquote

from surge_dagster.engine.errors import DataError
from surge_dagster.engine.sources.partition import Partition, RowBatch
from surge_dagster.engine.support.keys import encode_key

# of a partition key; Dagster's tags of runs and its asset keys need room as well
MOST_BYTES = 1_000
_VALUES_PER_STATEMENT = 10_000  # SQLite takes 32,766 parameters
_ALWAYS = frozenset('%,[]"*|')
_ORDINARY = re.compile(r"[A-Za-z0-9_-]+(?:[ ./:=][A-Za-z0-9_-]+)*", re.ASCII)
_DOTS = re.compile(r"\.{3,}")

T = TypeVar("T")


def to_partition_key(key: str) -> str:
    """Return the Dagster partition key of a catalog key.

    Raises:
        ValueError: the key is empty or not valid Unicode.
    """
    if _ORDINARY.fullmatch(key):
        return key  # most keys; the general way takes twenty times as long
    if not key:
        raise ValueError("a partition key must not be empty")
    inner = key.strip()
    start = key.index(inner)
    end = start + len(inner)
    safe: list[str] = []
    for index, character in enumerate(key):
        is_outer = not start <= index < end
        safe.append(_escape(character) if is_outer or _is_unsafe(character) else character)
    return _DOTS.sub(lambda dots: "%2E" * len(dots.group()), "".join(safe))


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


def in_chunks(values: Sequence[T]) -> Iterator[list[T]]:
    """Yield keys or ids in chunks that one statement of Dagster's storage accepts as parameters."""
    for start in range(0, len(values), _VALUES_PER_STATEMENT):
        yield list(values[start : start + _VALUES_PER_STATEMENT])


def _is_unsafe(character: str) -> bool:
    return character in _ALWAYS or unicodedata.category(character) in ("Cc", "Zl", "Zp", "Cs")


def _escape(character: str) -> str:
    try:
        return quote(character, safe="")
    except UnicodeEncodeError as error:
        raise ValueError(f"{character!r} is not valid Unicode text") from error


def _refuse(name: str, key: str, size: int) -> Iterator[RowBatch]:
    raise DataError(
        name,
        f"its key, which begins with {key[:40]!r}, has {size:,} bytes as a partition key of "
        f"Dagster, and a database may have no room for more than {MOST_BYTES:,}",
        "Give it a shorter key.",
    )
