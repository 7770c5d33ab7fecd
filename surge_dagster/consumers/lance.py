"""A table of an embedded LanceDB that has the rows of the files.

A first load is written as one stream in one commit, and gets an index on `partition`. Later, a
`merge_insert` of up to `_MERGED_BYTES`, which LanceDB keeps in memory, inserts and replaces rows in
one commit. Deletes are a commit of their own after it, so that readers between the two never miss a
row; for both in one commit LanceDB would read the whole table into memory. At the end the table is
compacted, its indexes are extended, and versions older than seven days are dropped.

Then the index of the vectors is built, unless the table has it. It is trained only once: of 19,848
rows, an `ivf_pq` that was trained on 5,000 and extended found 0.70 of the nearest ones, one that
was built again 0.72.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from surge_dagster.consumers.target import (
    Distance,
    HandOver,
    Judge,
    OpenFeed,
    local_folder,
    lock_of_folder,
    missing_extra,
    other_owner,
    owner_of,
    require_columns,
)
from surge_dagster.engine.compare.recall import Found
from surge_dagster.engine.errors import ConfigError, TransientError
from surge_dagster.engine.feed.changes import Changes, PartitionChanges
from surge_dagster.engine.files.rows import matrix_of
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.support.printable import first_line

_MERGED_BYTES = 128 * 1024 * 1024
_DELETED_IDS = 10_000  # of one commit, whose condition has them all
_KEY = ["partition", "id"]
Index = Literal["ivf_pq", "hnsw", "none"]
_INDEX_NAME = "surge_vectors"
_INDEXED_ROWS = 5_000  # from which on there is an index; fewer are read in 3 ms
_SUB_VECTOR = 8  # dimensions; of others, LanceDB makes one sub-vector, which finds a quarter
# As LanceDB names them.
_INDEX_TYPES = {"ivf_pq": "IVF_PQ", "hnsw": "IVF_HNSW_SQ"}
_DISTANCES: dict[Distance, Literal["cosine", "l2", "dot"]] = {
    "cosine": "cosine",
    "l2": "l2",
    "ip": "dot",
}
_INDEXED_DTYPES = ("float32", "float16")
# Metadata of the schema of each table that a hand-over has made.
_OWNER, _SPACE = b"surge.owner", b"surge.space"


class LanceTable:
    """A table of an embedded LanceDB. In a bucket it is not locked against other hand-overs."""

    def __init__(
        self,
        uri: str,
        table: str = "embeddings",
        *,
        index: Index = "none",
        distance: Distance = "cosine",
    ) -> None:
        self._uri = uri
        self._name = table
        self._index: Index = index
        self._distance: Distance = distance
        self.index_distance: Distance | None = None if index == "none" else distance

    @property
    def place(self) -> str:
        return f"the table {self._name!r} of {self._uri}"

    def apply(self, open_feed: OpenFeed, judge: Judge | None = None) -> HandOver:
        with self._errors():
            lock = lock_of_folder(local_folder(self._uri), self._name)
        with lock:
            with self._errors():
                table = self._open()
            feed = open_feed()
            self._require_usable(feed)
            made = {} if table is None else table.schema.metadata or {}
            if table is not None and made.get(_OWNER) != owner_of(feed).encode():
                owner = made[_OWNER].decode() if _OWNER in made else None
                raise other_owner(self.place, owner, feed)
            if made.get(_SPACE) != feed.space.name.encode():
                # Confirmations are not about a table that has other vectors, or was dropped.
                feed = open_feed(since={})
            done = HandOver(feed)
            with self._errors():
                if table is None or feed.is_new:
                    self._load(done, table)
                else:
                    before = table.version
                    self._merge(done, table)
                    done.commits = table.version - before
                table = self._open()
                if table is not None:
                    if done.commits:
                        table.optimize()
                    self._index_vectors(table)
            feed.confirm()
            if judge is not None:
                feed.forget(judge(feed, self))
                feed.confirm()
        return done

    def counts(self) -> dict[str, int]:
        with self._errors():
            table = self._open()
            counts = Counter[str]()
            if table is not None:
                for batch in table.search().select(["partition"]).to_batches():
                    for counted in batch.column("partition").value_counts().to_pylist():
                        counts[counted["values"]] += counted["counts"]
            return dict(counts)

    def vectors(self, partition: str, ids: Sequence[object]) -> dict[object, np.ndarray]:
        with self._errors():
            table = self._open()
            if table is None:
                return {}
            query = table.search().where(_rows_of(partition, ids)).select(["id", "embedding"])
            vectors: dict[object, np.ndarray] = {}
            for batch in query.to_arrow().to_batches():
                vectors |= zip(batch.column("id").to_pylist(), matrix_of(batch), strict=True)
            return vectors

    def nearest(self, queries: np.ndarray, k: int) -> list[Found]:
        found: list[Found] = []
        with self._errors():
            table = self._open()
            if table is None:
                return [[] for _ in queries]
            for query in queries:
                search = table.search(query, vector_column_name="embedding")
                search = search.distance_type(_DISTANCES[self._distance]).limit(k)
                # Without `_distance`, LanceDB warns at each search.
                rows = search.select([*_KEY, "embedding", "_distance"]).to_arrow().combine_chunks()
                found.append(
                    [
                        ((row["partition"], row["id"]), np.array(row["embedding"], np.float32))
                        for row in rows.to_pylist()
                    ]
                )
        return found

    def _require_usable(self, feed: Changes) -> None:
        for column in feed.columns or ():
            if "." in column.name:
                raise ConfigError(
                    f"the column {column.name!r} has a dot in its name, and {self.place} cannot "
                    "have it. Leave the column out of the setting columns."
                )
        self._require_indexable(feed.space)

    def _require_indexable(self, space: Space) -> None:
        if self._index == "ivf_pq" and space.dimension % _SUB_VECTOR:
            raise ConfigError(
                f"the space {space.name} has {space.dimension:,} dimensions, and an index ivf_pq "
                f"takes a multiple of {_SUB_VECTOR}. Set index to hnsw or none."
            )
        if self._index != "none" and space.dtype not in _INDEXED_DTYPES:
            raise ConfigError(
                f"the vectors of the space {space.name} are {space.dtype}, and LanceDB indexes "
                "float32 and float16 here. Set index to none."
            )

    def _index_vectors(self, table: Any) -> None:
        """Build the index of the vectors that the settings name, or drop one for others."""
        wanted = (_INDEX_TYPES.get(self._index), _DISTANCES[self._distance])
        if any(each.name == _INDEX_NAME for each in table.list_indices()):
            stats = table.index_stats(_INDEX_NAME)
            if (stats.index_type, stats.distance_type) == wanted:
                return
            table.drop_index(_INDEX_NAME)
        if self._index == "none" or table.count_rows() < _INDEXED_ROWS:
            return

        from lancedb.index import HnswSq, IvfPq

        kind = IvfPq if self._index == "ivf_pq" else HnswSq
        config = kind(distance_type=_DISTANCES[self._distance])
        table.create_index("embedding", config=config, name=_INDEX_NAME, replace=True)

    def _load(self, done: HandOver, table: Any | None) -> None:
        """Make the table again from the whole feed, in one commit."""
        columns = done.feed.columns
        if columns is not None:
            columns = columns.with_metadata(
                {_OWNER: owner_of(done.feed), _SPACE: done.feed.space.name}
            )
            reader = pa.RecordBatchReader.from_batches(columns, self._all_rows(done, columns))
            made = self._connect().create_table(self._name, data=reader, mode="overwrite")
            if made.count_rows():
                from lancedb.index import BTree

                # Without an index, each query of a partition reads the whole table.
                made.create_index("partition", config=BTree())
            done.commits = 1
            return
        done.read_only()
        if table is not None and not done.failures:
            self._connect().drop_table(self._name)
            done.commits = 1

    def _all_rows(self, done: HandOver, columns: pa.Schema) -> Iterator[pa.RecordBatch]:
        for partition in done.feed:
            with done.applying(partition):
                for batch in partition:
                    if batch.column("op")[0].as_py() == "put":
                        done.rows_sent += len(batch)
                        yield self._conformed(batch, columns)

    def _merge(self, done: HandOver, table: Any) -> None:
        columns = done.feed.columns or ()
        if further := [each for each in columns if each.name not in table.schema.names]:
            table.add_columns(further)
        pending = _Pending(table)
        for partition in done.feed:
            with done.applying(partition):
                self._merge_partition(done, table, partition, pending)
        pending.flush()

    def _merge_partition(
        self, done: HandOver, table: Any, partition: PartitionChanges, pending: _Pending
    ) -> None:
        key = partition.partition
        # Of a partition that is given whole: the ids of the table that did not come yet.
        stale_ids: set[object] = set()
        has_rows = False
        for batch in partition:
            operation = batch.column("op")[0].as_py()
            ids = batch.column("id").to_pylist()
            if operation == "clear":
                stale_ids = self._ids_without_doubles(table, key)
            elif operation == "delete":
                done.rows_deleted += len(ids)
                pending.delete(key, ids)
            else:
                done.rows_sent += len(ids)
                has_rows = True
                stale_ids.difference_update(ids)
                pending.merge(self._conformed(batch, table.schema))
        if stale_ids:
            pending.delete(key, list(stale_ids) if has_rows else None)

    def _conformed(self, batch: pa.RecordBatch, columns: pa.Schema) -> pa.RecordBatch:
        """Return a batch with the columns of the table in its order; missing ones are null."""
        known = {column.name: _kind(column) for column in columns}
        require_columns(batch, known, _kind, self.place)
        arrays: list[pa.Array] = []
        for field in columns:
            if field.name in batch.schema.names:
                arrays.append(batch.column(field.name).cast(field.type))
            else:
                arrays.append(pa.nulls(len(batch), field.type))
        return pa.RecordBatch.from_arrays(arrays, schema=columns)

    def _ids_without_doubles(self, table: Any, partition: str) -> set[object]:
        """Return the ids of a partition's rows. Without any, if two rows had one: a merge would
        replace both of them, so all are deleted."""
        condition = f"partition = {_literal(partition)}"
        ids: list[object] = []
        for batch in table.search().where(condition).select(["id"]).to_batches():
            ids += batch.column("id").to_pylist()
        if len(set(ids)) < len(ids):
            table.delete(condition)
            return set()
        return set(ids)

    def _connect(self) -> Any:
        try:
            import lancedb
        except ImportError as error:
            raise missing_extra("lancedb", error) from error
        return lancedb.connect(self._uri)

    def _open(self) -> Any | None:
        """Return the table as it is now; None if there is none, or a first load was killed."""
        with contextlib.suppress(ValueError, FileNotFoundError):
            return self._connect().open_table(self._name)
        return None

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn LanceDB's errors into one that names the table."""
        try:
            yield
        except (OSError, RuntimeError, ValueError) as error:
            reason = f"{self.place} cannot be used: {first_line(error)}"
            raise TransientError(f"{reason}. Run again.") from error


class _Pending:
    """Rows and ids that are not written to a table yet."""

    def __init__(self, table: Any) -> None:
        self._table = table
        self._rows: list[pa.RecordBatch] = []
        self._deleted: list[str] = []  # conditions
        self._bytes = 0
        self._ids = 0

    def merge(self, rows: pa.RecordBatch) -> None:
        self._rows.append(rows)
        self._bytes += rows.nbytes
        if self._bytes >= _MERGED_BYTES:
            self._merge()

    def delete(self, partition: str, ids: list[object] | None) -> None:
        if ids is None:
            self._deleted.append(f"partition = {_literal(partition)}")
            return
        for start in range(0, len(ids), _DELETED_IDS):
            some = ids[start : start + _DELETED_IDS]
            self._deleted.append(_rows_of(partition, some))
            self._ids += len(some)
            if self._ids >= _DELETED_IDS:
                self.flush()

    def flush(self) -> None:
        """Write everything: rows first, so that no reader misses one."""
        self._merge()
        if self._deleted:
            self._table.delete(" OR ".join(f"({condition})" for condition in self._deleted))
        self._deleted = []
        self._ids = 0

    def _merge(self) -> None:
        if self._rows:
            reader = pa.RecordBatchReader.from_batches(self._rows[0].schema, self._rows)
            merge = self._table.merge_insert(_KEY).when_matched_update_all()
            merge.when_not_matched_insert_all().execute(reader)
        self._rows = []
        self._bytes = 0


def _kind(column: pa.Field) -> str:
    """Return the type of a column. LanceDB does not keep whether values of a list may be null."""
    if pa.types.is_fixed_size_list(column.type):
        return f"fixed_size_list<{column.type.value_type}>[{column.type.list_size}]"  # pyright: ignore[reportAttributeAccessIssue]
    return str(column.type)


def _rows_of(partition: str, ids: Sequence[object]) -> str:
    return f"partition = {_literal(partition)} AND id IN ({', '.join(map(_literal, ids))})"


def _literal(value: object) -> str:
    if isinstance(value, int):
        return f"CAST('{value}' AS BIGINT)"  # -2^63 as a number would be a float
    if isinstance(value, bytes):
        return f"X'{value.hex()}'"
    return "'" + str(value).replace("'", "''") + "'"
