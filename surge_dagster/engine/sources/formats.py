"""The formats of source files as streams of record batches: Parquet, Arrow IPC, CSV and JSON lines.

CSV and JSON lines may be compressed (`.gz`, `.zst`). Every reader holds a few megabytes at a time, whatever a file
expands to. Values of a CSV file are strings, since the format has no types and "007" is not 7. A column of JSON lines
has the type that its first values have, and another type later is an error: guessing anew for each block would give
one partition numbers and the next one strings.
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
import pyarrow.csv as pacsv
import pyarrow.json as pajson
import pyarrow.parquet as pq

from surge_dagster.engine.errors import ConfigError, DataError, SurgeError, TransientError
from surge_dagster.engine.sources.csv_blocks import csv_blocks, csv_header
from surge_dagster.engine.sources.endings import ENDING
from surge_dagster.engine.sources.listing import SourceFile
from surge_dagster.engine.sources.nested import (
    names_with_fields,
    nested_fields,
    outer_columns,
    select,
)
from surge_dagster.engine.sources.parquet_files import rows_per_read
from surge_dagster.engine.sources.partition import row_in_words, within
from surge_dagster.engine.sources.rows import small, together
from surge_dagster.engine.support.keys import is_text
from surge_dagster.engine.support.unreadable import (
    UNREADABLE,
    first_line,
    is_systems,
    not_given,
    visible,
)

_CODECS = {"gz": "gzip", "zst": "zstd"}
_HEAD_BYTES = 256 * 1024  # in which the header of a CSV file ends
_BLOCK_BYTES = 2 * 1024 * 1024
_LONGEST_ROW = 64 * 1024 * 1024
_BODY_BYTES = 256 * 1024 * 1024  # of an Arrow record batch, which is read as a whole
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"
_MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
_QUOTE = "Give that row as many values as the header has, those with a delimiter, quote or newline in quotes."
_ENCODING = "Set encoding to that of its text, such as cp1252 or utf-16."
_JSON_TYPES = (pa.string(), pa.bool_(), pa.int64(), pa.float64())
_LARGE_INTEGER = re.compile(r"couldn't parse:\s*-?\d+(?: in row \d+)?$")
_VALUE_BEGINS = re.compile(r"\S")
_BEFORE_VALUE = b"\xef\xbb\xbf \t\r\n"
_DECODER = json.JSONDecoder(parse_int=str)  # an integer may have any number of digits
_IN_ROW = re.compile(r" in row (\d+)$")
_CSV_ROW = re.compile(r"Row #(\d+)")  # of a block, counted from 1, in what pyarrow says


def batches(
    file: SourceFile,
    columns: Sequence[str],
    *,
    key: str | None = None,
    encoding: str = "utf-8",
    rows: tuple[int, int] | None = None,
) -> Iterator[pa.RecordBatch]:
    """The rows of a file, in its order, as batches of a few megabytes; at least one batch, which may be empty.

    Args:
        columns: also those inside of structs and of objects, such as `doc.title`.
        key: the partition that the whole file belongs to, None for a file of a table.
        encoding: of CSV files, as Python names it.
        rows: of a Parquet file, where the rows to read begin and end; None is all of them.

    Raises:
        DataError, ConfigError: the file cannot be read; the first where it has a key.
        TransientError: its storage does not give it, or it was replaced meanwhile.
    """
    problem, columns = _Problem(file, key), list(columns)
    if file.refusal:
        raise problem(file.refusal, "Replace it by a regular file, or remove it.")
    ending = ENDING.search(file.relative)
    if ending is None:
        endings = "parquet, arrow, csv or jsonl, the last two also with .gz or .zst"
        raise problem(
            "is of an unknown format", f"Give it an ending that says its format: {endings}."
        )
    kind = next(name for name in ("parquet", "arrow", "csv", "json") if ending[name])
    try:
        if kind in ("parquet", "arrow"):
            yield from (
                _parquet(file, columns, problem, rows)
                if kind == "parquet"
                else _arrow(file, columns, problem)
            )
        else:
            codec = _CODECS.get((ending["packed"] or "").lower())
            read = _csv if kind == "csv" else _json
            with (
                file.open() as opened,
                pa.CompressedInputStream(opened, codec) if codec else opened as stream,
            ):
                if kind == "csv" and encoding != "utf-8":
                    stream = pa.transcoding_input_stream(stream, encoding, "utf-8")
                yield from read(io.BufferedReader(stream, _HEAD_BYTES), columns, problem)
    except SurgeError:
        raise
    except FileNotFoundError as error:
        raise TransientError(
            f"the file {file.shown} was removed while it was read. Run again."
        ) from error
    except (*UNREADABLE, ValueError) as error:
        if is_systems(error):
            raise not_given(file.shown, error, key) from error
        if kind == "csv" and isinstance(error, UnicodeError):
            raise problem(f"is not text in {encoding} ({first_line(error)})", _ENCODING) from error
        raise problem(
            f"cannot be read ({first_line(error)})", "Write the file again, then run again."
        ) from error


class _Problem:
    """Makes the error that refuses a file."""

    def __init__(self, file: SourceFile, key: str | None) -> None:
        self._file, self._key = file, key

    def __call__(self, reason: str, remedy: str) -> SurgeError:
        text = f"the file {self._file.shown} {reason}"
        return (
            ConfigError(f"{text}. {remedy}")
            if self._key is None
            else DataError(self._key, text, remedy)
        )

    def require(self, columns: Sequence[str], names: Sequence[str]) -> None:
        """Refuse a file that does not have each of these columns once."""
        for name in columns:
            if name not in names:
                known = ", ".join(visible(repr(each)) for each in names)
                settings = (
                    "id, text, columns and partition_by"
                    if self._key is None
                    else "id, text and columns"
                )
                remedy = f"Name the right ones with the settings {settings}."
                raise self(f"has no column {name!r}; its columns are {known}", remedy)
            if names.count(name) > 1:
                raise self(f"has two columns {name!r}", "Rename one of them.")


def _empty(schema: pa.Schema, columns: Sequence[str]) -> pa.RecordBatch:
    """A batch without rows: it says the types of a file that has none."""
    needed = outer_columns(schema.names, columns)
    empty = pa.RecordBatch.from_arrays(
        [pa.nulls(0, schema.field(name).type) for name in needed], list(needed)
    )
    return select(empty, columns)


def _parquet(
    file: SourceFile, columns: list[str], problem: _Problem, rows: tuple[int, int] | None
) -> Iterator[pa.RecordBatch]:
    with (
        file.open() as source,
        pq.ParquetFile(
            source, pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True
        ) as reader,
    ):
        problem.require(columns, names_with_fields(reader.schema_arrow))
        if not reader.metadata.num_rows:
            yield _empty(reader.schema_arrow, columns)
            return
        groups, first = list(range(reader.num_row_groups)), 0
        if rows is not None:
            read_groups = list(
                within(groups, *rows, lambda group: reader.metadata.row_group(group).num_rows)
            )
            groups, first = (
                [group for group, _, _ in read_groups],
                read_groups[0][1] if read_groups else 0,
            )
        read: Iterator[pa.RecordBatch] = (
            batch
            for group in groups
            for batch in reader.iter_batches(
                rows_per_read(reader, source, columns, group),
                row_groups=[group],
                columns=columns,
                use_threads=False,
            )
        )
        if rows is not None:
            parts = within(read, first, first + rows[1] - rows[0])
            read = (batch.slice(begin, end - begin) for batch, begin, end in parts)
        if any(pa.types.is_dictionary(kind) for kind in reader.schema_arrow.types):
            read = (piece for batch in read for piece in small(batch))
        for batch in together(read):
            yield from small(select(batch, columns))


def _arrow(file: SourceFile, columns: list[str], problem: _Problem) -> Iterator[pa.RecordBatch]:
    with file.open() as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(max(0, source.size() - len(_STREAM_END)))
        if not is_file and source.read(len(_STREAM_END)) != _STREAM_END:
            raise problem(
                "is no Arrow file, or a stream that was cut off", "Write it again, then run again."
            )
        source.seek(0)
        bounded = pa.PythonFile(_Bounded(source, problem), mode="r")
        schema = (pa.ipc.open_file if is_file else pa.ipc.open_stream)(bounded).schema
        problem.require(columns, names_with_fields(schema))
        bounded.seek(0)
        needed = outer_columns(schema.names, columns)
        options = pa.ipc.IpcReadOptions(
            included_fields=[schema.names.index(name) for name in needed]
        )
        yield _empty(schema, columns)
        if is_file:
            reader = pa.ipc.open_file(bounded, options=options)
            read = (reader.get_batch(place) for place in range(reader.num_record_batches))
        else:
            read = iter(pa.ipc.open_stream(bounded, options=options))
        for batch in read:
            batch.validate(full=False)
            yield from small(select(batch, columns))


class _Bounded:
    """A file that refuses to read a huge record batch at once: Arrow's readers have no such limit."""

    def __init__(self, file: pa.NativeFile, problem: _Problem) -> None:
        self._file, self._problem = file, problem

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, size: int) -> bytes:
        if size > _BODY_BYTES:
            raise self._problem(
                f"has a record batch of {size:,} bytes; at most {_BODY_BYTES:,} are read at once",
                "Write it in batches of fewer rows, for example write_table(table, max_chunksize=65536).",
            )
        return self._file.read(size)


def _head(stream: io.BufferedReader, problem: _Problem, remedy: str) -> bytes:
    head = stream.peek()
    encoding = _MARKS.get(head[:2]) or ("UTF-16 or binary" if b"\0" in head[:1024] else None)
    if encoding:
        raise problem(f"is not UTF-8 text but {encoding}", remedy)
    return head.removeprefix(b"\xef\xbb\xbf")


def _csv(
    stream: io.BufferedReader, columns: list[str], problem: _Problem
) -> Iterator[pa.RecordBatch]:
    head = _head(stream, problem, _ENCODING)
    if not head.strip():
        raise problem("is empty", "Write its header, or remove it.")
    delimiter, names = csv_header(head, columns)
    if not set(columns) <= set(names) and not all(map(is_text, names)):
        raise problem("has a header that is not UTF-8 text", _ENCODING)
    problem.require(columns, names)
    # pyarrow takes no other text than UTF-8
    names = [name if name in columns else "\0" for name in names]
    parse = pacsv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    # Texts that are not UTF-8 refuse their own partition later, where their row is known.
    convert = pacsv.ConvertOptions(
        check_utf8=False, include_columns=columns, column_types=dict.fromkeys(columns, pa.string())
    )
    yield _empty(pa.schema([(name, pa.string()) for name in columns]), columns)
    done = 0

    def unfinished(reason: str, remedy: str) -> SurgeError:
        # the header was read, too
        return problem(f"{reason} in {row_in_words(max(0, done - 1))}", remedy)

    for block in csv_blocks(stream, delimiter, len(names), unfinished, _BLOCK_BYTES):
        # pyarrow takes a mark at the beginning of a block for that of the file, and leaves out empty lines.
        content = pa.BufferReader(b"\n" + block if done else block)
        options = pacsv.ReadOptions(
            use_threads=False, block_size=content.size() + 1, column_names=names
        )
        try:
            table = pacsv.read_csv(content, options, parse, convert)
        except pa.ArrowInvalid as error:
            reason = _CSV_ROW.sub(
                lambda row, done=done: row_in_words(done + int(row[1]) - 2), first_line(error), 1
            )
            raise problem(f"cannot be read ({reason})", _QUOTE) from error
        yield from table.slice(0 if done else 1).combine_chunks().to_batches()
        done += len(table)


def _json(
    stream: io.BufferedReader, columns: list[str], problem: _Problem
) -> Iterator[pa.RecordBatch]:
    if (
        _head(
            stream, problem, "Convert it, for example with: iconv -f UTF-16 -t UTF-8 OLD > NEW."
        ).lstrip()[:1]
        == b"["
    ):
        raise problem(
            "is one JSON array; expected one object per line",
            "Convert it, for example with: jq -c '.[]' OLD > NEW.",
        )
    blocks = _lines(stream, problem)
    first = next(blocks, b"")
    paths = _paths_in(first, columns, problem) if first else {name: (name,) for name in columns}
    problem.require(columns, list(paths))
    for name in columns:
        if any(
            paths[name] == paths[other][: len(paths[name])] for other in columns if other != name
        ):
            raise problem(
                f"has objects in {name!r}, which are not read as a whole",
                "Name the needed fields of them.",
            )
    schema = pa.schema(
        nested_fields({paths[name]: _json_type(first, paths[name]) for name in columns})
    )
    yield _empty(schema, columns)
    first_row = 0
    for block in chain([first] if first else [], blocks):
        batch = _json_rows(block, schema, first_row, problem)
        first_row += len(batch)
        yield select(batch, columns)


def _lines(stream: io.BufferedReader, problem: _Problem) -> Iterator[bytes]:
    """Blocks of whole lines."""
    rest, piece = b"", stream.read(_BLOCK_BYTES)
    while piece:
        following = stream.read(_BLOCK_BYTES)
        end = piece.rfind(b"\n") + 1 if following else len(piece)
        if end:
            yield rest + piece[:end]
            rest = piece[end:]
        elif len(rest := rest + piece) > _LONGEST_ROW:
            raise problem(
                f"has a line of more than {_LONGEST_ROW:,} bytes", "Write one object per line."
            )
        piece = following
    if rest.strip():
        yield rest


def _paths_in(block: bytes, wanted: list[str], problem: _Problem) -> dict[str, tuple[str, ...]]:
    """The names in its objects, those inside of others with dots, and the path of each, until all wanted are found.

    An object ends where it does for pyarrow, which may be amid a line; one that Python cannot read is passed over.
    """
    paths, unread = dict[str, tuple[str, ...]](), ""
    text, place, row = block.decode("utf-8-sig", "replace"), 0, 0
    while (missing := set(wanted) - paths.keys()) and (start := _VALUE_BEGINS.search(text, place)):
        try:
            document, place = _DECODER.raw_decode(text, start.start())
            paths = {
                ".".join(path): path for path in sorted(_paths(document), key=len, reverse=True)
            } | paths
        except (ValueError, AttributeError, RecursionError) as error:
            unread = unread or f"{row_in_words(row)} ({first_line(error)})"
            place = text.find("\n", start.start()) + 1 or len(text)
        row += 1
    if missing and unread:
        reason = f"cannot be read at {unread}, and no other of its first rows has"
        remedy = "Write each row as one object that is not nested too deep, or name other columns."
        raise problem(f"{reason} {', '.join(map(repr, sorted(missing)))}", remedy)
    return dict(sorted(paths.items(), key=lambda item: len(item[1])))


def _paths(document: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in document.items():
        yield (*above, name)
        if isinstance(value, dict):
            yield from _paths(value, (*above, name))


def _json_type(block: bytes, path: tuple[str, ...]) -> pa.DataType:
    """The type of a column's values that are not null, or that of its first ones, where others differ from them."""
    first_other = dict[pa.DataType, int]()
    for kind in _JSON_TYPES:
        reason = _json_error(block, pa.schema(nested_fields({path: kind})))
        if reason is None or (pa.types.is_integer(kind) and _LARGE_INTEGER.search(reason)):
            return kind  # a large integer would be another one as a floating-point number
        row = _IN_ROW.search(reason)
        first_other[kind] = int(row[1]) if row else 0
    return max(first_other, key=lambda kind: first_other[kind])


def _read_json(block: bytes, schema: pa.Schema) -> pa.Table:
    options = pajson.ReadOptions(use_threads=False, block_size=len(block) + 1)
    parse = pajson.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    first = block.lstrip(_BEFORE_VALUE)
    if first.startswith(b"null"):  # which ends the process where a block begins with it
        block = b"{}" + first[len(b"null") :]
    return (
        pajson.read_json(pa.BufferReader(block), options, parse) if block else schema.empty_table()
    )


def _json_error(block: bytes, schema: pa.Schema) -> str | None:
    try:
        _read_json(block, schema)
    except pa.ArrowInvalid as error:
        return first_line(error)


def _json_rows(
    block: bytes, schema: pa.Schema, first_row: int, problem: _Problem
) -> pa.RecordBatch:
    try:
        table = _read_json(block, schema)
    except pa.ArrowInvalid as error:
        lines = list(filter(bytes.strip, block.split(b"\n")))
        ends = range(len(lines) - 1)
        row = bisect_left(
            ends, True, key=lambda end: bool(_json_error(b"\n".join(lines[: end + 1]), schema))
        )
        reason = f"{row_in_words(first_row + row)} ({_IN_ROW.sub('', first_line(error))})"
        raise problem(
            f"cannot be read at {reason}; the types of its columns are those of its first values",
            "Write each value of a column with the same type, for example all ids in quotes, lists and objects as "
            "strings, and one object per line.",
        ) from error
    return (
        table.combine_chunks().to_batches()[0] if table.num_rows else _empty(schema, schema.names)
    )
