"""The rows of a CSV file: its header, and blocks that end where a row does."""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO

import pyarrow as pa
import pyarrow.csv as pacsv

from surge_dagster.engine.support.unreadable import visible

_DELIMITERS = (",", ";", "\t", "|")
_LONGEST_ROW = 8 * 1024 * 1024
_SHOWN = 60  # bytes of a row, in a message
_ASCII = bytes(min(byte, 127) for byte in range(256))


def csv_header(head: bytes, columns: Sequence[str]) -> tuple[str, list[str]]:
    """The delimiter and the columns of a CSV file: the first delimiter with which all needed
    columns are there."""
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


def csv_blocks(
    stream: BinaryIO,
    delimiter: str,
    columns: int,
    problem: Callable[[str, str], Exception],
    block_bytes: int,
) -> Iterator[bytes]:
    """Blocks of whole rows, the header among them.

    pyarrow's own reader of streams accepts a quote that is never closed, and reads ahead on a
    thread: one that is in the code of a stream of Python's when the process ends, hangs or aborts
    it.
    """
    rest, piece = b"", b"\n"
    while piece:
        piece = stream.read(block_bytes)
        block = rest + (piece or b"\n")
        end = _whole_rows(block, delimiter, columns)
        if end:
            yield block[:end]
        rest = block[end:]
        if len(rest) > _LONGEST_ROW or (rest and not piece):
            begin = visible(rest[:_SHOWN].decode("utf-8", "replace"))
            raise problem(
                f"has a quote that is never closed, or a row of more than {_LONGEST_ROW:,} bytes, where it says "
                f"{begin!r}",
                "Close the quote, or write such rows as JSON lines or Parquet.",
            )


def _whole_rows(block: bytes, delimiter: str, columns: int) -> int:
    """Where the last row of a block begins that may go on behind it, asked of pyarrow's parser."""
    if b'"' not in block:
        return 1 + max(block.rfind(b"\n"), block.rfind(b"\r"))
    # This makes the last row invalid, within quotes or not, and of an invalid row pyarrow says the
    # text.
    added = 2 * (b'"' + delimiter.encode() * (columns + 1))
    last = [0]

    def skip(row: pacsv.InvalidRow) -> str:
        last[0] = len(row.text)
        return "skip"

    # Texts of invalid rows must be UTF-8; what is no ASCII does not matter for where rows begin.
    content = pa.BufferReader(block.translate(_ASCII) + added)
    options = pacsv.ReadOptions(
        use_threads=False,
        block_size=content.size() + 1,
        column_names=[str(place) for place in range(columns)],
    )
    parse = pacsv.ParseOptions(
        delimiter=delimiter, newlines_in_values=True, invalid_row_handler=skip
    )
    convert = pacsv.ConvertOptions(include_columns=["0"], column_types={"0": pa.string()})
    pacsv.read_csv(content, options, parse, convert)
    return content.size() - last[0]
