"""A server with `/v1/embeddings` in a thread of the tests, with the faults that a test asks for.

Its vectors are hashes of the texts. Faults of single requests are queued with `faults`, and are
answered in the order in which requests come; faults of texts stand in the texts.
"""

from __future__ import annotations

import asyncio
import base64
import socket
import threading
from collections import Counter, deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from surge_dagster.engine.encoder.worker.backends import hash_vectors
from surge_dagster.engine.endpoint.probes import PROBE_TEXTS

MODEL = "hash-model"
REFUSED = "never accepted"
NOT_FINITE = "not finite"
TOO_SHORT = "too short"
OTHER_MODEL = "other model"
PROBE_OF_REQUESTS = PROBE_TEXTS[0]


@dataclass(slots=True)
class FaultServer:
    """The state of a server; tests change it between requests.

    Attributes:
        faults: of the next requests: None, a status, "reset", "fewer", "garbage", "shuffled",
            `OTHER_MODEL`, or "held", which is answered when `lasting_fault` is another one.
        lasting_fault: of all requests after those.
        retry_after: the header of 429 and 503.
        seed: of the model; another one is another model.
        gives_nan: for `NOT_FINITE`.
        encoded: how often each input was answered with 200, without the probes of requests.
        bodies: of all requests.
        most_under_way: requests at the same time.
        held_until: no request is answered before so many are under way.
    """

    url: str = ""
    dimension: int = 16
    seed: str = ""
    faults: deque[int | str | None] = field(default_factory=deque)
    lasting_fault: int | str | None = None
    retry_after: str | None = "0"
    key: str | None = None
    most_inputs: int = 2_048
    gives_nan: bool = True
    has_usage: bool = True
    encoded: Counter[str] = field(default_factory=Counter)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    under_way: int = 0
    most_under_way: int = 0
    held_until: int = 0
    _held: asyncio.Event = field(default_factory=asyncio.Event)

    def vectors(self, texts: list[str]) -> np.ndarray:
        return hash_vectors([self.seed + text for text in texts], self.dimension)

    def tokens_of(self, texts: Collection[str]) -> int:
        """The tokens of all requests that have one of these texts, with their probes."""
        inputs = [body["input"] for body in self.bodies if body["input"][0] in texts]
        return sum(len(text) for request in inputs for text in request)

    async def answer(self, request: Request) -> Response:
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        if self.under_way >= self.held_until:
            self._held.set()
        try:
            await self._held.wait()
            return await self._answer(request)
        finally:
            self.under_way -= 1

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        fault = self.faults.popleft() if self.faults else self.lasting_fault
        if self.key is not None and request.headers.get("authorization") != f"Bearer {self.key}":
            fault = 401
        if fault == "reset":
            cycle: Any = request.receive  # a method of uvicorn's, which has the connection
            cycle.__self__.transport.abort()
            return Response()
        while fault == "held":
            await asyncio.sleep(0.01)
            fault = "held" if self.lasting_fault == "held" else None
        if isinstance(fault, int):
            headers = {} if self.retry_after is None else {"Retry-After": self.retry_after}
            return JSONResponse({"error": {"message": "as told"}}, fault, headers)
        texts = body["input"]
        refused = [text for text in texts if REFUSED in text]
        if refused or len(texts) > self.most_inputs:
            message = f"an input cannot be encoded: {refused[:1]}"
            return JSONResponse({"error": {"message": message}}, 400)
        self.encoded.update(without_probe(texts))
        if fault == "garbage":
            return Response(b"<html>", 200)
        return JSONResponse(self._document(texts, body.get("dimensions"), fault))

    def _document(self, texts: list[str], dimensions: int | None, fault: str | None) -> Any:
        data: list[dict[str, Any]] = []
        vectors = self.vectors(texts)
        if fault == OTHER_MODEL:
            vectors = self.vectors([f"other {text}" for text in texts])
        for index, vector in enumerate(vectors[:, :dimensions]):
            if self.gives_nan and NOT_FINITE in texts[index]:
                vector = np.full_like(vector, np.nan)
            if TOO_SHORT in texts[index]:
                vector = vector[:-1]
            content = base64.b64encode(vector.astype("<f4")).decode()
            data.append({"object": "embedding", "index": index, "embedding": content})
        if fault == "fewer":
            data = data[:-1]
        if fault == "shuffled":
            data = data[::-1]
        document: dict[str, Any] = {"object": "list", "data": data, "model": MODEL}
        if self.has_usage:
            tokens = sum(map(len, texts))
            document["usage"] = {"prompt_tokens": tokens, "total_tokens": tokens}
        return document


def without_probe(inputs: list[str]) -> list[str]:
    """Return the inputs of a request without the probe, which is the last one of those of a run."""
    return inputs[:-1] if inputs[-1].endswith(PROBE_OF_REQUESTS) else inputs


@contextmanager
def fault_server(**settings: Any) -> Iterator[FaultServer]:
    """Yield a running server on a free port of this machine."""
    state = FaultServer(**settings)
    app = Starlette(routes=[Route("/v1/embeddings", state.answer, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        state.url = "http://{}:{}/v1".format(*listener.getsockname())
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield state
        finally:
            server.force_exit = True
            server.should_exit = True
            thread.join()
