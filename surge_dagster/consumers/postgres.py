"""A table of Postgres with pgvector that has the rows of the files.

A hand-over is one transaction: what changed is copied (COPY) into a temporary table and merged from
there. A second table, `<table>_versions`, has the versions of the table's partitions and is written
in the same transaction. A first load is copied into the table itself. The index is built after the
transaction in which the table got its first rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from surge_dagster.consumers.target import (
    HandOver,
    Judge,
    OpenFeed,
    ahead,
    missing_extra,
    other_owner,
    owner_of,
    require_columns,
)
from surge_dagster.engine.errors import ConfigError, DataError, TransientError
from surge_dagster.engine.feed.changes import Changes
from surge_dagster.engine.files.rows import matrix_of
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.support.unreadable import first_line

if TYPE_CHECKING:
    from psycopg import Connection
    from psycopg.sql import Composed

Index = Literal["hnsw", "none"]
Distance = Literal["cosine", "l2", "ip"]
_HNSW_DIMENSION = 2000  # most that pgvector indexes
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
_COMMENT = "SELECT coalesce(obj_description(to_regclass(%s), 'pg_class'), '')"
_ROWS_OF = "rows of "  # how the comment begins that says whose rows the table has
_ZERO = "\0"  # not in any text of Postgres
_NAME_BYTES = 63 - len("_versions")  # Postgres cuts longer names
# Without them a hand-over waits two hours for an answer over a broken connection.
_KEEPALIVES: dict[str, Any] = {
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
}


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
        self._connection: Connection[Any] | None = None

    @property
    def place(self) -> str:
        return f"the table {self._name!r} of Postgres"

    def apply(self, open_feed: OpenFeed, judge: Judge | None = None) -> HandOver:
        with self._connected() as connection:
            with connection.transaction():
                done, versions = self._apply(connection, open_feed)
            if self._index == "hnsw" and self._columns(connection):
                self._build_index(connection)
            with connection.transaction():
                self._confirm(connection, done.feed, versions, judge)
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
        return {row: np.asarray(vector.to_numpy(), np.float32) for row, vector in rows}

    def _apply(
        self, connection: Connection[Any], open_feed: OpenFeed
    ) -> tuple[HandOver, list[tuple[str, str, str]]]:
        """Apply the feed; return also the versions that the table then has."""
        from psycopg import sql

        run = connection.execute
        known = self._locked_versions(connection)
        kinds = self._columns(connection)
        since = {partition: version for _, partition, version in known}
        feed = open_feed(since=since if kinds else {})
        [comment] = run(_COMMENT, [self._quoted(connection, "{versions}")]).fetchone() or [""]
        if comment != (mine := f"{_ROWS_OF}{owner_of(feed)}"):
            if known and kinds and comment.startswith(_ROWS_OF):  # else it was lost
                raise other_owner(self.place, comment.removeprefix(_ROWS_OF), feed)
            run(self._sql("COMMENT ON TABLE {versions} IS {comment}", comment=sql.Literal(mine)))
        if known and (not kinds or any(space != feed.space.name for space, _, _ in known)):
            if kinds:
                self._require_usable(feed.space, kinds)
                run(self._sql("DELETE FROM {table}"))  # vectors of two spaces cannot be compared
            run(self._sql("DELETE FROM {versions}"))
            feed = open_feed(since={})
        done = HandOver(feed)
        columns = feed.columns
        if not kinds and columns is None:
            deque(done.steps(lambda batch: batch), maxlen=0)  # finds files that cannot be read
            return done, self._locked_versions(connection)
        kinds = self._with_columns(connection, kinds, columns or ())
        self._require_usable(feed.space, kinds)
        before = feed.versions
        is_empty = run(self._sql("SELECT FROM {table} LIMIT 1")).fetchone() is None
        if not is_empty and not before:
            raise other_owner(self.place, None, feed)
        (self._load if is_empty else self._merge)(connection, done, kinds)
        self._write_versions(connection, before, done)
        done.commits = 1
        return done, self._locked_versions(connection)

    def _locked_versions(self, connection: Connection[Any]) -> list[tuple[str, str, str]]:
        """Space, partition and version, ascending; locked until the transaction ends: one hand-over
        at a time."""
        connection.execute(self._sql("LOCK TABLE {versions} IN EXCLUSIVE MODE"))
        query = self._sql("SELECT space, partition, version FROM {versions} ORDER BY partition")
        return connection.execute(query).fetchall()

    def _confirm(
        self,
        connection: Connection[Any],
        feed: Changes,
        versions: list[tuple[str, str, str]],
        judge: Judge | None,
    ) -> None:
        """Have the table judged in a transaction of its own: it may take long."""
        run = connection.execute
        run("SET LOCAL idle_in_transaction_session_timeout = 0")  # while files are read
        if self._locked_versions(connection) != versions:
            raise TransientError(f"another hand-over has changed {self.place} since. Run again.")
        bound = PgVectorTable(self._dsn, self._name, index=self._index, distance=self._distance)
        bound._connection = connection
        wrong = [] if judge is None else judge(feed, bound)
        query = self._sql(
            "INSERT INTO {versions} (space, partition, version) SELECT %s, unnest(%s::text[]), '' "
            "ON CONFLICT (partition) DO UPDATE SET version = ''"
        )
        run(query, [feed.space.name, _storable(wrong)])
        feed.forget(wrong)
        feed.confirm()

    def _load(self, connection: Connection[Any], done: HandOver, kinds: Mapping[str, str]) -> None:
        """Copy the whole feed into the table, which has no rows."""
        with self._copying(connection, "{table}", kinds) as write:
            for step in ahead(done.steps(lambda batch: self._conformed(batch, kinds))):
                if step.rows is not None:
                    write(step.rows, None)
        if done.failures:  # the table has a part of them
            connection.execute(
                self._sql("DELETE FROM {table} WHERE partition = ANY(%s)"),
                [_storable(done.failures)],
            )
        key = "SELECT FROM pg_index WHERE indrelid = to_regclass(%s) AND indisunique"
        if connection.execute(key, [self._quoted(connection)]).fetchone() is None:
            connection.execute(self._sql("ALTER TABLE {table} ADD PRIMARY KEY (partition, id)"))

    def _merge(self, connection: Connection[Any], done: HandOver, kinds: Mapping[str, str]) -> None:
        """Copy the feed into a temporary table, and make the table follow that."""
        run = connection.execute
        empty = "AS SELECT ''::text AS op, t.* FROM {table} t WITH NO DATA"
        run(self._sql("CREATE TEMPORARY TABLE {staging} ON COMMIT DROP " + empty))
        with self._copying(connection, "{staging}", {"op": "text", **kinds}) as write:
            for step in ahead(done.steps(lambda batch: self._conformed(batch, kinds))):
                if step.rows is not None:
                    write(step.rows, "put")
                elif step.deleted is not None:
                    ids = _storable(step.deleted.to_pylist())
                    named = pa.table(
                        {
                            "partition": [step.partition] * len(ids),
                            "id": pa.array(ids, step.deleted.type),
                        }
                    )
                    write(named, "delete")
                elif step.clears and _storable([step.partition]):
                    write(pa.table({"partition": [step.partition]}), "clear")
        run(
            self._sql("DELETE FROM {staging} WHERE partition = ANY(%s)"), [_storable(done.failures)]
        )
        run(self._sql("ANALYZE {staging}"))
        is_put = "SELECT FROM {staging} p WHERE p.op = 'put'"
        is_put += " AND (p.partition, p.id) = (t.partition, t.id)"
        cleared = "s.op = 'clear' AND s.partition = t.partition AND NOT EXISTS (" + is_put + ")"
        deleted = "s.op = 'delete' AND (s.partition, s.id) = (t.partition, t.id)"
        for condition in (cleared, deleted):
            run(self._sql("DELETE FROM {table} t USING {staging} s WHERE " + condition))
        values = [name for name in kinds if name not in ("partition", "id")]
        run(
            self._sql(
                "INSERT INTO {table} ({names}) SELECT {names} FROM {staging} WHERE op = 'put' "
                "ON CONFLICT (partition, id) DO UPDATE SET ({values}) = ROW ({new})",
                names=_joined(kinds),
                values=_joined(values),
                new=_joined(values, "excluded"),
            )
        )

    def _write_versions(
        self, connection: Connection[Any], before: Mapping[str, str], done: HandOver
    ) -> None:
        now, space = done.feed.versions, done.feed.space.name
        changed = _storable(
            key for key in before.keys() | now.keys() if before.get(key) != now.get(key)
        )
        connection.execute(self._sql("DELETE FROM {versions} WHERE partition = ANY(%s)"), [changed])
        with connection.cursor().copy(
            self._sql("COPY {versions} (space, partition, version) FROM STDIN")
        ) as copy:
            for key in changed:
                if now.get(key):
                    copy.write_row((space, key, now[key]))

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

    @contextmanager
    def _copying(
        self, connection: Connection[Any], place: str, kinds: Mapping[str, str]
    ) -> Iterator[Callable[[pa.RecordBatch | pa.Table, str | None], None]]:
        """Give a function that writes rows and, unless it is None, their operation."""
        names = list(kinds)
        query = self._sql(
            f"COPY {place} ({{names}}) FROM STDIN WITH (FORMAT BINARY)", names=_joined(names)
        )
        with connection.cursor().copy(query) as copy:
            # Vectors come as bytes: see `_binary`.
            copy.set_types(["bytea" if kind == "vector" else kind for kind in kinds.values()])

            def write(rows: pa.RecordBatch | pa.Table, operation: str | None) -> None:
                columns = {
                    name: rows.column(name).to_pylist()
                    for name in rows.schema.names
                    if name != "embedding"
                }
                if isinstance(rows, pa.RecordBatch):
                    columns["embedding"] = _binary(matrix_of(rows))
                if operation is not None:
                    columns["op"] = [operation] * rows.num_rows
                missing = [None] * rows.num_rows
                for row in zip(*(columns.get(name, missing) for name in names), strict=True):
                    copy.write_row(row)

            yield write

    def _with_columns(
        self, connection: Connection[Any], kinds: Mapping[str, str], columns: Iterable[pa.Field]
    ) -> Mapping[str, str]:
        """Make the table or its new columns; return the type of each column."""
        if not kinds:
            connection.execute(self._sql("CREATE TABLE {table} ()"))
        for column in columns:
            if column.name not in kinds and (not kinds or column.name not in _REQUIRED):
                connection.execute(
                    self._sql(
                        "ALTER TABLE {table} ADD COLUMN {column}", column=self._defined(column)
                    )
                )
        return self._columns(connection)

    def _defined(self, column: pa.Field) -> Composed:
        from psycopg.sql import SQL, Identifier

        kind = _type_of(column)
        if kind is None:
            raise ConfigError(
                f"the column {column.name!r} is of type {column.type}, which {self.place} cannot "
                "have. Leave the column out of the setting columns."
            )
        if column.name == "embedding":
            kind += f"({column.type.list_size})"  # pyright: ignore[reportAttributeAccessIssue]
        required = " NOT NULL" if column.name in _REQUIRED else ""
        return SQL("{} {}").format(Identifier(column.name), SQL(kind + required))  # pyright: ignore[reportArgumentType]

    def _columns(self, connection: Connection[Any]) -> dict[str, str]:
        """Return the type of each column of the table; empty if there is no table."""
        named = connection.execute(
            "SELECT attname, typname FROM pg_attribute JOIN pg_type ON pg_type.oid = atttypid "
            "WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
            [self._quoted(connection)],
        )
        return dict(named.fetchall())

    def _require_usable(self, space: Space, kinds: Mapping[str, str]) -> None:
        if missing := [name for name in _REQUIRED if name not in kinds]:
            raise ConfigError(f"{self.place} has no column {missing[0]!r}. Name a new table.")
        if space.dtype != "float32":
            raise ConfigError(
                f"the vectors of the space {space.name} are {space.dtype}, and pgvector takes "
                "float32. Hand over the space that it is derived from."
            )
        if self._index == "hnsw" and space.dimension > _HNSW_DIMENSION:
            raise ConfigError(
                f"an hnsw index takes at most {_HNSW_DIMENSION:,} dimensions; the space "
                f"{space.name} has {space.dimension:,}. Set index to none, or dimension to fewer."
            )

    def _build_index(self, connection: Connection[Any]) -> None:
        """Build the index of the vectors unless there is one for this distance."""
        from psycopg.sql import SQL, Identifier

        *schema, table = self._name.split(".")
        name, operators = f"{table}_embedding_hnsw", f"vector_{self._distance}_ops"
        built_for = connection.execute(
            "SELECT opcname FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid "
            "JOIN pg_opclass ON pg_opclass.oid = indclass[0] "
            "WHERE indrelid = to_regclass(%s) AND relname = %s::name",
            [self._quoted(connection), name],
        ).fetchone()
        if built_for not in (None, (operators,)):
            connection.execute(self._sql("DROP INDEX {index}", index=Identifier(*schema, name)))
        create = "CREATE INDEX IF NOT EXISTS {index} ON {table} USING hnsw (embedding {operators})"
        connection.execute(self._sql(create, index=Identifier(name), operators=SQL(operators)))  # pyright: ignore[reportArgumentType]

    @contextmanager
    def _connected(self) -> Iterator[Connection[Any]]:
        if self._connection is not None:  # of the hand-over that has it judged
            yield self._connection
            return
        try:
            import psycopg
            from pgvector.psycopg import register_vector
            from psycopg.conninfo import conninfo_to_dict, make_conninfo
        except ImportError as error:
            raise missing_extra("pgvector", error) from error
        self._require_names(psycopg)
        try:
            dsn = make_conninfo("", **(_KEEPALIVES | conninfo_to_dict(self._dsn)))
            with psycopg.connect(dsn, autocommit=True) as connection:
                connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
                register_vector(connection)
                columns = "(space text NOT NULL, partition text PRIMARY KEY, version text NOT NULL)"
                connection.execute(self._sql("CREATE TABLE IF NOT EXISTS {versions} " + columns))
                yield connection
        except psycopg.OperationalError as error:
            raise TransientError(
                f"{self.place} does not answer: {first_line(error)}. Run again."
            ) from error
        except psycopg.Error as error:
            raise ConfigError(f"{self.place} cannot be used: {first_line(error)}.") from error

    def _require_names(self, psycopg: Any) -> None:
        """Refuse a wrong table or dsn; libpq's own message quotes the dsn and its password."""
        if len(self._name.split(".")[-1].encode()) > _NAME_BYTES:
            raise ConfigError(
                f"{self.place} has a name of more than {_NAME_BYTES} bytes. Choose a shorter one."
            )
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

    def _sql(self, query: str, **parts: Any) -> Composed:
        from psycopg.sql import SQL, Identifier

        *schema, table = self._name.split(".")
        names = {
            "table": Identifier(*schema, table),
            "versions": Identifier(*schema, f"{table}_versions"),
            "staging": Identifier("surge_staging"),
        }
        return SQL(query).format(**names, **parts)  # pyright: ignore[reportArgumentType]

    def _quoted(self, connection: Connection[Any], name: str = "{table}") -> str:
        return self._sql(name).as_string(connection)


def _joined(names: Sequence[str] | Mapping[str, str], of: str | None = None) -> Composed:
    from psycopg.sql import SQL, Identifier

    return SQL(", ").join(Identifier(of, name) if of else Identifier(name) for name in names)


def _binary(matrix: np.ndarray) -> list[bytes]:
    """Return vectors as bytes for pgvector; its own package takes twice as long."""
    rows, dimension = matrix.shape
    fields = [("dimension", ">i2"), ("unused", ">i2"), ("values", ">f4", (dimension,))]
    sent = np.zeros(rows, fields)
    sent["dimension"] = dimension
    sent["values"] = matrix
    size = sent.itemsize
    content = sent.tobytes()
    return [content[start : start + size] for start in range(0, len(content), size)]


def _storable(values: Any) -> list[Any]:
    """Return those of some ids or keys that Postgres can have."""
    return [value for value in values if not isinstance(value, str) or _ZERO not in value]


def _type_of(column: pa.Field) -> str | None:
    return "vector" if column.name == "embedding" else _TYPES.get(column.type)
