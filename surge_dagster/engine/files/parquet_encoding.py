"""The parts of Parquet files that this project writes itself: pages, what describes them, and the footer.

Only what format 1 needs: plain values, data pages of version 1 with checksums, strings that are never null, and one
list of numbers, never null either (https://parquet.apache.org/docs/file-format/). Numbers and structs are in Thrift's
compact protocol: a field is a byte with its distance from the field before it and its type (5 and 6 whole numbers,
8 bytes, 9 a list, 12 a struct), then its value; a list begins with its length and its type.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

MAGIC = b"PAR1"
# https://github.com/apache/parquet-format: enum Type, enum CompressionCodec
_INT64, FLOAT, _BYTE_ARRAY, FIXED_LENGTH = 2, 4, 6, 7
UNCOMPRESSED, ZSTD = 0, 6


@dataclass(frozen=True, slots=True)
class Frame:
    """What the footers of files with the same columns share.

    Attributes:
        schema: the footer's beginning, up to the number of rows.
        end: its end, with what the writer says of itself, from the last entry of the metadata on.
    """

    schema: bytes
    end: bytes


@dataclass(slots=True)
class ColumnChunk:
    """A column's pages in one row group, while they are counted.

    Attributes:
        place: of the first page in the file, in bytes.
        size, plain_size: of its pages with their headers, as they are stored and before they were compressed.
    """

    place: int
    pages: int = 0
    size: int = 0
    plain_size: int = 0

    @classmethod
    def of_page(cls, place: int, header: bytes, size: int) -> ColumnChunk:
        """One page, uncompressed."""
        return cls(place, 1, len(header) + size, len(header) + size)

    def add(self, header: bytes, plain: int, stored: int) -> None:
        """Count a page with so many bytes behind its header."""
        self.pages += 1
        self.size += len(header) + stored
        self.plain_size += len(header) + plain


def page_header(plain: int, stored: int, checksum: int, values: int) -> bytes:
    """PageHeader: a data page, both its sizes, its checksum, and (a struct) its values and their encodings."""
    parts = (number(plain), number(stored), checksum_number(checksum), number(values))
    return b"\x15\x00\x15%b\x15%b\x15%b\x1c\x15%b\x15\x00\x15\x06\x15\x06\x1c\x00\x00\x00" % parts


@lru_cache(maxsize=256)
def list_levels(rows: int, dimension: int) -> tuple[bytes, int]:
    """Repetition and definition levels of so many lists in a page, each behind its length, and their checksum."""
    repetitions = _repetition_levels(rows, dimension)
    definitions = _run(rows * dimension, 1)
    levels = b"".join(len(part).to_bytes(4, "little") + part for part in (repetitions, definitions))
    return levels, zlib.crc32(levels)


def _repetition_levels(rows: int, dimension: int) -> bytes:
    """A zero where a list begins and ones up to the next: eight at a time bit by bit, or a run of at least eight."""
    if dimension == 1:
        return _run(rows, 0)
    if dimension >= 16:  # a list is one group of eight and one run
        return (b"\x03\xfe" + _run(dimension - 8, 1)) * rows
    parts: list[bytes] = []
    groups = bytearray()
    place, total = 0, rows * dimension
    while place < total:
        ones = min(-place % dimension, total - place)
        if ones >= 8 or (ones == total - place and not groups):
            parts += (_literals(groups), _run(ones, 1))
            groups.clear()
            place += ones
            continue
        eight = range(place, min(place + 8, total))
        groups.append(sum((index % dimension != 0) << index - place for index in eight))
        place += 8
        if len(groups) == 63:
            parts.append(_literals(groups))
            groups.clear()
    parts.append(_literals(groups))
    return b"".join(parts)


def _run(values: int, level: int) -> bytes:
    return varint(values << 1) + bytes([level])


def _literals(groups: bytearray) -> bytes:
    return varint(len(groups) << 1 | 1) + groups if groups else b""


def plain_column(name: bytes, codec: int, rows: int, chunk: ColumnChunk, string_bytes: int | None) -> bytes:
    """ColumnChunk of strings that have so many bytes together, or of 64-bit integers."""
    path = _list_head(1, 8) + with_length(name)
    if string_bytes is None:
        return _column(path, _INT64, codec, rows, chunk)
    sizes = b"\x3c\x16" + number(string_bytes) + b"\x19\x06\x19\x06\x00"
    return _column(path, _BYTE_ARRAY, codec, rows, chunk, sizes)


def vector_column(kind: int, rows: int, dimension: int, chunk: ColumnChunk) -> bytes:
    """ColumnChunk of embeddings."""
    values = rows * dimension
    levels = b"\x3c\x29\x26%b%b\x19\x26\x00%b\x00" % (number(rows), number(values - rows), number(values))
    return _column(_EMBEDDING_PATH, kind, UNCOMPRESSED, values, chunk, levels)


def _column(path: bytes, kind: int, codec: int, values: int, chunk: ColumnChunk, sizes: bytes = b"") -> bytes:
    """ColumnChunk and its ColumnMetaData: plain pages.

    Args:
        path: a list with its head.
        sizes: SizeStatistics, where pyarrow writes them.
    """
    kind_and_path = b"\x26\x00\x1c\x15%b\x19%%\x06\x00\x19%b" % (number(kind), path)
    lengths = (number(codec), number(values), number(chunk.plain_size), number(chunk.size), number(chunk.place))
    counts = b"\x15%b\x16%b\x16%b\x16%b\x26%b" % lengths
    pages = b"\x49\x1c\x15\x00\x15\x00\x15%b\x00" % number(chunk.pages)
    return b"".join((kind_and_path, counts, pages, sizes, b"\x00\x00"))


def row_group(columns: Sequence[bytes], chunks: Iterable[ColumnChunk], rows: int) -> bytes:
    """RowGroup: its columns, both its sizes, its rows and where it begins."""
    first, *others = chunks
    plain, stored = first.plain_size, first.size
    for chunk in others:
        plain += chunk.plain_size
        stored += chunk.size
    head, numbers = _list_head(len(columns), 12), (number(plain), number(rows), number(first.place), number(stored))
    return b"".join((b"\x19", head, *columns, b"\x16%b\x16%b\x26%b\x16%b\x00" % numbers))


def file_end(frame: Frame, rows: int, row_groups: Sequence[bytes], entries: Mapping[bytes, bytes]) -> bytes:
    """What follows the pages: the footer (FileMetaData), its length and the mark of the format."""
    parts = [frame.schema, b"\x16", number(rows), b"\x19", _list_head(len(row_groups), 12), *row_groups]
    parts += (b"\x19", _list_head(len(entries) + 1, 12))
    for key, value in entries.items():
        parts += (_entry_key(key), varint(len(value)), value, b"\x00")
    parts.append(frame.end)
    footer = b"".join(parts)
    return b"".join((footer, len(footer).to_bytes(4, "little"), MAGIC))


def footer_of(file: bytes) -> bytes:
    """The footer at the end of a file."""
    return file[-8 - int.from_bytes(file[-8:-4], "little") : -8]


def frame_end(last_entry: tuple[bytes, bytes], writer: bytes, columns: int) -> bytes:
    """The end of a footer: the last entry of its metadata, who wrote the file, the order of each column."""
    key, value = last_entry
    orders = _list_head(columns, 12) + b"\x1c\x00\x00" * columns
    return b"%b%b\x00\x18%b\x19%b\x00" % (_entry_key(key), with_length(value), with_length(writer), orders)


@cache
def _entry_key(key: bytes) -> bytes:
    return b"\x18" + with_length(key) + b"\x18"


@cache
def _list_head(length: int, kind: int) -> bytes:
    return bytes([length << 4 | kind]) if length < 15 else bytes([0xF0 | kind]) + varint(length)


def with_length(value: bytes) -> bytes:
    """Bytes behind their length."""
    return varint(len(value)) + value


@lru_cache(maxsize=16_384)  # most numbers come again in the next file
def number(value: int) -> bytes:
    """A signed number: zigzag (its sign last), then seven bits a byte."""
    return varint(value << 1 if value >= 0 else (-value << 1) - 1)


def checksum_number(value: int) -> bytes:
    """A checksum as a signed number of 32 bits; hardly one comes again, so none is kept."""
    folded = (value << 1 if value < 1 << 31 else ~(value << 1)) & 0xFFFFFFFF
    if folded >> 28:
        return bytes(
            (
                folded & 127 | 128,
                folded >> 7 & 127 | 128,
                folded >> 14 & 127 | 128,
                folded >> 21 & 127 | 128,
                folded >> 28,
            )
        )
    return varint(folded)


@lru_cache(maxsize=1024)
def varint(value: int) -> bytes:
    """A number that is not negative, seven bits a byte, the lowest first."""
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


_EMBEDDING_PATH = _list_head(3, 8) + with_length(b"embedding") + with_length(b"list") + with_length(b"item")
