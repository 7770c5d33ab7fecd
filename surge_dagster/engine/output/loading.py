"""Loading embeddings back: the vectors of one space, as a polars LazyFrame or a pyarrow dataset.

What is loaded is what one listing of the space's folder showed, and only files that say they belong there: a folder
that is being written to gives the same rows however often they are read, or an error, and vectors of two models never
come together. Checksums are compared as rows are read. Polars' own Parquet reader does not compare them (of 400 flipped
bits it gave wrong rows for 388), so the LazyFrame reads through pyarrow. Arrow files on a local disk are mapped into
memory; a dataset gives that memory itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from surge_dagster.engine.catalog import decode_key
from surge_dagster.engine.encoder.spec import Space
from surge_dagster.engine.errors import ConfigError, DataError
from surge_dagster.engine.output import open_store
from surge_dagster.engine.output.current_space import named_space, space_of_readers
from surge_dagster.engine.output.embedding_file import FileFacts, InvalidFile, check_schema
from surge_dagster.engine.output.file_formats import SUFFIXES, file_name
from surge_dagster.engine.output.freshness import PublishedFile, read_facts_and_columns
from surge_dagster.engine.output.store import Store, StoredObject
from surge_dagster.engine.output.store_filesystem import filesystem_of

if TYPE_CHECKING:
    import polars as pl
    import pyarrow.dataset as ds

PARTITION_COLUMN = "partition"
_NAMED = 5


class Embeddings:
    """The embeddings of one space, as they were when this was opened; made by `open_embeddings`.

    Args:
        store: the output.
        space: which of its spaces.
    """

    def __init__(self, store: Store, space: Space) -> None:
        self.store = store
        self.space = space
        self._files: dict[str, PublishedFile] = {}
        self._columns: dict[str, pa.Schema] = {}
        self._unusable: dict[str, str] = {}
        known: dict[bytes | pa.Schema, pa.Schema] = {}
        for stored in sorted(store.list(space.name), key=lambda stored: stored.name):
            if not stored.name.endswith(SUFFIXES[space.file_format]):
                continue
            try:
                facts, columns = self._look_at(stored, known)
            except FileNotFoundError:
                continue  # removed since it was listed
            except InvalidFile as error:
                self._unusable[stored.name] = str(error)
                continue
            self._files[facts.partition_key] = PublishedFile(stored, facts)
            self._columns[facts.partition_key] = columns
        self._files = dict(sorted(self._files.items()))

    @property
    def dimension(self) -> int:
        """Components of each vector."""
        return self.space.dimension

    @property
    def rows(self) -> int:
        """Rows of all partitions together."""
        return sum(file.facts.rows for file in self._files.values())

    def keys(self) -> list[str]:
        """The partitions that can be loaded, sorted; keys as the catalog has them."""
        return list(self._files)

    def facts(self, partition: str) -> FileFacts:
        """What a partition's file says of itself: rows, model, precision, versions, truncated texts.

        Raises:
            ConfigError, DataError: see `lazy`.
        """
        return self._chosen([partition])[0].facts

    def lazy(self, partitions: Iterable[str] | None = None) -> pl.LazyFrame:
        """The rows as a LazyFrame with the columns partition, id, text and embedding (`pl.Array` of the dimension).

        Only the columns that a query needs are read, and only the files that a filter on `partition` alone leaves.
        There is no text column when no file has one; files without it among others give null.

        Args:
            partitions: keys, in the order wanted; None is everything there is.

        Raises:
            ConfigError: a partition that was asked for has no file.
            DataError: a file among them is damaged or belongs to another space, or ids are not of one type. Collecting
                raises what reading a damaged page gives, with the partition's key in it.
        """
        # Runs that only write embeddings are spared polars.
        from surge_dagster.engine.output.lazy_frame import scan

        files = self._chosen(partitions)
        return scan(self.store, files, self._schema(files))

    def dataset(self, partitions: Iterable[str] | None = None) -> ds.Dataset:
        """The rows as a pyarrow dataset of the same columns; a filter on `partition` reads only these files.

        Args:
            partitions: keys, in the order wanted; None is everything there is.

        Raises:
            ConfigError, DataError: see `lazy`. What is damaged is an `OSError` when it is read.
        """
        import pyarrow.dataset as ds  # it imports pandas

        files = self._chosen(partitions)
        if self.space.file_format == "arrow":
            form = ds.IpcFileFormat()
        else:
            options = ds.ParquetFragmentScanOptions(page_checksum_verification=True)
            form = ds.ParquetFileFormat(default_fragment_scan_options=options)
        filesystem = filesystem_of(self.store)
        fragments = [
            form.make_fragment(
                file.stored.name,
                filesystem,
                ds.field(PARTITION_COLUMN) == file.facts.partition_key,
                file_size=file.stored.size,
            )
            for file in files
        ]
        return ds.FileSystemDataset(fragments, self._schema(files), form, filesystem)

    def _look_at(self, stored: StoredObject, known: dict[bytes | pa.Schema, pa.Schema]) -> tuple[FileFacts, pa.Schema]:
        def check(columns: pa.Schema) -> None:
            check_schema(columns, dimension=self.space.dimension, dtype=self.space.dtype)

        facts, columns = read_facts_and_columns(self.store, stored.name, known, check)
        if facts.space != self.space.name:
            raise InvalidFile(f"it holds vectors of the space {facts.space!r}; expected {self.space.name!r}")
        if self._name(facts.partition_key) != stored.name:
            raise InvalidFile(f"it is the file of partition {facts.partition_key!r}, under another name")
        return facts, columns

    def _name(self, key: str) -> str:
        return file_name(self.space.name, key, self.space.file_format)

    def _chosen(self, partitions: Iterable[str] | None) -> list[PublishedFile]:
        if partitions is None:
            for name, reason in self._unusable.items():
                raise self._refusal(name, reason, len(self._unusable) - 1)
            return list(self._files.values())
        if isinstance(partitions, str):
            partitions = [partitions]
        keys = list(dict.fromkeys(partitions))
        for key in keys:
            if key not in self._files and (reason := self._unusable.get(self._name(key))):
                raise self._refusal(self._name(key), reason, 0)
        if missing := [key for key in keys if key not in self._files]:
            more = f" and {len(missing) - _NAMED:,} more" if len(missing) > _NAMED else ""
            raise ConfigError(
                f"{self.store.location(self.space.name)!r} has no embeddings of "
                f"{', '.join(map(repr, missing[:_NAMED]))}{more}. Embed them first "
                "(`surge-dagster embed`, or materialize `embeddings`), or choose among what keys() names."
            )
        return [self._files[key] for key in keys]

    def _refusal(self, name: str, reason: str, others: int) -> DataError:
        encoded = name.removeprefix(f"{self.space.name}/").removesuffix(SUFFIXES[self.space.file_format])
        try:
            key = decode_key(encoded) or encoded
        except ValueError:
            key = encoded
        more = f" {others:,} more files cannot be loaded either." if others else ""
        return DataError(
            key,
            f"{self.store.location(name)!r} cannot be loaded: {reason}",
            f"Move it away and embed the partition again, or choose partitions without it.{more}",
        )

    def _schema(self, files: list[PublishedFile]) -> pa.Schema:
        """Of the rows of several files: partition, id, text where a file has it, embedding."""
        first: dict[pa.DataType, str] = {}
        found = {file.facts.partition_key: self._columns[file.facts.partition_key] for file in files}
        for key, columns in found.items():
            first.setdefault(columns.field("id").type, key)
        if len(first) > 1:
            (one, key), (other, its_key) = list(first.items())[:2]
            raise DataError(
                its_key,
                f"its ids are of type {other} and those of {key!r} of type {one}; one table cannot hold both",
                "Load them apart.",
            )
        empty = pa.schema([pa.field("id", pa.string(), nullable=False)])
        columns = max(found.values(), key=len, default=empty)
        vectors = pa.list_(pa.field("item", pa.from_numpy_dtype(self.space.dtype), nullable=False), self.dimension)
        return pa.schema(
            [
                pa.field(PARTITION_COLUMN, pa.string()),
                columns.field("id"),
                *([pa.field("text", pa.large_string())] if "text" in columns.names else []),
                pa.field("embedding", vectors, nullable=False),
            ]
        )


def open_embeddings(output: str | Path | Store, space: str | None = None) -> Embeddings:
    """Open what lies in an output, to load it.

    Reads one listing and the footer of each file of the space. Whatever becomes the current space afterwards, what is
    open stays with its own.

    Args:
        output: a path or URL, or a store that is open already; the folder above those of the spaces.
        space: name of a space's folder; None is the current space, or the only one.

    Raises:
        ConfigError: there are no embeddings, no such space, or several spaces of which none is current or named.
    """
    store = open_store(output) if isinstance(output, (str, Path)) else output
    return Embeddings(store, space_of_readers(store) if space is None else named_space(store, space))
