"""Served spaces without workers: vectors come from a hash of the text, and a test decides what
becomes of a request."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, cast

import numpy as np

from surge_dagster.engine.encoder.worker.backends import hash_vectors
from surge_dagster.engine.model.spec import EncodingSpec, Space
from surge_dagster.service.errors import Refusal
from surge_dagster.service.lane import Encoded, Promise, promise_of
from surge_dagster.service.spaces import LaneSettings, ServedSpaces

DIMENSION = 16
LONGEST = 8  # words


@dataclass(eq=False)
class FakeLane:
    """Answers at once; raises `failure`, fails its futures, or holds them while `holds` is set.

    A request of several texts waits for the `gate` before it is accepted, and puts the first of
    them into `reached`.
    """

    space: Space
    promise: Promise | None = None
    failure: Exception | None = None
    fails_later: Exception | None = None
    holds: bool = False
    held: SimpleQueue[Future[Encoded]] = field(default_factory=SimpleQueue)
    gate: threading.Event | None = None
    reached: SimpleQueue[str] = field(default_factory=SimpleQueue)
    accepted: list[list[str]] = field(default_factory=list)
    waiting_tokens: int = 5
    waiting_texts: int = 1
    texts: int = 7
    tokens: int = 0
    passes: int = 0
    is_alive: bool = True
    arrived_at: float = 0.0

    def accept(
        self, texts: list[str], *, future: Future[Encoded], arrived_at: float, **_: Any
    ) -> Future[Encoded]:
        self.arrived_at = arrived_at
        if self.failure:
            raise self.failure
        if len(texts) > 1 and self.gate:
            self.reached.put(texts[0])
            self.gate.wait()
        self.accepted.append(texts)
        if future.cancelled():
            return future
        if self.holds:
            self.held.put(future)
        elif self.fails_later:
            future.set_exception(self.fails_later)
        else:
            future.set_result(self.encoded(texts))
        return future

    def encoded(self, texts: list[str]) -> Encoded:
        words = np.array([len(text.split()) for text in texts])
        dimension = self.space.dimension
        vectors = hash_vectors([self.space.prompt + text for text in texts], dimension)
        return Encoded(vectors, int(np.minimum(words, LONGEST).sum()), words > LONGEST)


@dataclass(eq=False)
class FakeSpace:
    space: Space
    queries: FakeLane
    documents: FakeLane
    state: str = "current"
    dimensions: tuple[int, ...] = (DIMENSION, 8)


class FakeSpaces:
    """One space, whose queries have a prompt.

    Attributes:
        store: an output with that space, for batches.
    """

    def __init__(self, store: Any = None, dimension: int = DIMENSION) -> None:
        space = EncodingSpec(f"hash://{dimension}", query_prompt="find: ").resolve()
        queries = FakeLane(replace(space, task="query"), promise_of(50_000.0, 512, 60.0))
        self.only = FakeSpace(space, queries, FakeLane(space))
        self.served = [self.only]
        self.is_ready = True
        self.is_alive = True
        self.store = store
        self.settings = LaneSettings("cpu")
        self.calls: list[str] = []

    def __enter__(self) -> FakeSpaces:
        return self

    def __exit__(self, *_: object) -> None:
        self.calls.append("close")

    def start(self) -> None:
        self.calls.append("start")

    def find(self, model: str) -> FakeSpace:
        if model in ("current", self.only.space.name, self.only.space.requested.model):
            return self.only
        message = f"The model {model!r} is not served. Use {self.only.space.name}."
        raise Refusal(404, "model_not_found", message, "model")

    def as_served(self) -> ServedSpaces:
        return cast(ServedSpaces, self)


def vectors_of(texts: Sequence[str], prompt: str = "find: ") -> list[list[float]]:
    """Return what a client gets for these texts, by default as queries."""
    return hash_vectors([prompt + text for text in texts], DIMENSION).tolist()


def error_of(answer: Any, status: int) -> dict[str, Any]:
    """Return the error of an answer with this status."""
    assert answer.status_code == status
    return answer.json()["error"]


def post(client: Any, path: str = "/v1/embeddings", /, **body: Any) -> Any:
    """Return the answer to a request for embeddings of the current space."""
    return client.post(path, json={"model": "current", "input": "a text"} | body)
