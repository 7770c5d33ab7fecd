"""CSV files as record batches. All values are strings: the format has no types, and "007" is not 7.

Python's reader parses rows strictly, at about 60 MB/s. pyarrow's reader is faster, but it accepts a
quote that is never closed and what follows a closing quote, and alters such texts.
"""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa

from surge_dagster.engine.sources.file_read import BLOCK_BYTES, FileRead
from surge_dagster.engine.sources.partition import row_in_words
from surge_dagster.engine.support.keys import is_text
from surge_dagster.engine.support.printable import first_line

_DELIMITERS = (",", ";", "\t", "|")
_LONGEST_ROW = 8 * 1024 * 1024
_HEADER_BYTES = 256 * 1024
_ENCODING = "Set encoding to that of its text, such as cp1252 or utf-16."
_QUOTE = (
    "Close its quotes, write a quote within quotes twice, and give the row as many values as the "
    "header has. If a backslash stands before quotes, set escape to it."
)
# Of the whole process, so that it is only ever raised.
csv.field_size_limit(max(_LONGEST_ROW, csv.field_size_limit()))


def read_csv(request: FileRead) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a CSV file in any of the usual delimiters."""
    try:
        with request.decompressed() as stream:
            delimiter, names = _header(request, stream)
            yield _batch(request.columns, [])

            errors = "surrogateescape" if request.encoding == "utf-8" else "strict"
            text = io.TextIOWrapper(stream, _codec(request), errors, newline="")
            places = [names.index(name) for name in request.columns]
            yield from _batches(request, _rows(request, text, delimiter), places)
    except UnicodeError as error:
        reason = f"is not text in {request.encoding} ({first_line(error)})"
        raise request.refused(reason, _ENCODING) from error


def _codec(request: FileRead) -> str:
    """Return the encoding of the file, whose text may begin with a mark."""
    if request.encoding == "utf-8":
        return "utf-8-sig"
    return request.encoding


def _header(request: FileRead, stream: io.BufferedReader) -> tuple[str, list[str]]:
    """Return the delimiter with which all wanted columns are there, and the columns."""
    if request.encoding == "utf-8":
        request.refuse_utf16(stream, _ENCODING)
    decoder = codecs.getincrementaldecoder(_codec(request))("surrogateescape")
    head = decoder.decode(stream.peek()[:_HEADER_BYTES])
    if not head.strip():
        raise request.refused("is empty", "Write its header, or remove it.")
    headers: dict[str, list[str]] = {}
    for delimiter in _DELIMITERS:
        lines = _unescaped(io.StringIO(head, newline=""), delimiter, request.escape)
        rows = csv.reader(lines, delimiter=delimiter)
        headers[delimiter] = next(row for row in rows if row)

    def fitness(delimiter: str) -> tuple[bool, int]:
        names = headers[delimiter]
        return set(request.columns) <= set(names), len(names)

    delimiter = max(_DELIMITERS, key=fitness)
    names = headers[delimiter]
    is_complete, _ = fitness(delimiter)
    if not is_complete and not all(map(is_text, names)):
        raise request.refused("has a header that is not UTF-8 text", _ENCODING)
    request.require_columns(names)
    return delimiter, names


def _rows(request: FileRead, text: io.TextIOWrapper, delimiter: str) -> Iterator[list[str] | str]:
    """Yield the values of each row after the header, or why it is set aside; empty lines are no
    rows."""
    lines = _unescaped(_lines(text), delimiter, request.escape)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    row = -1
    width = 0
    line = 0
    try:
        for values in reader:
            lines = reader.line_num - line
            line = reader.line_num
            if not values:
                continue
            width = width or len(values)
            if len(values) != width:
                reason = f"expected {width} values, got {len(values)}"
                if not request.sets_aside:
                    raise csv.Error(reason)
                yield f"{reason} in {lines:,} lines" if lines > 1 else reason
            elif row >= 0:
                yield values
            row += 1
    except csv.Error as error:
        raise request.refused(f"cannot be read at {row_in_words(row)} ({error})", _QUOTE) from error


def _lines(text: io.TextIOWrapper) -> Iterator[str]:
    while line := text.readline(_LONGEST_ROW):
        if len(line) == _LONGEST_ROW:
            raise csv.Error(f"a line of more than {_LONGEST_ROW:,} characters")
        yield line


def _unescaped(lines: Iterable[str], delimiter: str, escape: str | None) -> Iterator[str]:
    """Yield the lines with an escaped quote written twice and an escaped escape written once.

    Both only within quotes. Python's reader would drop every other escape character too.
    """
    if escape is None:
        yield from lines
        return
    opening = re.compile(rf'(?:^|{re.escape(delimiter)})"')
    quote_or_pair = re.compile(rf'""?|{re.escape(escape)}["{re.escape(escape)}]')
    plain = {f'{escape}"': '""', escape * 2: escape}

    is_quoted = False
    for line in lines:
        pieces: list[str] = []
        place = 0
        while found := (quote_or_pair if is_quoted else opening).search(line, place):
            token = found[0]
            pieces += (line[place : found.start()], plain.get(token, token))
            place = found.end()
            if not is_quoted or token == '"':
                is_quoted = not is_quoted
        yield "".join(pieces) + line[place:]


def _batches(
    request: FileRead, rows: Iterator[list[str] | str], places: Sequence[int]
) -> Iterator[pa.RecordBatch]:
    """Yield the values at these places of the rows, a few megabytes at a time."""
    pending: list[Sequence[str | None]] = []
    size = 0
    for values in rows:
        if isinstance(values, str):
            pending.append([*(None for _ in places), values])
            size += 64 + len(values)
        else:
            wanted = [values[place] for place in places]
            pending.append([*wanted, None] if request.sets_aside else wanted)
            size += 64 + sum(map(len, wanted))
        if size > BLOCK_BYTES:
            yield _batch(request.parsed_columns, pending)
            pending = []
            size = 0
    if pending:
        yield _batch(request.parsed_columns, pending)


def _batch(names: Sequence[str], rows: Sequence[Sequence[str | None]]) -> pa.RecordBatch:
    columns = [[row[place] for row in rows] for place in range(len(names))]
    return pa.RecordBatch.from_arrays(list(map(_strings, columns)), list(names))


def _strings(values: Sequence[str | None]) -> pa.Array:
    """Return a column of strings. One that is not UTF-8 keeps its bytes, so that only its own
    partition is refused, and with its row."""
    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError:
        raw = [value and value.encode("utf-8", "surrogateescape") for value in values]
        return pa.array(raw, pa.binary()).view(pa.string())
