"""A table of Postgres with pgvector that has the rows of the files.

A hand-over is one transaction. It also writes a second table, `<table>_versions`, which has the
version of each partition, and whose rows they are. The index is built after the transaction in
which the table got its first rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from surge_dagster.consumers.target import (
    Distance,
    HandOver,
    Judge,
    OpenFeed,
    missing_extra,
    other_owner,
    owner_of,
    require_columns,
)
from surge_dagster.engine.compare.recall import Found
from surge_dagster.engine.errors import ConfigError, DataError, TransientError
from surge_dagster.engine.feed.changes import Changes
from surge_dagster.engine.files.rows import matrix_of
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.support.printable import first_line

if TYPE_CHECKING:
    from psycopg import Connection

Index = Literal["hnsw", "none"]
# Type of the vectors of each dtype, and how many dimensions an hnsw index takes of it at most.
_VECTORS = {"float32": ("vector", 2000), "float16": ("halfvec", 4000)}
_OPERATORS = {"cosine": "<=>", "l2": "<->", "ip": "<#>"}
_TYPES = {  # the names that Postgres itself uses
    **dict.fromkeys((pa.string(), pa.large_string()), "text"),
    **dict.fromkeys((pa.binary(), pa.large_binary()), "bytea"),
    pa.bool_(): "bool",
    **dict.fromkeys((pa.int8(), pa.int16(), pa.uint8()), "int2"),
    **dict.fromkeys((pa.int32(), pa.uint16()), "int4"),
    **dict.fromkeys((pa.int64(), pa.uint32()), "int8"),
    pa.float32(): "float4",
    pa.float64(): "float8",
    pa.date32(): "date",
}
_REQUIRED = ("partition", "id", "embedding")
_ZERO = "\0"  # not in any text of Postgres


class PgVectorTable:
    """A table of Postgres, with a schema before a dot in its name; made if there is none."""

    def __init__(
        self,
        dsn: str,
        table: str = "embeddings",
        *,
        index: Index = "hnsw",
        distance: Distance = "cosine",
    ) -> None:
        self._dsn = dsn
        self._name = table
        self._index: Index = index
        self._distance: Distance = distance
        self.index_distance: Distance | None = None if index == "none" else distance

    @property
    def place(self) -> str:
        return f"the table {self._name!r} of Postgres"

    def apply(self, open_feed: OpenFeed, judge: Judge | None = None) -> HandOver:
        with self._connected() as connection:
            # One hand-over at a time; the lock ends with the connection.
            lock = "SELECT pg_advisory_lock(to_regclass(%s)::oid::bigint)"
            connection.execute(lock, [self._named("_versions")])
            with connection.transaction():
                done = self._apply(connection, open_feed)
            kinds = self._columns(connection)
            if kinds:
                self._index_vectors(connection, kinds["embedding"])
            if judge is not None:
                before = done.feed.versions
                done.feed.forget(judge(done.feed, self))
                self._write_versions(connection, before, done.feed)
            done.feed.confirm()
        return done

    def counts(self) -> dict[str, int]:
        with self._connected() as connection:
            if not self._columns(connection):
                return {}
            query = self._sql("SELECT partition, count(*) FROM {table} GROUP BY 1")
            return dict(connection.execute(query).fetchall())

    def vectors(self, partition: str, ids: Sequence[object]) -> dict[object, np.ndarray]:
        query = self._sql("SELECT id, embedding FROM {table} WHERE partition = %s AND id = ANY(%s)")
        with self._connected() as connection:
            rows = connection.cursor(binary=True).execute(query, [partition, list(ids)]).fetchall()
        vectors: dict[object, np.ndarray] = {}
        for row, vector in rows:
            stored = vector.to_numpy()
            vectors[row] = stored.astype(stored.dtype.newbyteorder("="))
        return vectors

    def nearest(self, queries: np.ndarray, k: int) -> list[Found]:
        found: list[Found] = []
        with self._connected() as connection:
            kinds = self._columns(connection)
            if not kinds:
                return [[] for _ in queries]
            query = self._sql(
                "SELECT partition, id, embedding FROM {table} "
                "ORDER BY embedding {operator} %b::{kind} LIMIT %s",
                operator=_OPERATORS[self._distance],
                kind=kinds["embedding"],
            )
            cursor = connection.cursor(binary=True)
            for vector in queries:
                rows = cursor.execute(query, [vector, k]).fetchall()
                found.append([((key, row), near.to_numpy()) for key, row, near in rows])
        return found

    def _apply(self, connection: Connection[Any], open_feed: OpenFeed) -> HandOver:
        run = connection.execute
        known = run(self._sql("SELECT owner, space, partition, version FROM {versions}")).fetchall()
        kinds = self._columns(connection)
        if not kinds:
            known = []
            run(self._sql("DELETE FROM {versions}"))
        before = {partition: version for _, _, partition, version in known}
        feed = open_feed(since=before)
        self._require_usable(feed.space, kinds)
        self._require_own(connection, feed, kinds, known)
        if any(space != feed.space.name for _, space, _, _ in known):
            run(self._sql("DELETE FROM {table}"))  # vectors of two spaces cannot be compared
            run(self._sql("DELETE FROM {versions}"))
            before = {}
            feed = open_feed(since={})

        done = HandOver(feed)
        columns = feed.columns
        if not kinds and columns is None:
            done.read_only()
            return done
        self._add_columns(connection, kinds, columns or ())
        self._follow(connection, done)
        self._write_versions(connection, before, feed)
        done.commits = 1
        return done

    def _require_own(
        self,
        connection: Connection[Any],
        feed: Changes,
        kinds: Mapping[str, str],
        known: Sequence[tuple[str, str, str, str]],
    ) -> None:
        """Refuse a table with the rows of another consumer, output or program."""
        owners = {owner for owner, _, _, _ in known}
        if owners - {owner_of(feed)}:
            raise other_owner(self.place, owners.pop(), feed)
        if kinds and not owners:
            first = connection.execute(self._sql("SELECT FROM {table} LIMIT 1")).fetchone()
            if first is not None:
                raise other_owner(self.place, None, feed)

    def _follow(self, connection: Connection[Any], done: HandOver) -> None:
        """Make the table follow the feed. What came of a partition that fails is undone."""
        kinds = self._columns(connection)
        insertion = self._insertion(kinds)
        for partition in done.feed:
            with done.applying(partition), connection.transaction():
                for batch in partition:
                    self._apply_batch(connection, done, batch, kinds, insertion)

    def _apply_batch(
        self,
        connection: Connection[Any],
        done: HandOver,
        batch: pa.RecordBatch,
        kinds: Mapping[str, str],
        insertion: bytes,
    ) -> None:
        operation = batch.column("op")[0].as_py()
        key = batch.column("partition")[0].as_py()
        if operation == "put":
            rows = self._conformed(batch, kinds)
            connection.cursor().executemany(insertion, _values(rows, kinds))
            done.rows_sent += len(rows)
        elif operation == "delete":
            query = self._sql("DELETE FROM {table} WHERE partition = %s AND id = ANY(%s)")
            connection.execute(query, [key, _storable(batch.column("id").to_pylist())])
            done.rows_deleted += len(batch)
        elif _storable([key]):
            connection.execute(self._sql("DELETE FROM {table} WHERE partition = %s"), [key])

    def _insertion(self, kinds: Mapping[str, str]) -> bytes:
        # Vectors are sent as bytes, which takes half of the time.
        places = ", ".join("%b" if name == "embedding" else "%s" for name in kinds)
        values = [_quoted(name) for name in kinds if name not in ("partition", "id")]
        return self._sql(
            "INSERT INTO {table} ({names}) "
            f"VALUES ({places}) "
            "ON CONFLICT (partition, id) DO UPDATE SET ({values}) = ROW ({new})",
            names=", ".join(map(_quoted, kinds)),
            values=", ".join(values),
            new=", ".join(f"excluded.{value}" for value in values),
        )

    def _write_versions(
        self, connection: Connection[Any], before: Mapping[str, str], feed: Changes
    ) -> None:
        versions = feed.versions
        removed = [key for key in before if key not in versions]
        connection.execute(self._sql("DELETE FROM {versions} WHERE partition = ANY(%s)"), [removed])

        changed: list[tuple[str, str, str, str]] = []
        for key in _storable(versions):
            if versions[key] != before.get(key):
                changed.append((owner_of(feed), feed.space.name, key, versions[key]))
        query = self._sql(
            "INSERT INTO {versions} (owner, space, partition, version) VALUES (%s, %s, %s, %s) "
            "ON CONFLICT (partition) DO UPDATE SET version = excluded.version"
        )
        connection.cursor().executemany(query, changed)

    def _conformed(self, batch: pa.RecordBatch, kinds: Mapping[str, str]) -> pa.RecordBatch:
        """Return the columns of a batch that the table has."""
        require_columns(batch, kinds, _type_of, self.place)
        names = [name for name in batch.schema.names if name != "op"]
        for name in names:
            if kinds[name] != "text":
                continue
            has_zero = pc.match_substring(batch.column(name), _ZERO)  # pyright: ignore[reportAttributeAccessIssue]
            if has_zero.true_count:
                row = batch.filter(has_zero).column("id")[0].as_py()
                raise DataError(
                    batch.column("partition")[0].as_py(),
                    f"the column {name!r} of the row {row!r} has a zero byte, which Postgres does "
                    "not store",
                    "Remove it in the source.",
                )
        return batch.select(names)

    def _add_columns(
        self, connection: Connection[Any], kinds: Mapping[str, str], columns: Iterable[pa.Field]
    ) -> None:
        """Make the table, or the columns that it lacks."""
        defined = {column.name: self._defined(column) for column in columns}
        if not kinds:
            query = "CREATE TABLE {table} ({columns}, PRIMARY KEY (partition, id))"
            connection.execute(self._sql(query, columns=", ".join(defined.values())))
            return
        for name, column in defined.items():
            if name not in kinds:
                query = "ALTER TABLE {table} ADD COLUMN {column}"
                connection.execute(self._sql(query, column=column))

    def _defined(self, column: pa.Field) -> str:
        kind = _type_of(column)
        if kind is None:
            raise ConfigError(
                f"the column {column.name!r} is of type {column.type}, which {self.place} cannot "
                "have. Leave the column out of the setting columns."
            )
        if column.name == "embedding":
            kind += f"({column.type.list_size})"  # pyright: ignore[reportAttributeAccessIssue]
        required = " NOT NULL" if column.name in _REQUIRED else ""
        return f"{_quoted(column.name)} {kind}{required}"

    def _columns(self, connection: Connection[Any]) -> dict[str, str]:
        """Return the type of each column of the table; empty if there is no table."""
        named = connection.execute(
            "SELECT attname, typname FROM pg_attribute JOIN pg_type ON pg_type.oid = atttypid "
            "WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
            [self._named()],
        )
        return dict(named.fetchall())

    def _require_usable(self, space: Space, kinds: Mapping[str, str]) -> None:
        for name in _REQUIRED:
            if kinds and name not in kinds:
                raise ConfigError(f"{self.place} has no column {name!r}. Name a new table.")
        if space.dtype not in _VECTORS:
            raise ConfigError(
                f"the vectors of the space {space.name} are {space.dtype}, and pgvector takes "
                "float32 and float16. Hand over the space that it is derived from."
            )
        kind, most = _VECTORS[space.dtype]
        if kinds and kinds["embedding"] != kind:
            raise ConfigError(
                f"the vectors of {self.place} are of type {kinds['embedding']}, and those of the "
                f"space {space.name} are {space.dtype}. Name a new table, or drop this one."
            )
        if self._index == "hnsw" and space.dimension > most:
            raise ConfigError(
                f"an hnsw index takes at most {most:,} dimensions of {space.dtype}; the space "
                f"{space.name} has {space.dimension:,}. Set index to none, dimension to fewer, or "
                "dtype to float16, of which it takes 4,000."
            )

    def _index_vectors(self, connection: Connection[Any], kind: str) -> None:
        """Build the index of the vectors that the settings name, and drop those for others."""
        found = connection.execute(
            "SELECT relname FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid "
            "WHERE indrelid = to_regclass(%s)",
            [self._named()],
        )
        existing = {name for (name,) in found.fetchall()}
        for distance in get_args(Distance):
            suffix = f"~{distance}"  # which no other relation has in its name
            name = f"{self._name}{suffix}".rpartition(".")[2]
            is_wanted = distance == self.index_distance
            if is_wanted and name not in existing:
                query = (
                    "CREATE INDEX {index} ON {table} USING hnsw (embedding {kind}_{distance}_ops)"
                )
                parts = {"index": _quoted(name), "kind": kind, "distance": distance}
                connection.execute(self._sql(query, **parts))
            elif not is_wanted and name in existing:
                index = self._named(suffix)
                connection.execute(self._sql("DROP INDEX {index}", index=index))

    @contextmanager
    def _connected(self) -> Iterator[Connection[Any]]:
        try:
            import psycopg
            from pgvector.psycopg import register_vector
        except ImportError as error:
            raise missing_extra("pgvector", error) from error
        self._require_dsn(psycopg)
        try:
            with psycopg.connect(self._dsn, autocommit=True) as connection:
                connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
                register_vector(connection)
                columns = "owner text, space text, partition text PRIMARY KEY, version text"
                create = "CREATE TABLE IF NOT EXISTS {versions} (" + columns + ")"
                connection.execute(self._sql(create))
                yield connection
        except psycopg.OperationalError as error:
            raise TransientError(
                f"{self.place} does not answer: {first_line(error)}. Run again."
            ) from error
        except psycopg.Error as error:
            raise ConfigError(f"{self.place} cannot be used: {first_line(error)}.") from error

    def _require_dsn(self, psycopg: Any) -> None:
        """Refuse a wrong dsn; libpq's own message quotes the dsn and its password."""
        if "://" in self._dsn and self._dsn.partition("?")[0].count("@") > 1:
            raise ConfigError(
                "a name or password in the dsn of pgvector has an @. Write %40 for it."
            )
        try:
            psycopg.conninfo.conninfo_to_dict(self._dsn)
        except psycopg.ProgrammingError:
            raise ConfigError(
                "the dsn of pgvector is not one that libpq takes. Give postgresql://USER@HOST/"
                "DATABASE, or host=HOST dbname=DATABASE. It is not shown: it may have a password."
            ) from None

    def _sql(self, query: str, **parts: str) -> bytes:
        """Return a query with these parts, such as names, in place of their names in braces."""
        names = {"table": self._named(), "versions": self._named("_versions"), **parts}
        has_parameters = "%" in query
        if has_parameters:
            # psycopg takes any other % as the start of a parameter.
            names = {place: name.replace("%", "%%") for place, name in names.items()}
        return query.format(**names).encode()

    def _named(self, suffix: str = "") -> str:
        """Return the name of the table, or of what belongs to it, after that of its schema."""
        return ".".join(map(_quoted, f"{self._name}{suffix}".split(".")))


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _values(rows: pa.RecordBatch, kinds: Mapping[str, str]) -> list[tuple[Any, ...]]:
    """Return rows with the columns of a table in its order; missing ones are null."""
    columns: list[list[Any]] = []
    for name in kinds:
        if name == "embedding":
            columns.append(list(matrix_of(rows)))
        elif name in rows.schema.names:
            columns.append(rows.column(name).to_pylist())
        else:
            columns.append([None] * len(rows))
    return list(zip(*columns, strict=True))


def _storable(values: Any) -> list[Any]:
    """Return those of some ids or keys that Postgres can have."""
    return [value for value in values if not isinstance(value, str) or _ZERO not in value]


def _type_of(column: pa.Field) -> str | None:
    if column.name != "embedding":
        return _TYPES.get(column.type)
    is_half = column.type.value_type == pa.float16()  # pyright: ignore[reportAttributeAccessIssue]
    return "halfvec" if is_half else "vector"
