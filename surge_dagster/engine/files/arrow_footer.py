"""The end of an Arrow file: where its record batches lie, what the file says of itself, and checksums of everything.

Arrow's file format has no checksums, so the file brings its own. It is taken as parts that follow each other without a
gap: what lies before the first record batch, each batch's header and each batch's body, and the end mark with the
footer's head. Their lengths and CRC-32 stand in `surge.checksums`, among the facts that the metadata digest guards.

    ARROW1  schema | header | body | header | body | … | end mark, footer's head | footer's metadata  length  ARROW1

Pyarrow takes a footer's metadata when it begins to write a file, and checksums are known at its end. So the footer is
put together here (a FlatBuffers table, https://arrow.apache.org/docs/format/Columnar.html, `File.fbs`): the schema is
copied from pyarrow's own message, so that nothing needs to be known of it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import pyarrow as pa

from surge_dagster.engine.files.embedding_file import FORMAT, FileFacts, InvalidFile, facts_of, guarded_metadata
from surge_dagster.engine.support.unreadable import UNREADABLE, first_line

BEGINNING = b"ARROW1\0\0"
END_MARK = b"\xff\xff\xff\xff\0\0\0\0"
CHECKSUMS = b"surge.checksums"
TRAILER_BYTES = 10
MESSAGE_PREFIX_BYTES = 8
_MAGIC = b"ARROW1"
_VERSION_5 = 4
_TABLE = 20
_BLOCKS = 56  # the first multiple of eight after the table and the (empty) list of dictionaries, and a length
_KEY_VALUE_LAYOUT = struct.pack("<4H", 8, 12, 4, 8)


@dataclass(frozen=True, slots=True)
class Part:
    """So many bytes of a file, and their CRC-32."""

    length: int
    checksum: int


@dataclass(frozen=True, slots=True)
class Block:
    """Where a record batch lies in a file, in bytes; the header counts from where its message begins."""

    offset: int
    header: int
    body: int


@dataclass(frozen=True, slots=True)
class ArrowEnd:
    """What the end of a file says, found whole.

    Attributes:
        parts: from the file's first byte up to `content`.
        content: the rest of the file, from the end mark on.
        reader: of the footer alone.
    """

    facts: FileFacts
    parts: tuple[Part, ...]
    content: bytes
    reader: pa.RecordBatchFileReader

    @property
    def schema(self) -> pa.Schema:
        """Of the rows; put together when it is asked for, which whoever wants facts alone does not."""
        return self.reader.schema


@lru_cache(maxsize=64)
def schema_message(schema: pa.Schema) -> bytes:
    """A schema as it stands at the beginning of a file."""
    return schema.serialize().to_pybytes()


def end_of_file(schema: pa.Schema, blocks: Sequence[Block], parts: Sequence[Part], facts: FileFacts) -> bytes:
    """What follows the last record batch.

    Args:
        blocks: of all record batches.
        parts: the file up to here.
    """
    head = END_MARK + footer_head(schema, blocks)
    checksums = " ".join(f"{part.length:x}:{part.checksum:08x}" for part in (*parts, part_of(head)))
    metadata = _metadata(guarded_metadata(facts, FORMAT, {CHECKSUMS: checksums.encode()}))
    footer = len(head) - len(END_MARK) + len(metadata)
    return b"".join((head, metadata, footer.to_bytes(4, "little"), _MAGIC))


def part_of(content: bytes | pa.Buffer | memoryview) -> Part:
    """A part with its checksum."""
    return Part(len(content), zlib.crc32(content))


def footer_head(schema: pa.Schema, blocks: Sequence[Block]) -> bytes:
    """The footer up to its metadata, which are said to begin where this ends."""
    message = schema_message(schema)
    flat = message[MESSAGE_PREFIX_BYTES:]
    schema_at = _BLOCKS + 24 * len(blocks)
    end = schema_at + len(flat)
    # Places are counted from the field that names them.
    table = struct.pack(
        "<ihxxIIII",
        _TABLE - 4,  # back to the layout
        _VERSION_5,
        schema_at + _schema_table(flat) - (_TABLE + 8),
        44 - (_TABLE + 12),
        _BLOCKS - 4 - (_TABLE + 16),
        end - (_TABLE + 20),
    )
    layout = struct.pack("<7Hxx", 14, 24, 4, 8, 12, 16, 20)
    lists = struct.pack("<IxxxxI", 0, len(blocks))
    listed = b"".join([struct.pack("<qixxxxq", block.offset, block.header, block.body) for block in blocks])
    return b"".join((_TABLE.to_bytes(4, "little"), layout, table, lists, listed, flat))


def end_bytes(end: bytes, file_bytes: int) -> int:
    """How many of a file's last bytes say everything, as the very last ones tell.

    Raises:
        InvalidFile: they are no end of an Arrow file, or the footer does not fit into the file.
    """
    if end[-len(_MAGIC) :] != _MAGIC:
        raise InvalidFile("it does not end as an Arrow file does: it was cut off, or is something else")
    length = int.from_bytes(end[-TRAILER_BYTES : -len(_MAGIC)], "little")
    if not 0 < length <= file_bytes - TRAILER_BYTES - len(BEGINNING) - len(END_MARK):
        raise InvalidFile(f"its footer is said to take {length:,} bytes of {file_bytes:,}, which cannot be")
    return len(END_MARK) + length + TRAILER_BYTES


def read_end(content: bytes, file_bytes: int) -> ArrowEnd:
    """Read a file's end.

    Args:
        content: its last bytes, as many as `end_bytes` says.

    Raises:
        InvalidFile: it was not written by this format, or was changed since.
    """
    try:
        reader = pa.ipc.open_file(pa.BufferReader(content))
        entries = {key: value for key, value in (reader.metadata or {}).items() if key.startswith(b"surge.")}
    except UNREADABLE as error:
        raise InvalidFile(f"its footer cannot be read ({first_line(error)})") from error
    facts = facts_of(entries, FileFacts, FORMAT)
    parts = _parts(entries)
    if not parts or sum(part.length for part in parts[:-1]) != file_bytes - len(content):
        raise InvalidFile(f"its metadata describe another length than its {file_bytes:,} bytes")
    if part_of(content[: parts[-1].length]) != parts[-1]:
        raise InvalidFile("its footer does not match its checksum: it was changed after it was written")
    return ArrowEnd(facts, parts[:-1], content, reader)


def _parts(entries: Mapping[bytes, bytes]) -> tuple[Part, ...]:
    try:
        pairs = [entry.split(b":") for entry in entries[CHECKSUMS].split()]
        return tuple([Part(int(length, 16), int(checksum, 16)) for length, checksum in pairs])
    except (KeyError, ValueError) as error:
        raise InvalidFile(f"its metadata are incomplete ({error})") from error


@lru_cache(maxsize=64)
def _schema_table(flat: bytes) -> int:
    """Where the table `Schema` lies in pyarrow's message: the third field of its first table."""
    [message] = struct.unpack_from("<I", flat, 0)
    [back] = struct.unpack_from("<i", flat, message)
    [place] = struct.unpack_from("<H", flat, message - back + 8)
    [forward] = struct.unpack_from("<I", flat, message + place)
    return message + place + forward


def _metadata(entries: Mapping[bytes, bytes]) -> bytes:
    """A list of pairs: places of the pairs, the layout that they share, the pairs, and the strings they point to."""
    count = len(entries)
    layout = 4 + 4 * count
    first = layout + len(_KEY_VALUE_LAYOUT)
    place = first + 12 * count
    pairs: list[bytes] = []
    strings: list[bytes] = []
    for number, pair in enumerate(entries.items()):
        at = first + 12 * number
        places = []
        for value in pair:
            places.append(place)
            string = len(value).to_bytes(4, "little") + value + b"\0"
            string += b"\0" * (-len(string) % 4)
            strings.append(string)
            place += len(string)
        pairs.append(struct.pack("<iII", at - layout, places[0] - at - 4, places[1] - at - 8))
    offsets = [first + 12 * number - 4 * (number + 1) for number in range(count)]
    return b"".join((struct.pack(f"<{count + 1}I", count, *offsets), _KEY_VALUE_LAYOUT, *pairs, *strings))
