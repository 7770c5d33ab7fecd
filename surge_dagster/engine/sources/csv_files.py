"""CSV files as record batches. All values are strings: the format has no types, and "007" is not 7.

pyarrow's own reader of streams accepts a quote that is never closed, and reads ahead on a thread
that may hang or abort the process when it ends. So a file is cut into blocks of whole rows here,
and each block is parsed by pyarrow.
"""

from __future__ import annotations

import contextlib
import csv
import io
import re
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO

import pyarrow as pa
import pyarrow.csv as pacsv

from surge_dagster.engine.errors import SurgeError
from surge_dagster.engine.sources.file_read import BLOCK_BYTES, FileRead
from surge_dagster.engine.sources.partition import row_in_words
from surge_dagster.engine.support.keys import is_text
from surge_dagster.engine.support.unreadable import first_line, visible

_DELIMITERS = (",", ";", "\t", "|")
_LONGEST_ROW = 8 * 1024 * 1024
_SHOWN = 60  # bytes of a row, in a message
_ASCII = bytes(min(byte, 127) for byte in range(256))
_ENCODING = "Set encoding to that of its text, such as cp1252 or utf-16."
_QUOTE = (
    "Give that row as many values as the header has, those with a delimiter, quote or newline "
    "in quotes."
)
_ROW = re.compile(r"Row #(\d+)")  # of a block, counted from 1, in pyarrow's message


def read_csv(request: FileRead) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a CSV file in any of the usual delimiters."""
    try:
        with request.decompressed(request.encoding) as stream:
            yield from _rows(request, stream)
    except UnicodeError as error:
        reason = f"is not text in {request.encoding} ({first_line(error)})"
        raise request.refused(reason, _ENCODING) from error


def _rows(request: FileRead, stream: io.BufferedReader) -> Iterator[pa.RecordBatch]:
    columns = request.columns
    delimiter, names = _header(request, stream)
    yield request.empty(pa.schema([(name, pa.string()) for name in columns]))

    # pyarrow accepts only UTF-8 names, and columns that nobody reads may have others.
    names = [name if name in columns else "\0" for name in names]
    parse = pacsv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    # Texts that are not UTF-8 refuse their own partition later, when their row is known.
    types = dict.fromkeys(columns, pa.string())
    convert = pacsv.ConvertOptions(check_utf8=False, include_columns=columns, column_types=types)
    done = 0

    def unfinished(reason: str, remedy: str) -> SurgeError:
        return request.refused(f"{reason} in {row_in_words(max(0, done - 1))}", remedy)

    for block in _blocks(stream, delimiter, len(names), unfinished):
        # pyarrow skips empty lines, and takes a mark at the beginning of a block for a file's.
        content = pa.BufferReader(b"\n" + block if done else block)
        size = content.size() + 1
        options = pacsv.ReadOptions(use_threads=False, block_size=size, column_names=names)
        try:
            table = pacsv.read_csv(content, options, parse, convert)
        except pa.ArrowInvalid as error:
            reason = first_line(error)
            if (found := _ROW.search(reason)) is not None:
                row = row_in_words(done + int(found[1]) - 2)
                reason = reason.replace(found[0], row, 1)
            raise request.refused(f"cannot be read ({reason})", _QUOTE) from error
        header_rows = 0 if done else 1
        yield from table.slice(header_rows).combine_chunks().to_batches()
        done += len(table)


def _header(request: FileRead, stream: io.BufferedReader) -> tuple[str, list[str]]:
    """Return the delimiter and the columns of a file that has all wanted columns."""
    head = request.head(stream, _ENCODING)
    if not head.strip():
        raise request.refused("is empty", "Write its header, or remove it.")
    delimiter, names = _parsed_header(head, request.columns)
    is_complete = set(request.columns) <= set(names)
    if not is_complete and not all(map(is_text, names)):
        raise request.refused("has a header that is not UTF-8 text", _ENCODING)
    request.require_columns(names)
    return delimiter, names


def _parsed_header(head: bytes, columns: Sequence[str]) -> tuple[str, list[str]]:
    """Use the first delimiter with which all wanted columns are there, else the one with most."""
    text = head.decode("utf-8", "surrogateescape")
    headers: dict[str, list[str]] = {}
    for delimiter in _DELIMITERS:
        with contextlib.suppress(csv.Error, StopIteration):
            rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
            headers[delimiter] = next(row for row in rows if row)
    for delimiter, names in headers.items():
        if set(columns) <= set(names):
            return delimiter, names
    delimiter = max(headers, key=lambda each: len(headers[each]), default=",")
    return delimiter, headers.get(delimiter, [])


def _blocks(
    stream: BinaryIO, delimiter: str, columns: int, unfinished: Callable[[str, str], Exception]
) -> Iterator[bytes]:
    """Yield blocks of whole rows; the first one begins with the header."""
    rest = b""
    is_last = False
    while not is_last:
        piece = stream.read(BLOCK_BYTES)
        is_last = not piece
        block = rest + (piece or b"\n")
        end = _end_of_rows(block, delimiter, columns)
        if end:
            yield block[:end]
        rest = block[end:]
        if len(rest) > _LONGEST_ROW or (rest and is_last):
            begin = visible(rest[:_SHOWN].decode("utf-8", "replace"))
            raise unfinished(
                f"has a quote that is never closed, or a row of more than {_LONGEST_ROW:,} bytes, "
                f"at {begin!r}",
                "Close the quote, or write such rows as JSON lines or Parquet.",
            )


def _end_of_rows(block: bytes, delimiter: str, columns: int) -> int:
    """Return where the last row of a block begins that may go on in the next block."""
    if b'"' not in block:
        return 1 + max(block.rfind(b"\n"), block.rfind(b"\r"))
    # pyarrow's parser decides. What is appended makes the last row invalid, within quotes or not,
    # and pyarrow gives the text of an invalid row to the handler.
    appended = 2 * (b'"' + delimiter.encode() * (columns + 1))
    last_row_bytes = 0

    def skip(row: pacsv.InvalidRow) -> str:
        nonlocal last_row_bytes
        last_row_bytes = len(row.text)
        return "skip"

    # Texts of invalid rows must be UTF-8; other characters do not matter for where rows begin.
    content = pa.BufferReader(block.translate(_ASCII) + appended)
    names = [str(place) for place in range(columns)]
    size = content.size() + 1
    options = pacsv.ReadOptions(use_threads=False, block_size=size, column_names=names)
    parse = pacsv.ParseOptions(
        delimiter=delimiter, newlines_in_values=True, invalid_row_handler=skip
    )
    convert = pacsv.ConvertOptions(include_columns=["0"], column_types={"0": pa.string()})
    pacsv.read_csv(content, options, parse, convert)
    return content.size() - last_row_bytes
