"""What a table has, and changes of it by other ways than a hand-over; a class for each kind."""

from __future__ import annotations

from operator import itemgetter
from typing import Any, Protocol
from uuid import uuid4

from surge_dagster.consumers.lance import LanceTable
from surge_dagster.consumers.postgres import PgVectorTable
from surge_dagster.consumers.qdrant import (
    _COLUMNS,
    QdrantTable,
    _point_id,
    current_collection,
)
from surge_dagster.consumers.target import Target

Row = tuple[str, str]  # partition and id
WRONG = [1.0] * 8  # a vector


class Table(Protocol):
    """A table `products` as its database has it."""

    def rows(self, *columns: str) -> list[tuple[Any, ...]]:
        """Some columns of all rows."""
        ...

    def drop(self) -> None: ...

    def drop_column(self, column: str) -> None: ...

    def delete(self, row: Row) -> None: ...

    def copy(self, row: Row, partition: str) -> None: ...

    def move(self, row: Row, partition: str) -> None:
        """Give a row to a partition, which may already have a row with this id."""
        ...

    def spoil(self, *rows: Row) -> None:
        """Exchange vectors."""
        ...

    def make(self, row: dict[str, Any]) -> None:
        """Make the table as another program does, with a row."""
        ...


def table_of(target: Target) -> Table:
    if isinstance(target, LanceTable):
        return _Lance(target)
    if isinstance(target, QdrantTable):
        return _Qdrant(target)
    assert isinstance(target, PgVectorTable)
    return _Postgres(target)


class _Lance:
    def __init__(self, target: LanceTable) -> None:
        self._target = target

    def rows(self, *columns: str) -> list[tuple[Any, ...]]:
        table = self._target._open()
        found = [] if table is None else table.to_arrow().to_pylist()
        return list(map(itemgetter(*columns), found))

    def drop(self) -> None:
        self._target._connect().drop_table("products")

    def drop_column(self, column: str) -> None:
        self._table.drop_columns([column])

    def delete(self, row: Row) -> None:
        self._table.delete(_where(row))

    def copy(self, row: Row, partition: str) -> None:
        rows = self._table.search().where(_where(row)).to_arrow()
        self._table.add(rows.set_column(0, "partition", [[partition]]))

    def move(self, row: Row, partition: str) -> None:
        self._table.update(where=_where(row), values={"partition": partition})

    def spoil(self, *rows: Row) -> None:
        where = " OR ".join(map(_where, rows))
        self._table.update(where=where, values={"embedding": WRONG})

    def make(self, row: dict[str, Any]) -> None:
        self._target._connect().create_table("products", [row])

    @property
    def _table(self) -> Any:
        table = self._target._open()
        assert table is not None
        return table


class _Postgres:
    def __init__(self, target: PgVectorTable) -> None:
        self._target = target

    def rows(self, *columns: str) -> list[tuple[Any, ...]]:
        with self._target._connected() as connection:
            if not self._target._columns(connection):
                return []
        names = ", ".join(columns).replace("embedding", "embedding::real[]")
        return self._run(f"SELECT {names} FROM products")

    def drop(self) -> None:
        self._run("DROP TABLE products")

    def drop_column(self, column: str) -> None:
        self._run(f"ALTER TABLE products DROP COLUMN {column}")

    def delete(self, row: Row) -> None:
        self._run(f"DELETE FROM products WHERE {_where(row)}")

    def copy(self, row: Row, partition: str) -> None:
        self._run(
            f"INSERT INTO products SELECT '{partition}', id, text, truncated, embedding "
            f"FROM products WHERE {_where(row)}"
        )

    def move(self, row: Row, partition: str) -> None:
        # With another id: there is no second row with the same one.
        self._run(f"UPDATE products SET partition = '{partition}', id = 'id-x' WHERE {_where(row)}")

    def spoil(self, *rows: Row) -> None:
        where = " OR ".join(map(_where, rows))
        self._run(f"UPDATE products SET embedding = '{WRONG}' WHERE {where}")

    def make(self, row: dict[str, Any]) -> None:
        if "id" not in row:
            self._run("CREATE TABLE products (name text)")
            return
        self._run("CREATE EXTENSION vector")
        self._run("CREATE TABLE products (partition text, id text, text text, embedding vector(8))")
        values = [str(value) for value in row.values()]
        self._run("INSERT INTO products VALUES (%s, %s, %s, %s)", values)

    def _run(self, query: str, values: Any = None) -> list[tuple[Any, ...]]:
        import psycopg

        with psycopg.connect(self._target._dsn, autocommit=True) as connection:
            done = connection.execute(query.encode(), values)
            return done.fetchall() if done.description else []


class _Qdrant:
    def __init__(self, target: QdrantTable) -> None:
        self._target = target

    def rows(self, *columns: str) -> list[tuple[Any, ...]]:
        with self._target._connected() as client:
            current = current_collection(client, self._target._name)
            if current is None:
                return []
            points, _ = client.scroll(current, limit=10_000, with_vectors=True)
        found: list[tuple[Any, ...]] = []
        for point in points:
            row = {"embedding": point.vector, **(point.payload or {})}
            found.append(tuple(row.get(column) for column in columns))
        return found

    def drop(self) -> None:
        self._run("delete_collection")

    def drop_column(self, column: str) -> None:
        from qdrant_client import models

        with self._target._connected() as client:
            collection = current_collection(client, self._target._name)
            assert collection is not None
            client.delete_payload(collection, [column], models.Filter())
            columns = self._target._known(client, collection)
            del columns[column]
            client.update_collection(collection, metadata={_COLUMNS: columns})

    def delete(self, row: Row) -> None:
        self._run("delete", [_point_id(*row)])

    def copy(self, row: Row, partition: str) -> None:
        from qdrant_client import models

        [point] = self._run("retrieve", [_point_id(*row)], with_vectors=True)
        payload = {**point.payload, "partition": partition}
        copied = models.PointStruct(id=str(uuid4()), vector=point.vector, payload=payload)
        self._run("upsert", [copied])

    def move(self, row: Row, partition: str) -> None:
        self._run("set_payload", {"partition": partition}, [_point_id(*row)])

    def spoil(self, *rows: Row) -> None:
        from qdrant_client import models

        wrong = [models.PointVectors(id=_point_id(*row), vector=WRONG) for row in rows]
        self._run("update_vectors", wrong)

    def make(self, row: dict[str, Any]) -> None:
        """A collection, or another one with an alias."""
        from qdrant_client import models

        with self._target._connected() as client:
            name = "goods" if "id" in row else "products"
            stored = models.VectorParams(size=8, distance=models.Distance.DOT)
            client.create_collection(name, stored)
            client.upsert(name, [models.PointStruct(id=1, vector=WRONG, payload=row)])
            if name != "products":
                alias = models.CreateAlias(collection_name=name, alias_name="products")
                operation = models.CreateAliasOperation(create_alias=alias)
                client.update_collection_aliases([operation])

    def _run(self, method: str, *given: Any, **named: Any) -> Any:
        with self._target._connected() as client:
            return getattr(client, method)(
                current_collection(client, self._target._name), *given, **named
            )


def _where(row: Row) -> str:
    return "(partition = '{}' AND id = '{}')".format(*row)
