"""JSON lines as record batches. A field that an object does not have is null.

A column has the type of its values in the first block, or of its first value after it, and a value
of another type is refused: with a type guessed for each block, one partition would get numbers and
the next strings.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from itertools import chain
from types import NoneType
from typing import Any

import pyarrow as pa

from surge_dagster.engine.sources.file_read import BLOCK_BYTES, FileRead
from surge_dagster.engine.sources.partition import row_in_words
from surge_dagster.engine.support.unreadable import first_line

_LONGEST_LINE = 64 * 1024 * 1024
_BLOCK_ROWS = 8192  # short objects take ten times their text
_TYPES = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
_ONE_TYPE = (
    "Write each value of a column with the same type, for example all ids in quotes, and lists and "
    "objects as strings; name the needed fields of an object, as in doc.title."
)
_NOT_OF_TYPE = (pa.ArrowException, TypeError, OverflowError, UnicodeError)
_Object = dict[str, Any]


def read_json(request: FileRead) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file with one JSON object per line."""
    with request.decompressed() as stream:
        request.refuse_utf16(
            stream, "Convert it, for example with: iconv -f UTF-16 -t UTF-8 OLD > NEW."
        )
        blocks = _blocks(request, stream)
        first = next(blocks, [])
        schema = _schema(request, first)
        yield request.empty(schema)

        first_row = 0
        for block in chain([first] if first else [], blocks):
            yield _batch(request, schema, first_row, block)
            first_row += len(block)


def _blocks(request: FileRead, stream: io.BufferedReader) -> Iterator[list[_Object]]:
    """Yield the objects of a few megabytes at a time; empty lines are no rows."""
    row = 0
    block: list[_Object] = []
    size = 0
    while line := stream.readline(_LONGEST_LINE + 1):
        if not row:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            continue
        block.append(_parsed(request, line, row))
        row += 1
        size += len(line)
        if size > BLOCK_BYTES or len(block) == _BLOCK_ROWS:
            yield block
            block = []
            size = 0
    if block:
        yield block


def _parsed(request: FileRead, line: bytes, row: int) -> _Object:
    remedy = "Write one JSON object per line, in UTF-8."
    if not row and line.lstrip().startswith(b"["):
        remedy = "Convert it, for example with: jq -c '.[]' OLD > NEW."
    try:
        if len(line) > _LONGEST_LINE:
            raise ValueError(f"a line of more than {_LONGEST_LINE:,} bytes")
        document = _DECODER.decode(line.decode())
        if not isinstance(document, dict):
            raise ValueError("expected one JSON object per line")
    except (ValueError, RecursionError) as error:
        reason = f"cannot be read at {row_in_words(row)} ({_problem(error)})"
        raise request.refused(reason, remedy) from error
    return document


def _problem(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):  # its own text calls every line "line 1"
        return f"{error.msg} at character {error.pos + 1}"
    return first_line(error)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)


def _schema(request: FileRead, first: Sequence[_Object]) -> pa.Schema:
    """Return the types of the wanted columns; null for a column that has no value in the file."""
    columns = request.columns
    types = _types(columns, first)
    if first and len(types) < len(columns):
        names = dict.fromkeys(types)
        with request.decompressed() as again:
            for block in _blocks(request, again):
                types = _types(columns, block) | types
                for each in block:
                    names |= dict.fromkeys(_names(each))
        request.require_columns(list(names))
    return pa.schema([(name, types.get(name, pa.null())) for name in columns])


def _types(columns: Sequence[str], objects: Sequence[_Object]) -> dict[str, pa.DataType]:
    """Return the types of the columns that have values; of lists and objects that of strings, which
    they are refused as."""
    types: dict[str, pa.DataType] = {}
    for name in columns:
        values = (_value(each, name) for each in objects)
        kinds = list(dict.fromkeys(type(value) for value in values if value is not None))
        if kinds:
            is_number = kinds[0] is int and float in kinds
            types[name] = pa.float64() if is_number else _TYPES.get(kinds[0], pa.string())
    return types


def _value(document: _Object, name: str) -> Any:
    """Return the value of a field, or of one inside of an object, such as `doc.title`."""
    if name in document:
        return document[name]
    place = name.find(".")
    while place >= 0:
        inside = document.get(name[:place])
        if isinstance(inside, dict):
            value = _value(inside, name[place + 1 :])
            if value is not None:
                return value
        place = name.find(".", place + 1)
    return None


def _names(document: _Object, above: str = "") -> Iterator[str]:
    for name, value in document.items():
        yield above + name
        if isinstance(value, dict):
            yield from _names(value, f"{above}{name}.")


def _batch(
    request: FileRead, schema: pa.Schema, first_row: int, objects: Sequence[_Object]
) -> pa.RecordBatch:
    arrays: list[pa.Array] = []
    for column in schema:
        values = [_value(each, column.name) for each in objects]
        try:
            arrays.append(_array(values, column.type))
        except _NOT_OF_TYPE as error:
            raise _refused_value(request, column, first_row, values) from error
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return the values as a column; Arrow itself would take 1.5 for the integer 1."""
    for found in set(map(type, values)):
        is_number = found is int and pa.types.is_floating(kind)
        if found is not NoneType and _TYPES.get(found) != kind and not is_number:
            raise TypeError(f"it is of type {found.__name__}")
    return pa.array(values, kind)


def _refused_value(
    request: FileRead, column: pa.Field, first_row: int, values: Sequence[Any]
) -> Exception:
    """Return the error for the first of some values that does not have the column's type."""
    row = 0
    reason = ""
    while not reason:
        try:
            _array([values[row]], column.type)
            row += 1
        except _NOT_OF_TYPE as error:
            reason = first_line(error)
    where = row_in_words(first_row + row)
    return request.refused(
        f"cannot be read at {where}: the column {column.name!r} is {column.type} by its first "
        f"value, and this one is not ({reason})",
        _ONE_TYPE,
    )
