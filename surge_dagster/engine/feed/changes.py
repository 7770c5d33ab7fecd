"""The change feed: what became of the rows of each partition since a consumer looked last.

Each partition that has changed comes as record batches with the columns op, partition, id, the
other columns of its file, and embedding:

    clear    remove every row of the partition; the row has no id
    add      a row that the consumer does not have: insert it, or replace it where it is there
    change   a row of which something is different: replace it, or insert it
    delete   remove the row; it has nothing but its id

Rows are those of the partition's present file, and change files (`change_files`) say which of them
the consumer needs. No id comes twice. A consumer that is new to a partition, or for which a change
file is missing or damaged, gets `clear` and every row; a partition without a file is a `clear`
alone. Applying the same changes twice does no harm, so a consumer that dies before it confirms only
repeats work, and then has the rows of the files.
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
from surge_dagster.engine.feed.change_files import MOST_IDS, ChangeFile, ChangeFiles
from surge_dagster.engine.feed.confirmations import (
    confirm_versions,
    confirmed_versions,
    forget_elsewhere,
)
from surge_dagster.engine.feed.row_comparison import ADDED
from surge_dagster.engine.files.facts import InvalidFile
from surge_dagster.engine.files.formats import PublishedFile, file_name
from surge_dagster.engine.files.opening import open_listed
from surge_dagster.engine.files.parquet import OutputFile
from surge_dagster.engine.readers.loading import Embeddings, open_embeddings
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.keys import encode_key
from surge_dagster.engine.support.unreadable import UNREADABLE, is_systems, not_given

log = logging.getLogger(__name__)

_BATCH_BYTES = 4 * 1024 * 1024
_BATCH_ROWS = 4096
_UNKNOWN = ""  # version of a partition whose rows the consumer may have, or a part of them
_NOT_GIVEN = ("text_hash",)
_OPERATION = pa.field("op", pa.string(), nullable=False)


class Changes:
    """What changed for one consumer, by one look at the output; made by `changes`.

    Attributes:
        is_new: whether the consumer has confirmed nothing here: whatever its target holds has to go
            before anything is applied, because it is of another space, or unknown.
    """

    def __init__(
        self, embeddings: Embeddings, consumer: str | None, since: Mapping[str, str] | None
    ) -> None:
        self.store, self.space = embeddings.store, embeddings.space
        self.consumer = consumer
        if since is None and consumer is not None:
            since = confirmed_versions(self.store, self.space.name, encode_key(consumer))
        self._since = dict(since or {})
        self.is_new = not any(self._since.values())
        if self.is_new and consumer is not None:
            forget_elsewhere(self.store, self.space.name, consumer)
        self._read: dict[str, str | None] = {}
        # In this order: a change file is written before the file that it leads to.
        self._listed = embeddings.each_file()
        self._files = ChangeFiles(self.store, self.space.name)

    def __iter__(self) -> Iterator[PartitionChanges]:
        """The partitions that have changed, sorted by the names of their files; removed ones last."""
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
        """Columns of the rows, without `op`: those of all files, of the first file's type; None
        where there is none."""
        fields: dict[str, pa.Field] = {}
        for schema in {
            id(file.columns): file.columns for file in self._present().values()
        }.values():
            for column in _batch_schema(schema).remove(0):
                fields.setdefault(column.name, column)
        if not fields:
            return None
        fields["embedding"] = fields.pop("embedding")  # the last one
        return pa.schema(list(fields.values()))

    @property
    def versions(self) -> dict[str, str]:
        """The version of each partition that the consumer has, once what was read to its end is
        applied."""
        versions: dict[str, str | None] = self._since | self._read
        return {key: version for key, version in versions.items() if version is not None}

    def _announce(self) -> None:
        """Record the partitions that are new to a named consumer: if it dies, it may have a part of
        them."""
        new = dict.fromkeys(sorted(self._present().keys() - self._since.keys()), _UNKNOWN)
        self._since |= new
        if new and self.consumer is not None:
            confirm_versions(self.store, self.space.name, self.consumer, self._since)

    def confirm(self) -> None:
        """Record that every partition that was read to its end is applied; it is durable when this
        returns.

        Each call writes one small object with all partitions; where that fails, the same changes
        come again.
        """
        if self.consumer is None:
            raise ConfigError(
                "only a named consumer can confirm; give changes(…, consumer=…), or keep its versions."
            )
        confirm_versions(self.store, self.space.name, self.consumer, self.versions)

    def forget(self, partitions: Iterable[str]) -> None:
        """Count these partitions as unknown to the consumer, so that the next look gives them
        whole."""
        self._read |= dict.fromkeys(partitions, _UNKNOWN)

    def files(self) -> dict[str, PublishedFile]:
        """The present files, by key, of those partitions whose rows the consumer has (see
        `versions`)."""
        versions = self.versions
        return {
            key: file
            for key, file in self._present().items()
            if versions.get(key) == file.facts.rows_version
        }

    def _present(self) -> dict[str, PublishedFile]:
        files = [file for file in self._listed.values() if isinstance(file, PublishedFile)]
        return {file.facts.partition_key: file for file in files}

    def vectors(
        self, sample: Sample | None = None
    ) -> Iterator[tuple[str, pa.RecordBatch | DataError | TransientError]]:
        """Id and embedding of the rows of the partitions that the consumer has, or of a sample that
        is drawn anew.

        Yields:
            the key of a partition, and some of its rows, or why the others cannot be read.
        """
        files = self.files()
        filled = sorted(key for key, file in files.items() if file.facts.rows)
        if sample is not None:
            random.shuffle(filled)
        drawn = 0
        for key in filled:
            if sample is not None and drawn >= sample.rows:
                return
            try:
                with open_listed(self.store, self.space, files[key]) as reader:
                    groups = (
                        list(range(reader.groups))
                        if sample is None
                        else [random.randrange(reader.groups)]
                    )
                    batches = reader.read(
                        batch_rows=_batch_rows(reader), columns=["id", "embedding"], groups=groups
                    )
                    chosen = None
                    for number, batch in enumerate(batches):
                        if sample is None:
                            yield key, batch
                        elif not random.randrange(number + 1):  # each one has the same chance
                            places = random.sample(
                                range(len(batch)), min(sample.of_partition, len(batch))
                            )
                            chosen = batch.take(pa.array(sorted(places)))
                    if chosen is not None:
                        drawn += len(chosen)
                        yield key, chosen
            except StoreUnavailable:
                raise
            except (DataError, TransientError) as error:
                drawn += 0 if sample is None else sample.of_partition
                yield key, error


@dataclass(frozen=True, slots=True)
class Sample:
    """How much `Changes.vectors` draws: so many rows or a few more, and at most so many of a
    partition."""

    rows: int
    of_partition: int


@dataclass(frozen=True, slots=True, eq=False)
class PartitionChanges:
    """What changed in one partition (its key, or the name of a file that cannot be read); iterating
    reads it."""

    feed: Changes
    partition: str
    _file: PublishedFile | None
    _error: SurgeError | None = None

    @property
    def rows(self) -> int:
        """Rows of its present file."""
        return self._file.facts.rows if self._file is not None else 0

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Yield its changes in the order in which they are to be applied, a few megabytes at a
        time.

        Raises:
            DataError: its file is damaged. Other partitions can be read.
            TransientError: its file was replaced meanwhile, or cannot be read now; look at the
                output again.
        """
        if self._error is not None:
            raise self._error
        if self._file is None:
            others = self.feed.columns
            schema = (
                _batch_schema(pa.schema([("id", pa.string())]))
                if others is None
                else others.insert(0, _OPERATION)
            )
            yield _batch(schema, self.partition, pa.array(["clear"]), {})
            self.feed._read[self.partition] = None
            return
        with open_listed(self.feed.store, self.feed.space, self._file) as reader:
            known, schema = self._known_changes(reader), _batch_schema(reader.columns)
            if known is None:
                yield _batch(schema, self.partition, pa.array(["clear"]), {})
            yield from self._rows(reader, schema, known)
        self.feed._read[self.partition] = self._file.facts.rows_version

    def _known_changes(self, reader: OutputFile) -> _Known | None:
        """The ids that changed since the consumer's version; None where that is unknown."""
        file, before = self._file, self.feed._since.get(self.partition)
        chain = self.feed._files.chain(before, file.facts.rows_version) if file and before else None
        if chain is None:
            return None
        try:
            return self._read_chain(chain, reader.columns.field("id").type)
        except (InvalidFile, *UNREADABLE) as error:
            # A consumer that dies within a whole partition needs it whole again: no error that may
            # pass leads to one.
            if is_systems(error) and not isinstance(error, FileNotFoundError):
                raise not_given("a change file", error, self.partition) from error
            log.warning(
                "partition %r is given whole: a change file cannot be used: %s",
                self.partition,
                error,
            )
            return None

    def _read_chain(self, chain: list[ChangeFile], id_type: pa.DataType) -> _Known | None:
        ids, operations = [], []
        for file in chain:
            table = self.feed._files.read(file, self.partition)
            if table.num_rows and table.schema.field("id").type != id_type:
                return None
            ids += table["id"].chunks if table.num_rows else []
            operations.append(table["operation"].to_numpy())
            if sum(map(len, operations)) > MOST_IDS:
                return None
        # Whether the consumer has a row follows from what happened to its id first.
        encoded = pa.chunked_array(ids, id_type).combine_chunks().dictionary_encode()
        _, first = np.unique(encoded.indices.to_numpy(), return_index=True)
        return _Known(
            encoded.dictionary,
            np.concatenate(operations)[first] == ADDED if ids else np.zeros(0, bool),
        )

    def _rows(
        self, reader: OutputFile, schema: pa.Schema, known: _Known | None
    ) -> Iterator[pa.RecordBatch]:
        """The rows of the file, all of them or those whose ids changed; then the ids that it does
        not have."""
        rows, most = 0, _batch_rows(reader)
        columns = [name for name in reader.columns.names if name not in _NOT_GIVEN]
        present = np.zeros(0 if known is None else len(known.ids), bool)
        for group in range(reader.groups):
            places = None
            if known is not None:
                batches = list(reader.read(columns=["id"], groups=[group]))
                parts = [pc.index_in(batch.column("id"), value_set=known.ids) for batch in batches]  # pyright: ignore[reportAttributeAccessIssue]
                places = pa.chunked_array(parts, pa.int32()).combine_chunks()
                present[places.drop_null().to_numpy()] = True
                if places.null_count == len(places):
                    rows += len(places)
                    continue
            row = 0
            for batch in reader.read(columns=columns, batch_rows=most, groups=[group]):
                here = None if places is None else places[row : row + len(batch)]
                row += len(batch)
                if here is None or known is None:
                    yield _batch(
                        schema, self.partition, pa.repeat("add", len(batch)), _values(batch)
                    )
                elif here.null_count < len(here):
                    is_added = known.is_added[here.drop_null().to_numpy()]
                    operations = pa.array(np.where(is_added, "add", "change"), pa.string())
                    yield _batch(
                        schema, self.partition, operations, _values(batch.filter(here.is_valid()))
                    )
            if places is not None and row != len(places):
                raise InvalidFile(f"its row group {group} has {row:,} rows, or {len(places):,}")
            rows += row
        if rows != reader.facts.rows:
            raise InvalidFile(
                f"its metadata promise {reader.facts.rows:,} rows and it has {rows:,}"
            )
        if known is not None:
            removed = known.ids.filter(pa.array(~present))
            for start in range(0, len(removed), _BATCH_ROWS):
                ids = removed[start : start + _BATCH_ROWS]
                yield _batch(schema, self.partition, pa.repeat("delete", len(ids)), {"id": ids})


@dataclass(frozen=True, slots=True)
class _Known:
    """The ids whose rows changed; `is_added`, [ids], where the consumer did not have one."""

    ids: pa.Array
    is_added: np.ndarray


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
        consumer: a name of your choice. Its confirmations are kept in the output, and change files
            until it has passed them. Two processes must not apply changes under one name at the
            same time.
        since: the version of each partition that the consumer has (`Changes.versions` of the last
            time), where it keeps them itself; nothing is then read from the output's confirmations.
        space: name of a space's folder; None is the current space, or the only one.
    """
    if consumer is None and since is None:
        raise ConfigError(
            "whose changes? Give consumer= with a name, or since= with the versions that it has ({})."
        )
    if consumer == "":
        raise ConfigError("the name of a consumer must not be empty.")
    return Changes(open_embeddings(output, space), consumer, since)


def _batch_rows(reader: OutputFile) -> int:
    """Rows to read at a time, so that they are a few megabytes where rows are about equally large."""
    size = sum(reader.group_bytes(group) for group in range(reader.groups))
    return max(1, min(_BATCH_ROWS, reader.facts.rows * _BATCH_BYTES // max(1, size)))


def _batch_schema(columns: pa.Schema) -> pa.Schema:
    given = (column.with_nullable(True) for column in columns if column.name not in _NOT_GIVEN)
    return pa.schema([_OPERATION, pa.field("partition", pa.string(), nullable=False), *given])


def _batch(
    schema: pa.Schema, partition: str, operations: pa.Array, values: Mapping[str, pa.Array]
) -> pa.RecordBatch:
    """A batch of the feed from columns of the file; those that are not given are null."""
    rows = len(operations)
    known = {"op": operations, "partition": pa.repeat(partition, rows), **values}
    columns = [
        known[each.name] if each.name in known else pa.nulls(rows, each.type) for each in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _values(batch: pa.RecordBatch) -> dict[str, pa.Array]:
    return dict(zip(batch.schema.names, batch.columns, strict=True))
