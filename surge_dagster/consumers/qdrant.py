"""A collection of Qdrant that has the rows of the files.

Qdrant has no transactions, but its aliases are switched in one step. So a first load, or one of
another space, fills a collection of its own, and readers use an alias that is switched to it at the
end. Later changes are written to that collection batch by batch. Deletes come after them, so that
readers never miss a row. The id of a point is a hash of its partition and row, so that no row can
come twice.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

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
from surge_dagster.engine.errors import ConfigError, DataError, TransientError
from surge_dagster.engine.feed.changes import Changes, PartitionChanges
from surge_dagster.engine.files.rows import matrix_of
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.support.printable import first_line

if TYPE_CHECKING:
    from qdrant_client import QdrantClient
    from qdrant_client.models import VectorParams

_TIMEOUT = 60  # seconds
# Of one request, whose JSON takes about 20 bytes for each; a server takes 32 MiB.
_VALUES = 500_000
_IDS = 10_000  # of one request
_FACETS = 65_536
_DTYPES = ("float32", "float16")
_STORABLE = (pa.types.is_boolean, pa.types.is_integer, pa.types.is_floating, pa.types.is_date32)
_TEXTS = (pa.string(), pa.large_string())
_BYTES = (pa.binary(), pa.large_binary())
# Metadata of each collection that a hand-over has made; columns are types by name.
_OWNER, _SPACE, _COLUMNS = "surge.owner", "surge.space", "surge.columns"


class QdrantTable:
    """A collection of a server, or of Qdrant's embedded mode in a folder, which is for tests.

    A collection of a server is not locked against other hand-overs.
    """

    def __init__(
        self,
        uri: str,
        table: str = "embeddings",
        *,
        api_key: str | None = None,
        distance: Distance = "cosine",
    ) -> None:
        self._uri = uri
        self._name = table
        self._api_key = api_key
        self._distance: Distance = distance
        self.index_distance: Distance | None = distance

    @property
    def place(self) -> str:
        return f"the collection {self._name!r} of {self._uri}"

    def apply(self, open_feed: OpenFeed, judge: Judge | None = None) -> HandOver:
        with self._connected() as client:
            feed = open_feed()
            vectors = self._vectors_of(feed.space)
            current = current_collection(client, self._name)
            if current is None and client.collection_exists(self._name):
                raise other_owner(self.place, None, feed)
            if current is None or not self._is_current(client, current, feed, vectors):
                # Confirmations are not about a collection that has other vectors, or was dropped.
                feed = open_feed(since={})
            done = HandOver(feed)
            if current is None or feed.is_new:
                self._load(client, done, current, vectors)
            else:
                self._add_columns(client, current, feed)
                self._follow(client, done, current)
            feed.confirm()
            if judge is not None:
                feed.forget(judge(feed, _Connected(client, self._name)))
                feed.confirm()
        return done

    def counts(self) -> dict[str, int]:
        with self._connected() as client:
            return _Connected(client, self._name).counts()

    def vectors(self, partition: str, ids: Sequence[object]) -> dict[object, np.ndarray]:
        with self._connected() as client:
            return _Connected(client, self._name).vectors(partition, ids)

    def nearest(self, queries: np.ndarray, k: int) -> list[Found]:
        found: list[Found] = []
        with self._connected() as client:
            current = current_collection(client, self._name)
            if current is None:
                return [[] for _ in queries]
            has_bytes = self._known(client, current)["id"] == str(pa.binary())
            for query in queries:
                points = client.query_points(
                    current,
                    query.tolist(),
                    limit=k,
                    with_payload=["partition", "id"],
                    with_vectors=True,
                ).points
                rows: list[tuple[Hashable, np.ndarray]] = []
                for point in points:
                    payload = point.payload or {}
                    row = bytes.fromhex(payload["id"]) if has_bytes else payload["id"]
                    rows.append(((payload["partition"], row), np.array(point.vector, np.float32)))
                found.append(rows)
        return found

    def _is_current(
        self, client: QdrantClient, collection: str, feed: Changes, vectors: VectorParams
    ) -> bool:
        """Return whether a collection has the vectors of this space, for this distance."""
        made = client.get_collection(collection).config.metadata or {}
        if made.get(_OWNER) != owner_of(feed):
            raise other_owner(self.place, made.get(_OWNER), feed)
        stored = _stored(client, collection)
        return made.get(_SPACE) == feed.space.name and stored.distance == vectors.distance

    def _load(
        self, client: QdrantClient, done: HandOver, current: str | None, vectors: VectorParams
    ) -> None:
        """Fill a new collection from the whole feed, and then let readers use it."""
        if done.feed.columns is None:
            done.read_only()
            if current is not None and not done.failures:
                client.delete_collection(current)
                done.commits = 1
            return
        new = self._make(client, done.feed, current, vectors)
        self._follow(client, done, new)
        self._switch(client, current, new)
        done.commits += 1

    def _switch(self, client: QdrantClient, current: str | None, new: str) -> None:
        """Let readers use a new collection, and delete the one that they have used."""
        from qdrant_client import models

        named = models.CreateAlias(collection_name=new, alias_name=self._name)
        switch: list[Any] = [models.CreateAliasOperation(create_alias=named)]
        if current is not None:
            unnamed = models.DeleteAlias(alias_name=self._name)
            switch.insert(0, models.DeleteAliasOperation(delete_alias=unnamed))
        client.update_collection_aliases(switch)
        if current is not None:
            client.delete_collection(current)

    def _make(
        self, client: QdrantClient, feed: Changes, current: str | None, vectors: VectorParams
    ) -> str:
        """Make an empty collection; one of a load that was killed is replaced."""
        from qdrant_client import models

        new = f"{self._name}~1"  # the name of a table cannot have a ~
        if new == current:
            new = f"{self._name}~2"
        if client.collection_exists(new):
            made = client.get_collection(new).config.metadata or {}
            if made.get(_OWNER) != owner_of(feed):
                raise other_owner(f"the collection {new!r}", made.get(_OWNER), feed)
            client.delete_collection(new)
        client.create_collection(
            new,
            vectors,
            metadata={
                _OWNER: owner_of(feed),
                _SPACE: feed.space.name,
                _COLUMNS: self._columns_of(feed),
            },
        )
        if not client.get_collection(new).config.metadata:
            client.delete_collection(new)
            raise ConfigError(
                f"{self._uri} keeps no metadata of collections: it is older than Qdrant 1.16. "
                "Update it."
            )
        if local_folder(self._uri) is None:  # the embedded mode has no indexes
            keyword = models.PayloadSchemaType.KEYWORD
            client.create_payload_index(new, "partition", keyword)
        return new

    def _add_columns(self, client: QdrantClient, collection: str, feed: Changes) -> None:
        known = self._known(client, collection)
        columns = self._columns_of(feed) | known
        if columns != known:
            client.update_collection(collection, metadata={_COLUMNS: columns})

    def _columns_of(self, feed: Changes) -> dict[str, str]:
        for column in feed.columns or ():
            if column.name != "embedding" and not _is_storable(column.type):
                raise ConfigError(
                    f"the column {column.name!r} is of type {column.type}, which {self.place} "
                    "cannot have. Leave the column out of the setting columns."
                )
        return {column.name: _kind(column) for column in feed.columns or ()}

    def _known(self, client: QdrantClient, collection: str) -> dict[str, str]:
        metadata = client.get_collection(collection).config.metadata or {}
        return metadata[_COLUMNS]

    def _follow(self, client: QdrantClient, done: HandOver, collection: str) -> None:
        """Make a collection follow the feed."""
        columns = self._known(client, collection)
        deletions = _Deletions(client, collection)
        for partition in done.feed:
            with done.applying(partition):
                self._follow_partition(client, done, partition, columns, deletions)
        deletions.flush()
        done.commits += deletions.requests

    def _follow_partition(
        self,
        client: QdrantClient,
        done: HandOver,
        partition: PartitionChanges,
        columns: Mapping[str, str],
        deletions: _Deletions,
    ) -> None:
        key = partition.partition
        # Of a partition that is given whole: points of the collection that did not come yet.
        stale: set[str] = set()
        for batch in partition:
            operation = batch.column("op")[0].as_py()
            if operation == "clear":
                stale = set(_points_of(client, deletions.collection, key))
                continue
            points = [_point_id(key, row) for row in batch.column("id").to_pylist()]
            if operation == "delete":
                done.rows_deleted += len(points)
                deletions.add(points)
            else:
                done.rows_sent += len(points)
                stale.difference_update(points)
                require_columns(batch, columns, _kind, self.place)
                done.commits += _put(client, deletions.collection, points, batch)
                deletions.keep(points)
        deletions.add(stale)

    def _vectors_of(self, space: Space) -> VectorParams:
        """Return how vectors are stored: bit for bit as in the files.

        For cosine, Qdrant would scale vectors. Those of length 1 have their cosine as inner product
        without that.
        """
        if space.dtype not in _DTYPES:
            raise ConfigError(
                f"the vectors of the space {space.name} are {space.dtype}, and Qdrant takes "
                "float32 and float16. Hand over the space that it is derived from."
            )
        if self._distance == "cosine" and not space.normalize:
            raise ConfigError(
                f"the vectors of the space {space.name} are not of length 1, and Qdrant would "
                "change them for the distance cosine. Set distance to ip or l2, or normalize to "
                "true."
            )
        from qdrant_client import models

        distance = models.Distance.EUCLID if self._distance == "l2" else models.Distance.DOT
        return models.VectorParams(
            size=space.dimension, distance=distance, datatype=models.Datatype(space.dtype)
        )

    @contextmanager
    def _connected(self) -> Iterator[QdrantClient]:
        folder = local_folder(self._uri)
        with lock_of_folder(folder, "surge"):
            client = self._open(folder)
            try:
                with self._errors():
                    yield client
            finally:
                client.close()

    def _open(self, folder: Path | None) -> QdrantClient:
        try:
            from qdrant_client import QdrantClient
        except ImportError as error:
            raise missing_extra("qdrant", error) from error
        try:
            if folder is not None:
                return QdrantClient(path=str(folder))
            return QdrantClient(
                self._uri, api_key=self._api_key, timeout=_TIMEOUT, check_compatibility=False
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise self._unusable(error) from error

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Turn Qdrant's errors into one that names the collection."""
        from qdrant_client.common.client_exceptions import QdrantException
        from qdrant_client.http.exceptions import ApiException, UnexpectedResponse

        try:
            yield
        except UnexpectedResponse as error:
            if error.status_code in (401, 403):
                raise ConfigError(
                    f"{self.place} refuses the api_key ({error.status_code}). Give one that may "
                    "read and write."
                ) from error
            raise self._unusable(error) from error
        except (ApiException, QdrantException) as error:
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> TransientError:
        reason = f"{self.place} cannot be used: {first_line(error)}"
        return TransientError(f"{reason}. Run again.")


class _Connected:
    """What readers find under an alias; see `target.Stored`."""

    def __init__(self, client: QdrantClient, alias: str) -> None:
        self._client = client
        self._collection = current_collection(client, alias)

    def counts(self) -> dict[str, int]:
        if self._collection is None:
            return {}
        limit = _FACETS
        while True:
            facet = self._client.facet(self._collection, "partition", limit=limit, exact=True)
            if len(facet.hits) < limit:
                return {str(hit.value): hit.count for hit in facet.hits}
            limit *= 4

    def vectors(self, partition: str, ids: Sequence[object]) -> dict[object, np.ndarray]:
        from qdrant_client import models

        if self._collection is None:
            return {}
        stored = _stored(self._client, self._collection)
        dtype = np.dtype((stored.datatype or models.Datatype.FLOAT32).value)
        rows = {_point_id(partition, row): row for row in ids}
        points = list(rows)
        vectors: dict[object, np.ndarray] = {}
        for start in range(0, len(points), _IDS):
            for point in self._client.retrieve(
                self._collection,
                points[start : start + _IDS],
                with_payload=["partition"],
                with_vectors=True,
            ):
                if (point.payload or {}).get("partition") == partition:
                    vectors[rows[str(point.id)]] = np.array(point.vector, dtype)
        return vectors


class _Deletions:
    """Points that are not deleted from a collection yet.

    Attributes:
        requests: number of those that were sent.
    """

    def __init__(self, client: QdrantClient, collection: str) -> None:
        self._client = client
        self.collection = collection
        self.requests = 0
        self._points: set[str] = set()

    def add(self, points: Iterable[str]) -> None:
        self._points.update(points)
        if len(self._points) >= _IDS:
            self.flush()

    def keep(self, points: Iterable[str]) -> None:
        """Do not delete points that have been inserted since, under their own partition."""
        self._points.difference_update(points)

    def flush(self) -> None:
        points: list[Any] = sorted(self._points)
        for start in range(0, len(points), _IDS):
            self._client.delete(self.collection, points[start : start + _IDS])
            self.requests += 1
        self._points.clear()


def current_collection(client: QdrantClient, alias: str) -> str | None:
    """Return the collection that readers use; None if there is none."""
    for each in client.get_aliases().aliases:
        if each.alias_name == alias:
            return each.collection_name
    return None


def _stored(client: QdrantClient, collection: str) -> VectorParams:
    """Return how a collection that a hand-over has made stores vectors."""
    from qdrant_client import models

    vectors = client.get_collection(collection).config.params.vectors
    assert isinstance(vectors, models.VectorParams)
    return vectors


def _put(
    client: QdrantClient, collection: str, points: Sequence[str], batch: pa.RecordBatch
) -> int:
    """Insert or replace the rows of a batch; return the number of requests."""
    from qdrant_client import models

    vectors = matrix_of(batch)
    payloads = _payloads(batch)
    size = max(1, _VALUES // vectors.shape[1])
    starts = range(0, len(points), size)
    for start in starts:
        rows = slice(start, start + size)
        some = models.Batch(
            ids=list(points[rows]), vectors=vectors[rows].tolist(), payloads=payloads[rows]
        )
        client.upsert(collection, some)
    return len(starts)


def _payloads(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    """Return everything but the vectors, as JSON has it: bytes in hex, dates as text."""
    payloads = batch.drop_columns(["op", "embedding"])
    columns: dict[str, list[Any]] = {}
    for name in payloads.schema.names:
        column = payloads.column(name)
        values = column.to_pylist()
        if column.type in _BYTES:
            values = [None if value is None else value.hex() for value in values]
        elif pa.types.is_date32(column.type):
            values = [None if value is None else value.isoformat() for value in values]
        elif pa.types.is_floating(column.type):
            _require_numbers(batch, name, values)
        columns[name] = values
    rows = zip(*columns.values(), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _require_numbers(batch: pa.RecordBatch, name: str, values: Sequence[float | None]) -> None:
    for row, value in zip(batch.column("id").to_pylist(), values, strict=True):
        if value is not None and not isfinite(value):
            raise DataError(
                batch.column("partition")[0].as_py(),
                f"the column {name!r} of the row {row!r} is {value}, which Qdrant does not store",
                "Make it null in the source.",
            )


def _points_of(client: QdrantClient, collection: str, partition: str) -> Iterator[str]:
    """Yield the ids of a partition's points."""
    from qdrant_client import models

    key = models.FieldCondition(key="partition", match=models.MatchValue(value=partition))
    condition = models.Filter(must=[key])
    offset = None
    while True:
        points, offset = client.scroll(
            collection, condition, limit=_IDS, offset=offset, with_payload=False
        )
        for point in points:
            yield str(point.id)
        if offset is None:
            return


def _point_id(partition: str, row: object) -> str:
    digest = blake2b(repr((partition, row)).encode(), digest_size=16).digest()
    return str(UUID(bytes=digest))


def _is_storable(kind: pa.DataType) -> bool:
    return kind in (*_TEXTS, *_BYTES) or any(is_of(kind) for is_of in _STORABLE)


def _kind(column: pa.Field) -> str:
    """Return the type of a column, which a collection records."""
    if column.name == "embedding":
        return f"{column.type.value_type}[{column.type.list_size}]"  # pyright: ignore[reportAttributeAccessIssue]
    return str(column.type)
