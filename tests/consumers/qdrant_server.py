"""A server on 127.0.0.1 with the HTTP interface of Qdrant, over Qdrant's own embedded mode.

It tests the requests of a hand-over as a client sends them: their JSON, their sizes, and the index
that a server needs for counts.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel
from qdrant_client import QdrantClient, models

from tests.http_server import Answer, Request, json_server

LARGEST_BODY = 32 * 1024 * 1024  # Qdrant's own limit


@dataclass(slots=True)
class QdrantServer:
    """The state of a server.

    Attributes:
        status: with which every request is answered; None answers it.
        keeps_metadata: of collections, as Qdrant does since its version 1.16.
        indexed: collections with an index of partitions.
    """

    url: str = ""
    status: int | None = None
    keeps_metadata: bool = True
    stored: QdrantClient = field(default_factory=lambda: QdrantClient(":memory:"))
    indexed: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, method: str, path: str, body: Any) -> Any:
        for route, action in _ROUTES.items():
            if found := re.fullmatch(route, f"{method} {path}"):
                return action(self, *found.groups(), **body)
        raise NotImplementedError(f"{method} {path}")

    def index(self, name: str, field_name: str, field_schema: str) -> dict[str, Any]:
        assert (field_name, field_schema) == ("partition", "keyword")
        self.indexed.add(name)
        return {"operation_id": 0, "status": "completed"}

    def facet(self, name: str, **given: Any) -> Any:
        if name not in self.indexed:
            raise ValueError("Bad request: index required")
        return self.stored.facet(name, **given)

    def retrieve(self, name: str, *, with_vector: bool, **given: Any) -> Any:
        return self.stored.retrieve(name, with_vectors=with_vector, **given)

    def scroll(self, name: str, *, with_vector: bool = False, **given: Any) -> Any:
        given["scroll_filter"] = models.Filter(**given.pop("filter", None) or {})
        points, following = self.stored.scroll(name, with_vectors=with_vector, **given)
        return {"points": _as_json(points), "next_page_offset": following}

    def query(self, name: str, **given: Any) -> Any:
        asked = models.QueryRequest(**given)
        return self.stored.query_points(
            name,
            asked.query,
            limit=asked.limit or 10,
            with_payload=given["with_payload"],
            with_vectors=given["with_vector"],
        )

    def delete(self, name: str, **selector: Any) -> Any:
        return self.stored.delete(name, models.PointIdsList(**selector))

    def upsert(self, name: str, batch: dict[str, Any]) -> Any:
        return self.stored.upsert(name, models.Batch(**batch))

    def create(self, name: str, **given: Any) -> Any:
        made = models.CreateCollection(**given)
        metadata = made.metadata if self.keeps_metadata else None
        return self.stored.create_collection(name, made.vectors, metadata=metadata)

    def switch(self, actions: list[Any]) -> Any:
        return self.stored.update_collection_aliases(
            models.ChangeAliasesOperation(actions=actions).actions
        )


_ROUTES: dict[str, Callable[..., Any]] = {
    r"GET /aliases": lambda server: server.stored.get_aliases(),
    r"POST /collections/aliases": QdrantServer.switch,
    r"GET /collections/([^/]+)/exists": lambda server, name: {
        "exists": server.stored.collection_exists(name)
    },
    r"GET /collections/([^/]+)": lambda server, name: server.stored.get_collection(name),
    r"PUT /collections/([^/]+)": QdrantServer.create,
    r"PATCH /collections/([^/]+)": lambda server, name, **given: server.stored.update_collection(
        name, metadata=given["metadata"]
    ),
    r"DELETE /collections/([^/]+)": lambda server, name: server.stored.delete_collection(name),
    r"PUT /collections/([^/]+)/index": QdrantServer.index,
    r"POST /collections/([^/]+)/facet": QdrantServer.facet,
    r"PUT /collections/([^/]+)/points": QdrantServer.upsert,
    r"POST /collections/([^/]+)/points": QdrantServer.retrieve,
    r"POST /collections/([^/]+)/points/query": QdrantServer.query,
    r"POST /collections/([^/]+)/points/scroll": QdrantServer.scroll,
    r"POST /collections/([^/]+)/points/delete": QdrantServer.delete,
}


def _as_json(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(_as_json, value))
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value


@contextmanager
def qdrant_server(api_key: str) -> Iterator[QdrantServer]:
    state = QdrantServer()

    def answer(request: Request) -> Answer:
        assert len(request.body) <= LARGEST_BODY
        status = state.status or 200
        if request.headers.get("api-key") != api_key:
            status = 401
        result = None
        if status == 200:
            given = {name: value for name, value in request.document.items() if value is not None}
            with state.lock:
                result = state.answer(request.method, request.path.partition("?")[0], given)
        return Answer({"result": _as_json(result), "status": "ok", "time": 0.0}, status)

    with json_server(answer) as state.url:
        yield state
