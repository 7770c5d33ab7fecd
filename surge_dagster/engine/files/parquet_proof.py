"""Pyarrow's own writer of format 1, and the proof that bytes put together here are those that it writes.

Nothing that writes Parquet in this project is trusted by itself. For each form of file (columns, types, dimension,
compression) pyarrow first writes a file of made-up rows, from which the parts are taken that all such files share;
then that file is written here as well. Unless both are equal, byte by byte, pyarrow writes the files of that form. So
a pyarrow that writes differently costs time and nothing else.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from surge_dagster.engine.files.parquet_encoding import FIXED_LENGTH, FLOAT, Frame, footer_of, frame_end

log = logging.getLogger(__name__)

WRITE_BATCH_ROWS = 1024
PAGE_BYTES = 256 * 1024
_COMPRESSED = {"id": "zstd", "text": "zstd", "embedding.list.item": "none"}
_ARROW_SCHEMA = b"ARROW:schema"
_LONG = 24
_ENTRIES = {b"surge.made_up": b"rows"}


class TableWriter(Protocol):
    """What writes tables to one file: pyarrow's `ParquetWriter`, or what takes its place."""

    is_open: bool

    def write_table(self, table: pa.Table, row_group_size: int) -> None: ...

    def add_key_value_metadata(self, key_value_metadata: Mapping[bytes, bytes]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class FileForm:
    """What files have in common that differ in their rows alone.

    Attributes:
        dtype: of the vectors; not its name, which takes numpy longer than some columns of a small file.
        compress: whether ids and texts are compressed.
    """

    id_type: pa.DataType
    dimension: int
    dtype: np.dtype
    include_text: bool
    compress: bool

    @property
    def vector_kind(self) -> int:
        """Parquet's type of the vectors' values."""
        return FLOAT if self.dtype == np.float32 else FIXED_LENGTH


def arrow_writer(sink: Any, schema: pa.Schema, *, compress: bool) -> pq.ParquetWriter:
    """Pyarrow's writer, set to format 1."""
    return pq.ParquetWriter(
        sink,
        schema,
        version="2.6",
        use_dictionary=False,
        write_statistics=False,
        compression=_COMPRESSED if compress else "none",  # pyright: ignore[reportArgumentType]
        write_page_checksum=True,
        write_batch_size=WRITE_BATCH_ROWS,
        data_page_size=PAGE_BYTES,
        use_compliant_nested_type=False,  # the list's values are called "item", as Arrow calls them
    )


class Proofs:
    """Which forms of file are proven; each is proven once in a process, when it is first asked for.

    Args:
        row_groups: rows of each row group of a form's made-up file.
        write: makes a file of tables, a row group of each.
    """

    def __init__(
        self,
        row_groups: Callable[[FileForm], Sequence[int]],
        write: Callable[[FileForm, Frame, Sequence[pa.Table], Mapping[bytes, bytes]], bytes],
    ) -> None:
        self._row_groups = row_groups
        self._write = write
        self._frames: dict[FileForm, Frame | None] = {}
        self._lock = threading.Lock()

    def frame(self, form: FileForm, schema: Callable[[], pa.Schema]) -> Frame | None:
        """What the footers of a form's files share; None where pyarrow is to write them.

        Args:
            schema: asked for the form's columns when it is to be proven.
        """
        try:
            return self._frames[form]
        except KeyError:
            pass
        with self._lock:
            if form not in self._frames:
                self._frames[form] = self._proven_or_none(form, schema())
            return self._frames[form]

    def _proven_or_none(self, form: FileForm, schema: pa.Schema) -> Frame | None:
        try:
            frame = self._proven(form, schema)
        except Exception:  # whatever another pyarrow does differently costs time and nothing else
            log.debug("what pyarrow wrote could not be taken apart", exc_info=True)
            frame = None
        if frame is None:
            log.warning(
                "%s files of dimension %d are left to pyarrow %s, which takes longer: it writes them in a form that is "
                "not known here",
                *(form.dtype, form.dimension, pa.__version__),
            )
        return frame

    def _proven(self, form: FileForm, schema: pa.Schema) -> Frame | None:
        tables = [_made_up(form, schema, rows) for rows in self._row_groups(form)]
        sink = pa.BufferOutputStream()
        writer = arrow_writer(sink, schema, compress=form.compress)
        for table in tables:
            writer.write_table(table, row_group_size=len(table))
        writer.add_key_value_metadata(_ENTRIES)
        writer.close()
        expected = sink.getvalue()
        frame = self._taken_from(expected, form, tables)
        return frame if self._write(form, frame, tables, _ENTRIES) == expected.to_pybytes() else None

    def _taken_from(self, file: pa.Buffer, form: FileForm, tables: Sequence[pa.Table]) -> Frame:
        """What a form's files share, out of one that pyarrow wrote of these tables."""
        footer = pq.read_metadata(pa.BufferReader(file))
        last_entry = (_ARROW_SCHEMA, footer.metadata[_ARROW_SCHEMA])
        end = frame_end(last_entry, footer.created_by.encode(), tables[0].num_columns)
        without_schema = footer_of(self._write(form, Frame(b"", end), tables, _ENTRIES))
        return Frame(footer_of(file.to_pybytes()).removesuffix(without_schema), end)


def _made_up(form: FileForm, schema: pa.Schema, rows: int) -> pa.Table:
    names = [f"row {row} of {rows}" for row in range(rows)]
    columns = [pa.array(range(rows) if pa.types.is_int64(form.id_type) else names, form.id_type)]
    if form.include_text:
        # long enough for two pages where a row group has rows enough for two
        columns.append(
            pa.array([name * (_LONG if rows > WRITE_BATCH_ROWS else 1) for name in names], pa.large_string())
        )
    values = (np.arange(rows * form.dimension) % 2048).astype(form.dtype)  # float16 has all of these
    columns.append(pa.FixedSizeListArray.from_arrays(pa.array(values), type=schema.field("embedding").type))
    return pa.Table.from_arrays(columns, schema=schema)
