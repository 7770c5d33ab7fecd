"""JSON lines as record batches.

A column has the type of its values in the first block, and a value of another type later is
refused: with a type guessed for each block, one partition would get numbers and the next strings.
"""

from __future__ import annotations

import io
import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.json as pajson

from surge_dagster.engine.sources.file_read import BLOCK_BYTES, FileRead
from surge_dagster.engine.sources.nested import nested_fields, select
from surge_dagster.engine.sources.partition import row_in_words
from surge_dagster.engine.support.unreadable import first_line

_LONGEST_LINE = 64 * 1024 * 1024
_TYPES = (pa.string(), pa.bool_(), pa.int64(), pa.float64())
_LARGE_INTEGER = re.compile(r"couldn't parse:\s*-?\d+(?: in row \d+)?$")
_IN_ROW = re.compile(r" in row (\d+)$")
_VALUE_BEGINS = re.compile(r"\S")
_BEFORE_VALUE = b"\xef\xbb\xbf \t\r\n"
_DECODER = json.JSONDecoder(parse_int=str)  # an integer may have any number of digits
_Path = tuple[str, ...]


def read_json(request: FileRead) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file with one JSON object per line."""
    with request.decompressed() as stream:
        remedy = "Convert it, for example with: iconv -f UTF-16 -t UTF-8 OLD > NEW."
        if request.head(stream, remedy).lstrip().startswith(b"["):
            raise request.refused(
                "is one JSON array; expected one object per line",
                "Convert it, for example with: jq -c '.[]' OLD > NEW.",
            )
        blocks = _blocks(request, stream)
        first = next(blocks, b"")
        schema = _schema(request, first)
        yield request.empty(schema)

        first_row = 0
        for block in chain([first] if first else [], blocks):
            batch = _parsed(request, block, schema, first_row)
            first_row += len(batch)
            yield select(batch, request.columns)


def _blocks(request: FileRead, stream: io.BufferedReader) -> Iterator[bytes]:
    """Yield blocks of whole lines."""
    rest = b""
    piece = stream.read(BLOCK_BYTES)
    while piece:
        following = stream.read(BLOCK_BYTES)
        end = piece.rfind(b"\n") + 1 if following else len(piece)
        if end:
            yield rest + piece[:end]
            rest = piece[end:]
        else:
            rest += piece
        if len(rest) > _LONGEST_LINE:
            reason = f"has a line of more than {_LONGEST_LINE:,} bytes"
            raise request.refused(reason, "Write one object per line.")
        piece = following
    if rest.strip():
        yield rest


def _schema(request: FileRead, block: bytes) -> pa.Schema:
    """Return the schema of the wanted columns, from the objects of the first block."""
    columns = request.columns
    paths = {name: (name,) for name in columns}
    if block:
        paths = _paths_in(block, columns)
    request.require_columns(list(paths))
    for name in columns:
        path = paths[name]
        inner = [paths[other] for other in columns if other != name]
        if any(other[: len(path)] == path for other in inner):
            reason = f"has objects in {name!r}, which are not read as a whole"
            raise request.refused(reason, "Name the needed fields of them.")
    types = {paths[name]: _type_of(block, paths[name]) for name in columns}
    return pa.schema(nested_fields(types))


def _paths_in(block: bytes, wanted: Sequence[str]) -> dict[str, _Path]:
    """Return the names in the objects of a block, with dots for fields, and the path of each.

    Reading ends when all wanted columns are found. An object ends where it does for pyarrow, which
    may be in the middle of a line; lines that Python cannot parse are skipped.
    """
    paths: dict[str, _Path] = {}
    missing = set(wanted)
    text = block.decode("utf-8-sig", "replace")
    place = 0
    while missing and (start := _VALUE_BEGINS.search(text, place)):
        try:
            document, place = _DECODER.raw_decode(text, start.start())
            for path in sorted(_paths(document), key=len):
                paths.setdefault(".".join(path), path)
        except (ValueError, AttributeError, RecursionError):
            place = text.find("\n", start.start()) + 1 or len(text)
        missing -= paths.keys()
    return dict(sorted(paths.items(), key=lambda item: len(item[1])))


def _paths(document: dict[str, Any], above: _Path = ()) -> Iterator[_Path]:
    for name, value in document.items():
        path = (*above, name)
        yield path
        if isinstance(value, dict):
            yield from _paths(value, path)


def _type_of(block: bytes, path: _Path) -> pa.DataType:
    """Return the type of a column: that of all its values, else that of its first ones."""
    rows_before_other: dict[pa.DataType, int] = {}
    for kind in _TYPES:
        reason = _error_of(block, pa.schema(nested_fields({path: kind})))
        if reason is None:
            return kind
        if pa.types.is_integer(kind) and _LARGE_INTEGER.search(reason):
            return kind  # as a floating-point number it would be another one
        row = _IN_ROW.search(reason)
        rows_before_other[kind] = int(row[1]) if row else 0
    return max(rows_before_other, key=lambda kind: rows_before_other[kind])


def _parsed(request: FileRead, block: bytes, schema: pa.Schema, first_row: int) -> pa.RecordBatch:
    try:
        table = _read(block, schema)
    except pa.ArrowInvalid as error:
        row = row_in_words(first_row + _first_wrong_row(block, schema))
        reason = _IN_ROW.sub("", first_line(error))
        raise request.refused(
            f"cannot be read at {row} ({reason}); the types of its columns are those of its first "
            "values",
            "Write each value of a column with the same type, for example all ids in quotes, "
            "lists and objects as strings, and one object per line.",
        ) from error
    if not table.num_rows:
        return request.empty(schema)
    return table.combine_chunks().to_batches()[0]


def _first_wrong_row(block: bytes, schema: pa.Schema) -> int:
    lines = [line for line in block.split(b"\n") if line.strip()]

    def is_wrong_until(row: int) -> bool:
        return _error_of(b"\n".join(lines[: row + 1]), schema) is not None

    return bisect_left(range(len(lines) - 1), True, key=is_wrong_until)


def _read(block: bytes, schema: pa.Schema) -> pa.Table:
    first = block.lstrip(_BEFORE_VALUE)
    if first.startswith(b"null"):  # pyarrow ends the process if a block begins with null
        block = b"{}" + first.removeprefix(b"null")
    if not block:
        return schema.empty_table()
    options = pajson.ReadOptions(use_threads=False, block_size=len(block) + 1)
    parse = pajson.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    return pajson.read_json(pa.BufferReader(block), options, parse)


def _error_of(block: bytes, schema: pa.Schema) -> str | None:
    try:
        _read(block, schema)
    except pa.ArrowInvalid as error:
        return first_line(error)
    return None
