"""Parquet files of a source: what their footers declare, and how many rows may be read at a time."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from surge_dagster.engine.sources.nested import select
from surge_dagster.engine.sources.partition import KEY_METADATA, SOURCE_VERSION_METADATA
from surge_dagster.engine.sources.rows import DEFAULT_MAX_TEXT_BYTES
from surge_dagster.engine.support.columns import value_lengths
from surge_dagster.engine.support.unreadable import UNREADABLE

_BATCH_BYTES = 2 * 1024 * 1024
_BATCH_ROWS = 8192
# What a read may decode where a few bytes stand for many: rows share a dictionary's entry, or the
# beginning of a text.
_DECODED_BYTES = 16 * 1024 * 1024
# What reading a row group takes of its uncompressed size: a page may hold all of it, compressed and
# uncompressed, and its long texts may come in one batch (measured: 3.0).
_COPIES = 3
# pyarrow holds a column of a dictionary type as pages, builders and chunks (measured: 5.7)
_DICTIONARY_COPIES = 6
# of a row group: of more, the longest value that rows may share is looked up
_UNSEEN_BYTES = 256 * 1024
_VERSION_BYTES = 250  # a database index has room for little
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # some databases refuse NUL


@dataclass(frozen=True, slots=True)
class Footer:
    """Facts from a file's footer that a listing needs; the version and key are those that the file
    declares.

    Attributes:
        row_bytes: of all columns, uncompressed.
        group_bytes: memory that reading the largest row group may take.
    """

    version: str | None
    key: str | None
    rows: int
    row_bytes: int
    group_bytes: int


def read_footer(file: pa.NativeFile) -> Footer:
    """What the footer of an open file says; raises one of `UNREADABLE` where it cannot be read."""
    footer = pq.read_metadata(file)
    declared = footer.metadata or {}
    # Of all columns, as an estimate of the texts: see `unreadable` for why not of the text column
    # alone.
    group_bytes = [
        footer.row_group(group).total_byte_size for group in range(footer.num_row_groups)
    ]
    version, key = (
        declared[name].decode("utf-8", "replace") if name in declared else None
        for name in (SOURCE_VERSION_METADATA, KEY_METADATA)
    )
    copies = (
        _DICTIONARY_COPIES if _has_dictionaries(declared.get(b"ARROW:schema", b"")) else _COPIES
    )
    most = copies * max(group_bytes, default=0)
    return Footer(version and _recordable(version), key, footer.num_rows, sum(group_bytes), most)


def row_group_rows(file: pa.NativeFile) -> list[int]:
    """The rows of each row group of an open file; raises as `read_footer`."""
    footer = pq.read_metadata(file)
    return [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]


@lru_cache(maxsize=64)  # the files of a catalog have few schemas
def _has_dictionaries(arrow_schema: bytes) -> bool:
    """Whether the Arrow schema in a footer has columns of a dictionary type, such as categoricals
    of pandas."""
    try:
        schema = pa.ipc.read_schema(pa.BufferReader(base64.b64decode(arrow_schema)))
    except (*UNREADABLE, ValueError):
        return False
    return any(pa.types.is_dictionary(field.type) for field in schema)


def _recordable(version: str) -> str:
    """A declared version as any database can keep it: one that is long or has control characters
    ends in a digest."""
    raw = version.encode()
    if len(raw) <= _VERSION_BYTES and not _CONTROL.search(version):
        return version
    return f"{_CONTROL.sub('?', version[:40])}~{hashlib.sha256(raw).hexdigest()[:32]}"


def rows_per_read(
    reader: pq.ParquetFile, source: pa.NativeFile, columns: list[str], group: int
) -> int:
    """How many rows of a row group of the open file `source` to read at once, so that what is
    decoded is bounded."""
    facts = reader.metadata.row_group(group)
    stored = max(1, facts.total_byte_size)
    # The mean deceives where rows share what is stored once; a text is still no longer than all
    # that is stored.
    longest = stored if stored <= _UNSEEN_BYTES else _longest_shared(reader, source, columns, group)
    # rows with a longer text are refused in any case
    least = _DECODED_BYTES // DEFAULT_MAX_TEXT_BYTES
    return max(
        1,
        min(
            _BATCH_ROWS,
            _BATCH_BYTES * facts.num_rows // stored,
            max(least, _DECODED_BYTES // longest),
        ),
    )


def _longest_shared(
    reader: pq.ParquetFile, source: pa.NativeFile, columns: list[str], group: int
) -> int:
    """The bytes of a row whose every value is the longest of those that are stored once for many
    rows, or more."""
    schema, facts, longest = reader.metadata.schema, reader.metadata.row_group(group), 1
    places = {schema.column(place).path: place for place in range(reader.metadata.num_columns)}
    options: Any = {
        "read_dictionary": columns,
        "buffer_size": 1 << 20,
        "page_checksum_verification": True,
    }
    try:
        with pq.ParquetFile(
            source, metadata=reader.metadata, pre_buffer=False, **options
        ) as dictionaries:
            first = next(
                dictionaries.iter_batches(1, row_groups=[group], columns=columns, use_threads=False)
            )
            first = select(first, columns)
    except (*UNREADABLE, KeyError, StopIteration):  # reading itself reports what cannot be read
        return facts.total_byte_size
    for name, column in zip(columns, first.columns, strict=True):
        if isinstance(column, pa.DictionaryArray):
            longest += int(value_lengths(column.dictionary.cast(pa.large_binary())).max(initial=0))
            # Its texts may begin as others do. A column's facts are safe to read after its pages:
            # see `unreadable`.
            if "DELTA_BYTE_ARRAY" in facts.column(places[name]).encodings:
                return facts.total_byte_size
    return longest
