"""Loading embeddings: the vectors of one space, as a polars LazyFrame or a pyarrow dataset.

One listing of the space's folder decides what is loaded. While a run writes to the folder, a reader
gets the same rows each time, or an error, and never vectors of two models. Checksums are compared
while rows are read: polars' own Parquet reader does not compare them (of 400 flipped bits it gave
wrong rows for 388), so the LazyFrame reads through pyarrow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from surge_dagster.engine.errors import ConfigError, DataError, TransientError
from surge_dagster.engine.files.facts import FileFacts
from surge_dagster.engine.files.formats import PublishedFile, file_name, usable_file
from surge_dagster.engine.files.rows import carried_columns, embedding_type
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.current_space import named_space, space_of_readers
from surge_dagster.engine.output.freshness import Found, OutputState
from surge_dagster.engine.readers.loading import as_dataset, as_lazy_frame
from surge_dagster.engine.readers.removed_partitions import recorded_removed, without_removed
from surge_dagster.engine.store import open_store
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.counts import named
from surge_dagster.engine.support.text_hash import TEXT_HASH

if TYPE_CHECKING:
    import polars as pl
    import pyarrow.dataset as ds


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
        """Return the rows as a LazyFrame: partition, id, text, carried columns and embedding.

        The embedding is a `pl.Array` of the dimension; of a binary space UInt8, with eight
        dimensions in each. A column that only some files have is null for the others, and one that
        no file has is left out. Only the columns that a query needs are read, and only the files
        that match a filter on `partition` alone.

        Args:
            partitions: keys in the wanted order, removed ones too; None is all of `keys`.
            text_hash: also return the column text_hash, 16 bytes of BLAKE2b of each text.

        Raises:
            ConfigError: a requested partition has no file.
            DataError: a file is damaged or belongs to another space, or ids or carried columns
                have several types. For a damaged page, collecting raises it.
            TransientError: a file was replaced or removed, or cannot be read now.
        """
        files = self.files(partitions)
        return as_lazy_frame(
            self.store, self.space, files, self._schema(files, text_hash, self._vectors)
        )

    def dataset(
        self, partitions: Iterable[str] | None = None, *, text_hash: bool = False
    ) -> ds.Dataset:
        """Return the rows as a pyarrow dataset; a filter on `partition` reads only these files.

        Vectors of int8 and binary spaces are fixed-size binaries, as in the files. See `lazy` for
        arguments and errors; a damaged page raises an `OSError` when it is read.
        """
        files = self.files(partitions)
        stored = embedding_type(self.dimension, self.space.dtype)
        return as_dataset(self.store, files, self._schema(files, text_hash, stored))

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
        fields += [pa.field(name, kind) for name, kind in types.items()]
        fields.append(pa.field("embedding", vectors, nullable=False))
        return pa.schema(fields)


def _common_types(files: list[PublishedFile]) -> dict[str, pa.DataType]:
    """Return the types of ids and carried columns; refuse files that differ in them."""
    first: dict[str, tuple[pa.DataType, str]] = {}
    for file in files:
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
    return Embeddings(
        store,
        space_of_readers(store) if space is None else named_space(store, space),
        removed=removed,
    )
