"""Loading embeddings: the vectors of one space, as a polars LazyFrame or a pyarrow dataset.

One listing of the space's folder decides what is loaded, and only files whose facts name the space
are. While a run writes to the folder, a reader gets the same rows each time, or an error, and never
vectors of two models. Checksums are compared while rows are read. Polars' own Parquet reader does
not compare them (of 400 flipped bits it gave wrong rows for 388), so the LazyFrame reads through
pyarrow.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from surge_dagster.engine.errors import ConfigError, DataError, TransientError
from surge_dagster.engine.files.facts import FileFacts
from surge_dagster.engine.files.formats import PublishedFile, file_name
from surge_dagster.engine.files.opening import usable_file
from surge_dagster.engine.files.rows import carried_columns, embedding_type
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.current_space import named_space, space_of_readers
from surge_dagster.engine.output.freshness import Found, OutputState
from surge_dagster.engine.readers.removed_partitions import recorded_removed, without_removed
from surge_dagster.engine.readers.tables import as_dataset, as_lazy_frame
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
        self._files = OutputState(store, space.name)

    @property
    def dimension(self) -> int:
        """Components of each vector."""
        return self.space.dimension

    @property
    def rows(self) -> int:
        """Rows of all partitions together; reads the footers that are not known yet."""
        return sum(file.facts.rows for file in self._loadable())

    def keys(self) -> list[str]:
        """The partitions that can be loaded, sorted; keys as the catalog has them. Reads footers,
        as `rows` does."""
        return sorted(file.facts.partition_key for file in self._loadable())

    def facts(self, partition: str) -> FileFacts:
        """What a partition's file states about itself: rows, model, precision, versions, truncated
        texts."""
        return self._chosen([partition])[0].facts

    def lazy(
        self, partitions: Iterable[str] | None = None, *, text_hash: bool = False
    ) -> pl.LazyFrame:
        """The rows as a LazyFrame with the columns partition, id, text and embedding (`pl.Array` of
        the dimension; of a binary space UInt8, with eight dimensions in each).

        Carried columns of the source stand before the embedding, null from files without them. Only
        the columns that a query needs are read, and only the files that match a filter on
        `partition` alone. There is no text column when no file has one; where some files have one,
        the others give null.

        Args:
            partitions: keys, in the requested order, removed ones too; None is every partition that
                `keys` gives.
            text_hash: also give the column text_hash, 16 bytes of BLAKE2b of each text.

        Raises:
            ConfigError: a requested partition has no file.
            DataError: a file among them is damaged or belongs to another space, or ids or carried
                columns are not of one type. For a damaged page, collecting raises it.
            TransientError: a file among them was replaced or removed since it was listed, or cannot
                be read now.
        """
        files = self._chosen(partitions)
        return as_lazy_frame(
            self.store, self.space, files, self._schema(files, text_hash, self._vectors)
        )

    def dataset(
        self, partitions: Iterable[str] | None = None, *, text_hash: bool = False
    ) -> ds.Dataset:
        """The rows as a pyarrow dataset of the same columns; a filter on `partition` reads only
        these files.

        Vectors of int8 and binary spaces are fixed-size binaries, as in the files.

        Args:
            partitions, text_hash: see `lazy`.

        Raises:
            ConfigError, DataError, TransientError: see `lazy`. A damaged page raises an `OSError`
                when it is read. A footer in which one column has fewer values than the others does
                so only where two columns are read together: pyarrow counts no rows, and `lazy`
                does.
        """
        files = self._chosen(partitions)
        stored = embedding_type(self.dimension, self.space.dtype)
        return as_dataset(self.store, files, self._schema(files, text_hash, stored))

    def each_file(self) -> dict[str, PublishedFile | DataError | TransientError]:
        """Every file that is not left out, by its name in the store: usable, or what is wrong with
        it."""
        files: dict[str, PublishedFile | DataError | TransientError] = {}
        for name, listed in self._present().items():
            try:
                files[name] = usable_file(self.store, self.space, name, listed)
            except (DataError, TransientError) as error:
                files[name] = error
        return files

    def _present(self) -> dict[str, Found | TransientError]:
        return without_removed(self._files.files(), self._removed)

    def _loadable(self) -> list[PublishedFile]:
        """All files that can be loaded, sorted by name; raises `TransientError` where one cannot be
        read now."""
        files = []
        for name, listed in self._present().items():
            if not isinstance(listed, FileNotFoundError):  # it was removed or replaced since
                with contextlib.suppress(DataError):
                    files.append(usable_file(self.store, self.space, name, listed))
        return files

    def _chosen(self, partitions: Iterable[str] | None) -> list[PublishedFile]:
        """The files of these partitions in their order, or all of them sorted by key; refuses what
        cannot be loaded."""
        if isinstance(partitions, str):
            partitions = [partitions]
        keys = None if partitions is None else list(partitions)
        listed = self._present() if keys is None else self._files.files(keys)
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
        """The type of vectors in a LazyFrame, where the bytes of int8 and binary ones are lists of
        numbers."""
        stored = embedding_type(self.dimension, self.space.dtype)
        if not pa.types.is_fixed_size_binary(stored):
            return stored
        number = pa.int8() if self.space.dtype == "int8" else pa.uint8()
        return pa.list_(pa.field("item", number, nullable=False), stored.byte_width)

    def _schema(
        self, files: list[PublishedFile], text_hash: bool, vectors: pa.DataType
    ) -> pa.Schema:
        """Of the rows of several files: partition, id, text where a file has it, text_hash on
        request, embedding."""
        first: dict[str, tuple[pa.DataType, str]] = {}
        columns_of = {file.facts.partition_key: file.columns for file in files}
        for key, columns in columns_of.items():
            for field in [columns.field("id"), *(carried_columns(columns) or ())]:
                first_type, first_key = first.setdefault(field.name, (field.type, key))
                if field.type != first_type:
                    its, those = (
                        ("ids are", "those")
                        if field.name == "id"
                        else (f"column {field.name!r} is", "that")
                    )
                    types = f"its {its} of type {field.type} and {those} of {first_key!r} of type {first_type}"
                    raise DataError(key, f"{types}; one table cannot hold both", "Load them apart.")
        id_type, _ = first.pop("id", (pa.string(), ""))
        has_text = any("text" in columns.names for columns in columns_of.values())
        return pa.schema(
            [
                pa.field("partition", pa.string()),
                pa.field("id", id_type, nullable=False),
                *([pa.field("text", pa.large_string())] if has_text else []),
                *([pa.field("text_hash", TEXT_HASH)] if text_hash else []),
                *(pa.field(name, kind) for name, (kind, _) in first.items()),
                pa.field("embedding", vectors, nullable=False),
            ]
        )


def open_embeddings(
    output: str | Path | Store, space: str | None = None, *, removed: bool = False
) -> Embeddings:
    """Open the embeddings of an output for loading.

    Lists the space once; the footers of the chosen partitions are read when they are needed.
    A later switch of the current space does not change what is open.

    Args:
        output: a path, URL or open store: the folder that holds the spaces.
        space: name of a space's folder; None is the current space, or the only one.
        removed: whether to give partitions too that were removed from the source and still have
            files.

    Raises:
        ConfigError: there are no embeddings, no such space, or several spaces of which none is
            current or named.
    """
    store = open_store(output) if isinstance(output, (str, Path)) else output
    return Embeddings(
        store,
        space_of_readers(store) if space is None else named_space(store, space),
        removed=removed,
    )
