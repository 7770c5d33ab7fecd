"""Loading embeddings: the vectors of one space, as a polars LazyFrame or a pyarrow dataset.

One listing of the space's folder decides what is loaded. While a run writes to the folder, a reader
gets the same rows each time, or an error, and never vectors of two models. Checksums are compared
while rows are read: polars' own Parquet reader does not compare them (of 400 flipped bits it gave
wrong rows for 388), so the LazyFrame reads through pyarrow: files one after the other, a batch at a
time. Polars and `pyarrow.dataset`, which imports pandas, are imported when they are used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pyarrow as pa
import pyarrow.fs as fs

from surge_dagster.engine.errors import ConfigError, DataError, TransientError
from surge_dagster.engine.files.facts import FileFacts, InvalidFile
from surge_dagster.engine.files.formats import PublishedFile, file_name, open_listed, usable_file
from surge_dagster.engine.files.parquet import OutputFile
from surge_dagster.engine.files.rows import carried_columns, check_schema, embedding_type
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.current_space import space_of_readers
from surge_dagster.engine.output.freshness import Found, OutputState
from surge_dagster.engine.readers.removed_partitions import recorded_removed, without_removed
from surge_dagster.engine.store import open_store
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.counts import named
from surge_dagster.engine.support.printable import first_line
from surge_dagster.engine.support.text_hash import TEXT_HASH

if TYPE_CHECKING:
    import polars as pl
    import pyarrow.dataset as ds
_BATCH_ROWS = 16_384


class Embeddings:
    """The embeddings of one space, as they were when this was opened; made by `open_embeddings`."""

    def __init__(self, store: Store, space: Space, *, removed: bool = False) -> None:
        self.store = store
        self.space = space
        self._removed = {} if removed else recorded_removed(store, space)
        self._state = OutputState(store, space.name)

    @property
    def dimension(self) -> int:
        """Components of each vector."""
        return self.space.dimension

    @property
    def rows(self) -> int:
        """Rows of all partitions; reads the footers that are not known yet."""
        return sum(file.facts.rows for file in self._loadable())

    def keys(self) -> list[str]:
        """Return the sorted keys of the partitions that can be loaded. Reads footers."""
        return sorted(file.facts.partition_key for file in self._loadable())

    def facts(self, partition: str) -> FileFacts:
        """Return the metadata of a partition's file: rows, model, precision, versions."""
        return self.files([partition])[0].facts

    def lazy(
        self, partitions: Iterable[str] | None = None, *, text_hash: bool = False
    ) -> pl.LazyFrame:
        """Return the rows as a LazyFrame.

        Its columns are partition, id, text, truncated, the carried ones, and embedding.
        The embedding is a `pl.Array` of the dimension; of a binary space UInt8, with eight
        dimensions in each. A column that only some files have is null for the others, and one that
        no file has is left out. Only the columns that a query needs are read, and only the files
        that match a filter on `partition` alone.

        Args:
            partitions: keys in the wanted order, removed ones too; None is all of `keys`.
            text_hash: also return the column text_hash, the first 16 bytes of each text's SHA-256.

        Raises:
            ConfigError: a requested partition has no file.
            DataError: a file is damaged or belongs to another space, or ids or carried columns
                have several types. For a damaged page, collecting raises it.
            TransientError: a file was replaced or removed, or cannot be read now.
        """
        import polars as pl
        from polars.io.plugins import register_io_source

        files = self.files(partitions)
        schema = self._schema(files, text_hash, self._vectors)
        types = pl.DataFrame(pl.from_arrow(schema.empty_table())).schema

        read = partial(self._frames, files, schema)
        try:
            return register_io_source(read, schema=types, explain_name="surge-dagster embeddings")
        except pl.exceptions.PolarsError as error:
            raise ConfigError(
                f"polars does not have a type of these files: {first_line(error)}. Load them with "
                "dataset()."
            ) from error

    def _frames(
        self,
        files: Sequence[PublishedFile],
        schema: pa.Schema,
        columns: list[str] | None,
        predicate: pl.Expr | None,
        limit: int | None,
        batch_rows: int | None,
    ) -> Iterator[pl.DataFrame]:
        """Yield what polars asks for of the rows of files with these columns."""
        import polars as pl

        # Without any column a frame would not say how many rows it has.
        names = schema.names if columns is None else columns or schema.names[:1]
        needed = pa.schema([schema.field(name) for name in names])
        rows = min(_BATCH_ROWS, batch_rows or _BATCH_ROWS, limit or _BATCH_ROWS)
        if limit is None and predicate is not None:
            files = _matching(files, predicate)
        for table in _tables(self._batches(files, needed, rows), rows):
            frame = pl.DataFrame(pl.from_arrow(table))
            if limit is not None:  # rows are counted before they are filtered
                frame = frame.head(limit)
                limit -= frame.height
            if predicate is not None:
                frame = frame.filter(predicate)
            yield frame if columns is None else frame.select(columns)
            if limit == 0:
                return

    def dataset(
        self, partitions: Iterable[str] | None = None, *, text_hash: bool = False
    ) -> ds.Dataset:
        """Return the rows as a pyarrow dataset; a filter on `partition` reads only these files.

        Vectors of int8 and binary spaces are fixed-size binaries, as in the files. See `lazy` for
        arguments and errors; a damaged page raises an `OSError` when it is read.
        """
        import pyarrow.dataset as ds

        files = self.files(partitions)
        stored = embedding_type(self.dimension, self.space.dtype)
        options = ds.ParquetFragmentScanOptions(page_checksum_verification=True)
        form = ds.ParquetFileFormat(default_fragment_scan_options=options)
        filesystem = fs.PyFileSystem(_ReadOnly(self.store))
        fragments = [
            form.make_fragment(
                file.stored.name,
                filesystem,
                ds.field("partition") == file.facts.partition_key,
                file_size=file.stored.size,
            )
            for file in files
        ]
        schema = self._schema(files, text_hash, stored)
        return ds.FileSystemDataset(fragments, schema, form, filesystem)

    def each_file(self) -> dict[str, PublishedFile | DataError | TransientError]:
        """Return every file by its name in the store, or the error that makes it unusable."""
        files: dict[str, PublishedFile | DataError | TransientError] = {}
        for name, listed in self._present().items():
            try:
                files[name] = usable_file(self.store, self.space, name, listed)
            except (DataError, TransientError) as error:
                files[name] = error
        return files

    def _present(self) -> dict[str, Found | TransientError]:
        return without_removed(self._state.files(), self._removed)

    def _loadable(self) -> list[PublishedFile]:
        """Return all valid files by name; raise `TransientError` if one cannot be read now."""
        files = []
        for name, listed in self._present().items():
            if not isinstance(listed, FileNotFoundError):  # it was removed or replaced since
                with contextlib.suppress(DataError):
                    files.append(usable_file(self.store, self.space, name, listed))
        return files

    def files(self, partitions: Iterable[str] | None = None) -> list[PublishedFile]:
        """Return the files of these partitions in their order, or all of them sorted by key."""
        if isinstance(partitions, str):
            partitions = [partitions]
        keys = None if partitions is None else list(partitions)
        listed = self._present() if keys is None else self._state.files(keys)
        names = {file_name(self.space.name, key): key for key in keys or []}
        if missing := [key for name, key in names.items() if name not in listed]:
            raise ConfigError(
                f"{self.store.location(self.space.name)!r} has no embeddings of "
                f"{named(map(repr, missing), 5)}. Embed them first "
                "(`surge-dagster embed`, or materialize `embeddings`), or choose among keys()."
            )
        files = [usable_file(self.store, self.space, name, file) for name, file in listed.items()]
        return sorted(files, key=lambda file: file.facts.partition_key) if keys is None else files

    def _batches(
        self, files: Iterable[PublishedFile], needed: pa.Schema, rows: int
    ) -> Iterator[pa.RecordBatch]:
        for file in files:
            with open_listed(self.store, self.space, file) as reader:
                columns = [name for name in reader.columns.names if name in needed.names]
                for batch in reader.read(columns=columns or ["id"], batch_rows=rows):
                    yield _with_all_columns(batch, file.facts.partition_key, needed)

    @property
    def _vectors(self) -> pa.DataType:
        """The type of vectors in a LazyFrame, with bytes of int8 and binary ones as numbers."""
        stored = embedding_type(self.dimension, self.space.dtype)
        if not pa.types.is_fixed_size_binary(stored):
            return stored
        number = pa.int8() if self.space.dtype == "int8" else pa.uint8()
        return pa.list_(pa.field("item", number, nullable=False), stored.byte_width)

    def _schema(
        self, files: list[PublishedFile], text_hash: bool, vectors: pa.DataType
    ) -> pa.Schema:
        """Return the columns of the rows of several files; see `lazy`."""
        types = _common_types(files)
        fields = [pa.field("partition", pa.string())]
        fields.append(pa.field("id", types.pop("id", pa.string()), nullable=False))
        if any("text" in file.columns.names for file in files):
            fields.append(pa.field("text", pa.large_string()))
        if text_hash:
            fields.append(pa.field("text_hash", TEXT_HASH))
        fields.append(pa.field("truncated", pa.bool_(), nullable=False))
        fields += [pa.field(name, kind) for name, kind in types.items()]
        fields.append(pa.field("embedding", vectors, nullable=False))
        return pa.schema(fields)


def _common_types(files: list[PublishedFile]) -> dict[str, pa.DataType]:
    """Return the types of ids and carried columns; refuse files that differ in them, unless they
    have no rows."""
    first: dict[str, tuple[pa.DataType, str]] = {}
    for file in [file for file in files if file.facts.rows] or files:
        key = file.facts.partition_key
        for field in [file.columns.field("id"), *(carried_columns(file.columns) or ())]:
            first_type, first_key = first.setdefault(field.name, (field.type, key))
            if field.type != first_type:
                reason = (
                    f"its column {field.name!r} has type {field.type}, and that of {first_key!r} "
                    f"has type {first_type}; one table cannot have both"
                )
                raise DataError(key, reason, "Load them separately.")
    return {name: kind for name, (kind, _) in first.items()}


def open_embeddings(
    output: str | Path | Store, space: str | None = None, *, removed: bool = False
) -> Embeddings:
    """Open the embeddings of an output for loading.

    A later switch of the current space does not change what is open.

    Args:
        output: a path, URL or open store: the folder that holds the spaces.
        space: name of a space's folder; None is the current space, or the only one.
        removed: also return partitions that were removed from the source and still have files.

    Raises:
        ConfigError: there are no embeddings, no such space, or several and no current one.
    """
    store = open_store(output) if isinstance(output, (str, Path)) else output
    return Embeddings(store, space_of_readers(store, space), removed=removed)


def _matching(files: Sequence[PublishedFile], predicate: pl.Expr) -> Sequence[PublishedFile]:
    """Return the files that a filter may match: fewer only if it is on the partition alone."""
    import polars as pl

    if set(predicate.meta.root_names()) != {"partition"}:
        return files
    keys = [file.facts.partition_key for file in files]
    matching = set(pl.DataFrame({"partition": keys}).filter(predicate)["partition"])
    return [file for file in files if file.facts.partition_key in matching]


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
