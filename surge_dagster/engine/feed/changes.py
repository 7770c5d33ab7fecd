"""The change feed: what changed in each partition since a consumer last confirmed.

Each changed partition comes as record batches with the columns op, partition, and those of its file
without text_hash:

    clear    remove every row of the partition; the row has no id
    put      insert the row, or replace the one that is there
    delete   remove the row; it has only its id

Rows are those of the partition's present file, and change files name the ones that the consumer
needs. No id comes twice. A consumer that is new to a partition, or for which a change file is
missing or damaged, gets `clear` and every row. A partition without a file is only a `clear`.

Delivery is at least once: a consumer that dies before it confirms gets the same changes again, and
applying them twice does no harm.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from surge_dagster.engine.errors import (
    ConfigError,
    DataError,
    StoreUnavailable,
    SurgeError,
    TransientError,
)
from surge_dagster.engine.files.facts import InvalidFile
from surge_dagster.engine.files.formats import PublishedFile, file_name, open_listed
from surge_dagster.engine.files.parquet import OutputFile
from surge_dagster.engine.readers.loading import Embeddings, open_embeddings
from surge_dagster.engine.run.change_feed import (
    MOST_IDS,
    ChangeFile,
    ChangeFiles,
    confirm_versions,
    confirmed_versions,
    forget_elsewhere,
)
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.unreadable import UNREADABLE, is_systems, not_given

log = logging.getLogger(__name__)

_BATCH_BYTES = 4 * 1024 * 1024
_BATCH_ROWS = 4096
_UNKNOWN = ""  # version of a partition of which the consumer may have any rows
_OPERATION = pa.field("op", pa.string(), nullable=False)


class Changes:
    """What changed for one consumer, by one listing of the output; made by `changes`.

    Attributes:
        is_new: whether the consumer has confirmed nothing here. Its target must then be emptied
            first, because what it holds is of another space, or unknown.
    """

    def __init__(
        self, embeddings: Embeddings, consumer: str | None, since: Mapping[str, str] | None
    ) -> None:
        self.store = embeddings.store
        self.space = embeddings.space
        self.consumer = consumer
        if since is None and consumer is not None:
            since = confirmed_versions(self.store, self.space.name, consumer)
        self._since = dict(since or {})
        self.is_new = not any(self._since.values())
        if self.is_new and consumer is not None:
            forget_elsewhere(self.store, self.space.name, consumer)
        self._read: dict[str, str | None] = {}
        # In this order: a change file is written before the file that it leads to.
        self._listed = embeddings.each_file()
        self._files = ChangeFiles(self.store, self.space.name)

    def __iter__(self) -> Iterator[PartitionChanges]:
        """Yield the changed partitions by the names of their files; removed ones last."""
        self._announce()
        mine = {file_name(self.space.name, key): key for key in self._since}
        for name, file in self._listed.items():
            if not isinstance(file, PublishedFile):
                yield PartitionChanges(self, mine.get(name, name), None, file)
            elif self._since.get(file.facts.partition_key) != file.facts.rows_version:
                yield PartitionChanges(self, file.facts.partition_key, file)
        for name, key in mine.items():
            if name not in self._listed:
                yield PartitionChanges(self, key, None)

    @property
    def columns(self) -> pa.Schema | None:
        """Columns of all files, each with its type in the first one; None without files."""
        fields: dict[str, pa.Field] = {}
        schemas = {id(file.columns): file.columns for file in self._present().values()}
        for schema in schemas.values():
            for column in _batch_schema(schema).remove(0):
                fields.setdefault(column.name, column)
        if not fields:
            return None
        fields["embedding"] = fields.pop("embedding")  # the last one
        return pa.schema(list(fields.values()))

    @property
    def versions(self) -> dict[str, str]:
        """The version of each partition that the consumer has when it applied what was read."""
        versions: dict[str, str | None] = self._since | self._read
        return {key: version for key, version in versions.items() if version is not None}

    def _announce(self) -> None:
        """Record the partitions that are new to a consumer: if it dies, it has a part of them."""
        new = dict.fromkeys(sorted(self._present().keys() - self._since.keys()), _UNKNOWN)
        self._since |= new
        if new and self.consumer is not None:
            confirm_versions(self.store, self.space.name, self.consumer, self._since)

    def confirm(self) -> None:
        """Record durably that every partition that was read to its end is applied.

        Each call writes one small object. If that fails, the same changes come again.
        """
        if self.consumer is None:
            raise ConfigError(
                "only a named consumer can confirm. Give changes(…, consumer=…), or keep its "
                "versions yourself."
            )
        confirm_versions(self.store, self.space.name, self.consumer, self.versions)

    def forget(self, partitions: Iterable[str]) -> None:
        """Give these partitions whole the next time."""
        self._read |= dict.fromkeys(partitions, _UNKNOWN)

    def files(self) -> dict[str, PublishedFile]:
        """Return the files, by key, whose rows the consumer has (see `versions`)."""
        versions = self.versions
        files = self._present().items()
        return {key: file for key, file in files if versions.get(key) == file.facts.rows_version}

    def _present(self) -> dict[str, PublishedFile]:
        files = [file for file in self._listed.values() if isinstance(file, PublishedFile)]
        return {file.facts.partition_key: file for file in files}

    def vectors(
        self, sample: Sample | None = None
    ) -> Iterator[tuple[str, pa.RecordBatch | DataError | TransientError]]:
        """Yield ids and embeddings of the rows that the consumer has, or of a random sample.

        Each item is the key of a partition with some of its rows, or with the error of reading.
        """
        files = self.files()
        keys = sorted(key for key, file in files.items() if file.facts.rows)
        if sample is not None:
            random.shuffle(keys)
        drawn = 0
        for key in keys:
            if sample is not None and drawn >= sample.rows:
                return
            try:
                with open_listed(self.store, self.space, files[key]) as reader:
                    for batch in _vectors_of(reader, sample):
                        drawn += len(batch)
                        yield key, batch
            except StoreUnavailable:
                raise
            except (DataError, TransientError) as error:
                yield key, error


@dataclass(frozen=True, slots=True)
class Sample:
    """How many rows `Changes.vectors` draws, about, and at most of one partition."""

    rows: int
    of_partition: int


def _vectors_of(reader: OutputFile, sample: Sample | None) -> Iterator[pa.RecordBatch]:
    """Yield ids and embeddings of a file; of a sample some rows of one row group."""
    columns = ["id", "embedding"]
    if sample is None:
        yield from reader.read(columns=columns)
        return
    group = random.randrange(reader.groups)
    batches = reader.read(columns=columns, groups=[group])
    rows = pa.Table.from_batches(batches).combine_chunks()
    places = random.sample(range(len(rows)), min(sample.of_partition, len(rows)))
    yield from rows.take(pa.array(sorted(places))).to_batches()


@dataclass(frozen=True, slots=True, eq=False)
class PartitionChanges:
    """What changed in one partition: its key, or the name of a file that cannot be read."""

    feed: Changes
    partition: str
    _file: PublishedFile | None
    _error: SurgeError | None = None

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Yield its changes in the order in which to apply them, a few megabytes at a time.

        Raises:
            DataError: its file is damaged. Other partitions can be read.
            TransientError: its file was replaced, or cannot be read now; call `changes` again.
        """
        if self._error is not None:
            raise self._error
        if self._file is None:
            yield _clear(_batch_schema(pa.schema([("id", pa.string())])), self.partition)
            self.feed._read[self.partition] = None
            return
        with open_listed(self.feed.store, self.feed.space, self._file) as reader:
            known = self._known_changes(reader)
            schema = _batch_schema(reader.columns)
            if known is None:
                yield _clear(schema, self.partition)
                for batch in _given_rows(reader):
                    yield _batch(schema, self.partition, "put", batch)
            else:
                yield from self._changed_rows(reader, schema, known)
        self.feed._read[self.partition] = self._file.facts.rows_version

    def _known_changes(self, reader: OutputFile) -> pa.Array | None:
        """Return the ids that changed since the consumer's version; None if that is unknown."""
        before = self.feed._since.get(self.partition)
        if not before:
            return None
        chain = self.feed._files.chain(before, reader.facts.rows_version)
        if chain is None:
            return None
        try:
            return self._read_chain(chain, reader.columns.field("id").type)
        except (InvalidFile, *UNREADABLE) as error:
            # Giving a partition whole is expensive: an error that may pass does not lead to it.
            if is_systems(error) and not isinstance(error, FileNotFoundError):
                raise not_given("a change file", error, self.partition) from error
            message = "partition %r is given whole: a change file cannot be used: %s"
            log.warning(message, self.partition, error)
            return None

    def _read_chain(self, chain: list[ChangeFile], id_type: pa.DataType) -> pa.Array | None:
        ids: list[pa.Array] = []
        for file in chain:
            changed = self.feed._files.read(file)
            if len(changed) and changed.type != id_type:
                return None
            ids += changed.chunks
            if sum(map(len, ids)) > MOST_IDS:
                return None
        return pa.concat_arrays([pa.array([], id_type), *ids]).unique()

    def _changed_rows(
        self, reader: OutputFile, schema: pa.Schema, known: pa.Array
    ) -> Iterator[pa.RecordBatch]:
        """Yield the changed rows of the file, and then the deleted ids."""
        is_present = np.zeros(len(known), np.bool_)
        for batch in _given_rows(reader):
            places = pc.index_in(batch.column("id"), value_set=known)  # pyright: ignore[reportAttributeAccessIssue]
            is_present[places.drop_null().to_numpy()] = True
            changed = batch.filter(places.is_valid())
            if len(changed):
                yield _batch(schema, self.partition, "put", changed)

        deleted = known.filter(pa.array(~is_present))
        for start in range(0, len(deleted), _BATCH_ROWS):
            ids = deleted[start : start + _BATCH_ROWS]
            yield _batch(schema, self.partition, "delete", pa.record_batch({"id": ids}))


def changes(
    output: str | Path | Store,
    consumer: str | None = None,
    *,
    since: Mapping[str, str] | None = None,
    space: str | None = None,
) -> Changes:
    """Open the change feed of an output for one consumer.

        feed = changes("embeddings", consumer="shop-search")
        for partition in feed:
            for batch in partition:
                apply(batch)  # op, partition, id, …, embedding
        feed.confirm()

    Args:
        output: a path, URL or open store: the folder that holds the spaces.
        consumer: a name of your choice, under which the output keeps what it has confirmed. Two
            processes must not use one name at the same time.
        since: the version of each partition that the consumer has (`Changes.versions` of the last
            time), if it keeps them itself instead of the output.
        space: name of a space's folder; None is the current space, or the only one.
    """
    if consumer is None and since is None:
        raise ConfigError(
            "the consumer is missing. Give consumer= with a name, or since= with the versions that "
            "it has; {} for none."
        )
    if consumer == "":
        raise ConfigError("the name of a consumer must not be empty.")
    return Changes(open_embeddings(output, space), consumer, since)


def _given_rows(reader: OutputFile) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file, a few megabytes at a time if rows are about equally large."""
    columns = [name for name in reader.columns.names if name != "text_hash"]
    size = sum(reader.group_bytes(group) for group in range(reader.groups))
    batch_rows = reader.facts.rows * _BATCH_BYTES // max(1, size)
    yield from reader.read(columns=columns, batch_rows=max(1, min(_BATCH_ROWS, batch_rows)))


def _batch_schema(columns: pa.Schema) -> pa.Schema:
    given = (column.with_nullable(True) for column in columns if column.name != "text_hash")
    return pa.schema([_OPERATION, pa.field("partition", pa.string(), nullable=False), *given])


def _clear(schema: pa.Schema, partition: str) -> pa.RecordBatch:
    no_id = pa.nulls(1, schema.field("id").type)
    return _batch(schema, partition, "clear", pa.record_batch({"id": no_id}))


def _batch(
    schema: pa.Schema, partition: str, operation: str, rows: pa.RecordBatch
) -> pa.RecordBatch:
    """Return a batch of the feed from rows of the file, with the id; missing columns are null."""
    count = len(rows)
    columns = [pa.repeat(operation, count), pa.repeat(partition, count)]
    for name, kind in list(zip(schema.names, schema.types, strict=True))[2:]:
        columns.append(rows.column(name) if name in rows.schema.names else pa.nulls(count, kind))
    return pa.RecordBatch.from_arrays(columns, schema=schema)
