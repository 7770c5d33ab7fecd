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

from surge_dagster.engine.derived.conversion import cut
from surge_dagster.engine.encoder.worker.backends.hash_backend import hash_vectors
from surge_dagster.engine.model.spec import EncodingSpec, Space
from surge_dagster.service.errors import UnknownSpace
from surge_dagster.service.lane import Encoded, LaneCounts
from surge_dagster.service.promise import Promise
from surge_dagster.service.spaces import ServedSpaces

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
    waiting_requests: int = 1
    is_alive: bool = True

    def accept(
        self,
        texts: Sequence[str],
        *,
        truncate: bool = False,
        answer: Future[Encoded] | None = None,
    ) -> Future[Encoded]:
        if self.failure:
            raise self.failure
        if len(texts) > 1 and self.gate:
            self.reached.put(texts[0])
            self.gate.wait()
        self.accepted.append(list(texts))
        future: Future[Encoded] = answer or Future()
        if future.cancelled():
            return future
        if self.holds:
            self.held.put(future)
        elif self.fails_later:
            future.set_exception(self.fails_later)
        else:
            future.set_result(self.encoded(texts))
        return future

    def expected_seconds(self) -> float:
        return 0.02

    def encoded(self, texts: Sequence[str]) -> Encoded:
        words = np.array([len(text.split()) for text in texts])
        vectors = hash_vectors([self.space.prompt + text for text in texts], DIMENSION)
        return Encoded(vectors, np.minimum(words, LONGEST), words > LONGEST)


@dataclass(eq=False)
class FakeSpace:
    space: Space
    queries: FakeLane
    documents: FakeLane
    state: str = "current"
    dimensions: tuple[int, ...] = (DIMENSION, 8)

    def converted(self, vectors: np.ndarray, dimensions: int | None) -> np.ndarray:
        return cut(vectors, replace(self.space, dimension=dimensions or self.space.dimension))


class FakeSpaces:
    """One space, whose queries have a prompt."""

    def __init__(self) -> None:
        space = EncodingSpec(f"hash://{DIMENSION}", query_prompt="find: ").resolve()
        promise = Promise(50_000.0, 512, 0.025)
        queries = FakeLane(replace(space, task="query"), promise)
        self.only = FakeSpace(space, queries, FakeLane(space))
        self.is_ready = self.is_alive = True
        self.calls: list[str] = []
        self.counts = {(space.name, task): LaneCounts() for task in ("query", "document")}

    def __enter__(self) -> FakeSpaces:
        return self

    def __exit__(self, *_: object) -> None:
        self.calls.append("close")

    def start(self) -> None:
        self.calls.append("start")

    def find(self, model: str) -> FakeSpace:
        if model in ("current", self.only.space.name, self.only.space.requested.model):
            return self.only
        raise UnknownSpace(model, [self.only.space.name])

    def served(self) -> list[FakeSpace]:
        return [self.only]

    def as_served(self) -> ServedSpaces:
        return cast(ServedSpaces, self)


def vectors_of(texts: Sequence[str], prompt: str = "find: ") -> list[list[float]]:
    """What a client gets for these texts as queries."""
    return hash_vectors([prompt + text for text in texts], DIMENSION).tolist()


def post(client: Any, path: str = "/v1/embeddings", /, **body: Any) -> Any:
    """The answer to a request for embeddings of the current space."""
    return client.post(path, json={"model": "current", "input": "a text"} | body)
