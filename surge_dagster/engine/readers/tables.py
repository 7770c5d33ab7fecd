"""Rows of embedding files as a polars LazyFrame or as a pyarrow dataset; both compare checksums.

The LazyFrame reads files one after the other, a batch at a time. Neither reads columns that a query
does not need, or files that a filter on the partition excludes. Polars and `pyarrow.dataset`, which
imports pandas, are imported when they are used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import pyarrow as pa
import pyarrow.fs as fs

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.files.facts import InvalidFile
from surge_dagster.engine.files.formats import PublishedFile, open_listed
from surge_dagster.engine.files.parquet import OutputFile
from surge_dagster.engine.files.rows import check_schema
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.unreadable import first_line

if TYPE_CHECKING:
    import polars as pl
    import pyarrow.dataset as ds

_BATCH_ROWS = 16_384


def as_lazy_frame(
    store: Store, space: Space, files: Sequence[PublishedFile], schema: pa.Schema
) -> pl.LazyFrame:
    """Return the rows of `files` in their order; `schema` is that of the rows."""
    import polars as pl
    from polars.io.plugins import register_io_source

    types = pl.DataFrame(pl.from_arrow(schema.empty_table())).schema

    def read(
        columns: list[str] | None,
        predicate: pl.Expr | None,
        limit: int | None,
        batch_rows: int | None,
    ) -> Iterator[pl.DataFrame]:
        # Without any column a frame would not say how many rows it has.
        names = schema.names if columns is None else columns or schema.names[:1]
        needed = pa.schema([schema.field(name) for name in names])
        rows = min(_BATCH_ROWS, batch_rows or _BATCH_ROWS, limit or _BATCH_ROWS)
        kept = files
        if limit is None and predicate is not None:
            kept = _matching(files, predicate)
        for table in _tables(_batches(store, space, kept, needed, rows), rows):
            frame = pl.DataFrame(pl.from_arrow(table))
            if limit is not None:  # rows are counted before they are filtered
                frame = frame.head(limit)
                limit -= frame.height
            if predicate is not None:
                frame = frame.filter(predicate)
            yield frame if columns is None else frame.select(columns)
            if limit == 0:
                return

    try:
        return register_io_source(read, schema=types, explain_name="surge-dagster embeddings")
    except pl.exceptions.PolarsError as error:
        raise ConfigError(
            f"polars does not have a type of these files: {first_line(error)}. Load them with "
            "dataset()."
        ) from error


def _matching(files: Sequence[PublishedFile], predicate: pl.Expr) -> Sequence[PublishedFile]:
    """Return the files that a filter may match: fewer only if it is on the partition alone."""
    import polars as pl

    if set(predicate.meta.root_names()) != {"partition"}:
        return files
    keys = [file.facts.partition_key for file in files]
    matching = set(pl.DataFrame({"partition": keys}).filter(predicate)["partition"])
    return [file for file in files if file.facts.partition_key in matching]


def as_dataset(store: Store, files: Sequence[PublishedFile], schema: pa.Schema) -> ds.Dataset:
    """Return the rows of `files` in their order; a filter on `partition` reads only its files."""
    import pyarrow.dataset as ds

    options = ds.ParquetFragmentScanOptions(page_checksum_verification=True)
    form = ds.ParquetFileFormat(default_fragment_scan_options=options)
    filesystem = filesystem_of(store)
    fragments = [
        form.make_fragment(
            file.stored.name,
            filesystem,
            ds.field("partition") == file.facts.partition_key,
            file_size=file.stored.size,
        )
        for file in files
    ]
    return ds.FileSystemDataset(fragments, schema, form, filesystem)


def filesystem_of(store: Store) -> fs.FileSystem:
    """Return a store as a read-only filesystem of pyarrow, whose paths are the store's names."""
    return fs.PyFileSystem(_ReadOnly(store))


def _tables(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.Table]:
    """Join batches to `rows` or more: thousands of small partitions would be as many frames."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        held.append(batch)
        if sum(map(len, held)) >= rows:
            yield pa.Table.from_batches(held)
            held = []
    if held:
        yield pa.Table.from_batches(held)


def _batches(
    store: Store, space: Space, files: Iterable[PublishedFile], needed: pa.Schema, rows: int
) -> Iterator[pa.RecordBatch]:
    for file in files:
        with open_listed(store, space, file) as reader:
            columns = [name for name in reader.columns.names if name in needed.names]
            for batch in reader.read(columns=columns or ["id"], batch_rows=rows):
                yield _with_all_columns(batch, file.facts.partition_key, needed)


def _with_all_columns(batch: pa.RecordBatch, key: str, needed: pa.Schema) -> pa.RecordBatch:
    """Return a batch with the columns that its file does not have: the partition, and nulls."""
    columns = []
    for field in needed:
        if field.name in batch.schema.names:
            column = batch.column(field.name)
            columns.append(column if column.type == field.type else _as_lists(column, field.type))
        elif field.name == "partition":
            columns.append(pa.repeat(pa.scalar(key, field.type), len(batch)))
        else:
            columns.append(pa.nulls(len(batch), field.type))
    return pa.RecordBatch.from_arrays(columns, schema=needed)


def _as_lists(column: pa.Array, lists: pa.DataType) -> pa.Array:
    """Return bytes of vectors as lists of their numbers without a copy."""
    if not pa.types.is_fixed_size_binary(column.type):
        return column
    width = column.type.byte_width
    values = column.buffers()[1].slice(column.offset * width, len(column) * width)
    numbers = pa.Array.from_buffers(lists.value_type, len(column) * width, [None, values])
    return pa.FixedSizeListArray.from_arrays(numbers, type=lists)


def _checked(source: pa.NativeFile) -> pa.NativeFile:
    """Check the footer of a file for pyarrow's datasets, which compare only the pages' checksums.

    A damaged file is an `OSError`, as in pyarrow.
    """
    try:
        file = OutputFile(source)
        check_schema(file.columns, dimension=file.facts.dimension)  # a missing column would be null
    except InvalidFile as error:
        source.close()
        raise OSError(str(error)) from error
    source.seek(0)
    return source


class _ReadOnly(fs.FileSystemHandler):
    """Opens files; refuses everything else."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def get_type_name(self) -> str:
        return "surge-dagster"

    def normalize_path(self, path: str) -> str:
        return path

    def open_input_file(self, path: str) -> pa.NativeFile:
        return _checked(self._store.open(path))

    def open_input_stream(self, path: str) -> pa.NativeFile:
        return self.open_input_file(path)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("embeddings are opened for reading only")

    get_file_info = get_file_info_selector = create_dir = delete_dir = delete_dir_contents = (
        delete_root_dir_contents
    ) = _refuse
    delete_file = move = copy_file = open_output_stream = open_append_stream = _refuse
