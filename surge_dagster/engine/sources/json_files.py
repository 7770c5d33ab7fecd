"""JSON lines as record batches. A field that an object does not have is null.

A column has the type of its values in the first block, or of its first value after it, and a value
of another type is refused: with a type guessed for each block, one partition would get numbers and
the next strings.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from types import NoneType
from typing import Any

import pyarrow as pa

from surge_dagster.engine.sources.file_read import BLOCK_BYTES, FileRead
from surge_dagster.engine.sources.partition import row_in_words
from surge_dagster.engine.support.printable import first_line

_LONGEST_LINE = 64 * 1024 * 1024
_BLOCK_ROWS = 8192  # short objects take ten times their text
_TYPES = {str: pa.string(), bool: pa.bool_(), int: pa.int64(), float: pa.float64()}
_ONE_TYPE = (
    "Write each value of a column with the same type, for example all ids in quotes, and lists and "
    "objects as strings; name the needed fields of an object, as in doc.title."
)
_NOT_OF_TYPE = (pa.ArrowException, TypeError, OverflowError)
_Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Block:
    """Consecutive rows of a file. One that cannot be parsed is an empty object with a reason."""

    objects: list[_Object] = field(default_factory=list)
    reasons: list[str | None] = field(default_factory=list)

    def add(self, row: _Object | str) -> None:
        is_parsed = isinstance(row, dict)
        self.objects.append(row if is_parsed else {})
        self.reasons.append(None if is_parsed else row)


def read_json(request: FileRead) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file with one JSON object per line."""
    with request.decompressed() as stream:
        request.refuse_utf16(
            stream, "Convert it, for example with: iconv -f UTF-16 -t UTF-8 OLD > NEW."
        )
        blocks = _blocks(request, stream)
        first = next(blocks, _Block())
        schema = _schema(request, first)
        yield request.empty(schema)

        first_row = 0
        for block in chain([first] if first.objects else [], blocks):
            yield _batch(request, schema, first_row, block)
            first_row += len(block.objects)


def _blocks(request: FileRead, stream: io.BufferedReader) -> Iterator[_Block]:
    """Yield the rows of a few megabytes at a time; empty lines are no rows."""
    row = 0
    block = _Block()
    size = 0
    while line := stream.readline(_LONGEST_LINE + 1):
        if not row:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            continue
        block.add(_parsed(request, line, row))
        row += 1
        size += len(line)
        while len(line) > _LONGEST_LINE and not line.endswith(b"\n"):  # the rest of the row
            line = stream.readline(_LONGEST_LINE + 1)
        if size > BLOCK_BYTES or len(block.objects) == _BLOCK_ROWS:
            yield block
            block = _Block()
            size = 0
    if block.objects:
        yield block


def _parsed(request: FileRead, line: bytes, row: int) -> _Object | str:
    """Return the object of a line, or why it is set aside."""
    remedy = "Write one JSON object per line, in UTF-8."
    is_array = not row and line.lstrip().startswith(b"[")
    if is_array:
        remedy = "Convert it, for example with: jq -c '.[]' OLD > NEW."
    try:
        if len(line) > _LONGEST_LINE:
            raise ValueError(f"a line of more than {_LONGEST_LINE:,} bytes")
        document = _DECODER.decode(line.decode())
        if not isinstance(document, dict):
            raise ValueError("expected one JSON object per line")
    except (ValueError, RecursionError) as error:
        if request.sets_aside and not is_array:
            return f"the line is not a JSON object ({_problem(error)})"
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


def _schema(request: FileRead, first: _Block) -> pa.Schema:
    """Return the types of the wanted columns; null for a column that has no value in the file."""
    columns = request.columns
    types = _types(columns, first.objects)
    if first.objects and len(types) < len(columns):
        names = dict.fromkeys(types)
        with request.decompressed() as again:
            for block in _blocks(request, again):
                types = _types(columns, block.objects) | types
                for each in block.objects:
                    names |= dict.fromkeys(_names(each))
        if names or not request.sets_aside:  # without names no line has been parsed
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


def _batch(request: FileRead, schema: pa.Schema, first_row: int, block: _Block) -> pa.RecordBatch:
    arrays: list[pa.Array] = []
    for column in schema:
        values = [_value(each, column.name) for each in block.objects]
        try:
            arrays.append(_array(values, column.type))
        except _NOT_OF_TYPE as error:
            raise _refused_value(request, column, first_row, values) from error
    if request.sets_aside:
        arrays.append(pa.array(block.reasons, pa.string()))
    return pa.RecordBatch.from_arrays(arrays, request.parsed_columns)


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Return the values as a column; Arrow itself would take 1.5 for the integer 1.

    A lone surrogate makes a text that is not UTF-8, which is found later, with its row.
    """
    for found in set(map(type, values)):
        is_number = found is int and pa.types.is_floating(kind)
        if found is not NoneType and _TYPES.get(found) != kind and not is_number:
            raise TypeError(f"it is of type {found.__name__}")
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:
        raw = [value and value.encode("utf-8", "surrogatepass") for value in values]
        return pa.array(raw, pa.binary()).view(pa.string())


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
