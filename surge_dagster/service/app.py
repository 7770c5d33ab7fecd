"""The HTTP application: OpenAI's embeddings and models, health and metrics.

The lane hands back a future, so no thread waits for an encoder. Tokens of large requests are counted in threads, and
large answers are written there.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from surge_dagster.engine.errors import SurgeError
from surge_dagster.engine.model.prompts import Task
from surge_dagster.service.answers import ModelList, embeddings_body, model_of, row_ranges
from surge_dagster.service.batch_routes import batch_routes
from surge_dagster.service.batches import Batches
from surge_dagster.service.bodies import BodyLimit, require_type
from surge_dagster.service.errors import LaneClosed, answer_error, error_response
from surge_dagster.service.keys import ApiKeys
from surge_dagster.service.lane import Encoded, Lane
from surge_dagster.service.metrics import Metrics
from surge_dagster.service.openapi import openapi_document
from surge_dagster.service.requests import EmbeddingRequest, parse_request, require_offered
from surge_dagster.service.settings import ServiceSettings
from surge_dagster.service.spaces import ServedSpace, ServedSpaces

_JSON = "application/json"
_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_PROBES = ("/healthz", "/readyz")
# Bytes of a body, and numbers of an answer, that take about two milliseconds.
_LARGE_BODY, _LARGE_ANSWER = 4 * 1024, 16 * 1024
_CLIENT_GONE = 499
T = TypeVar("T")


def service_app(spaces: ServedSpaces, settings: ServiceSettings) -> Starlette:
    """The application; while `app.state.is_ending()`, it answers that no more requests should be sent here.

    `app.state.batches` is the caller's to start, when the spaces are, and to close before them; None without a folder.

    Args:
        spaces: started by the caller, who also closes them.

    Raises:
        ConfigError: the file of API keys is wrong, or the folder of batches.
    """
    endpoints = _Endpoints(spaces, settings)
    batches = Batches(spaces, settings.batches) if settings.batches else None
    routes = [
        Route("/healthz", endpoints.health),
        Route("/readyz", endpoints.readiness),
        Route("/metrics", endpoints.metrics_text),
        Route("/openapi.json", endpoints.openapi),
    ]
    roots: dict[str, Task] = {"/v1": "query", "/documents/v1": "document"}
    for root, task in roots.items():
        routes += [
            Route(f"{root}/embeddings", partial(endpoints.embeddings, task=task), methods=["POST"]),
            Route(f"{root}/models", endpoints.models),
            Route(f"{root}/models/{{model:path}}", endpoints.model),
            *batch_routes(root, task, batches),
        ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(_Gate, endpoints=endpoints), Middleware(BodyLimit, settings=settings)],
        exception_handlers=dict.fromkeys((SurgeError, HTTPException, Exception), answer_error)
        | {ClientDisconnect: _answer_nobody},
    )
    app.router.redirect_slashes = False
    app.state.batches = batches
    app.state.is_ending = lambda: False
    return app


@dataclass(frozen=True, slots=True)
class _Begun:
    """What is needed of a request whose texts a lane has."""

    served: ServedSpace
    lane: Lane
    received_at: float
    dimensions: int | None
    encoding_format: str | None


class _Endpoints:
    def __init__(self, spaces: ServedSpaces, settings: ServiceSettings) -> None:
        self._spaces = spaces
        # Queries have threads of their own: the tokens of documents take seconds.
        self._accepting = {"query": ThreadPoolExecutor(2, "queries"), "document": ThreadPoolExecutor(1, "documents")}
        self._began = int(time.time())
        self.keys = ApiKeys(settings.api_keys) if settings.api_keys else None
        self._document = openapi_document(needs_key=self.keys is not None)
        self.metrics = Metrics(spaces)

    async def embeddings(self, request: Request, task: Task) -> Response:
        answer = Future[Encoded]()
        try:
            asked = request.state.begun = await self._begun(request, task, answer)
            encoded = await _unless_left(request, asyncio.wrap_future(answer))
        finally:
            answer.cancel()  # which drops its texts, however far they have come

        def write() -> bytes:
            vectors = asked.served.converted(encoded.vectors, asked.dimensions)
            return embeddings_body(vectors, asked.encoding_format, space, int(encoded.tokens.sum()))

        space = asked.served.space.name
        headers = {"surge-space": space}
        if rows := row_ranges(encoded.truncated):
            headers["surge-truncated-rows"] = rows
        if encoded.vectors.size > _LARGE_ANSWER:
            content = await asyncio.to_thread(write)
        else:
            content = write()
        return Response(content, headers=headers, media_type=_JSON)

    async def _begun(self, request: Request, task: Task, answer: Future[Encoded]) -> _Begun:
        """Reads the request, and puts its texts into the queue of their lane."""
        require_type(request, "application/json")
        body = await request.body()
        received_at = time.monotonic()
        asked = parse_request(body)
        begin = partial(self._begin, asked, task=task, received_at=received_at, answer=answer)
        if len(body) <= _LARGE_BODY:
            return begin()
        threads = self._accepting[asked.input_type or task]
        return await _unless_left(request, asyncio.get_running_loop().run_in_executor(threads, begin))

    def _begin(self, asked: EmbeddingRequest, task: Task, received_at: float, answer: Future[Encoded]) -> _Begun:
        served = self._spaces.find(asked.model)
        task = asked.input_type or task
        require_offered(asked, served, task)
        lane = served.queries if task == "query" else served.documents
        lane.accept(asked.texts, truncate=asked.truncate is True, answer=answer)
        return _Begun(served, lane, received_at, asked.dimensions, asked.encoding_format)

    async def models(self, request: Request) -> Response:
        models = [model_of(served, self._began) for served in self._spaces.served()]
        return Response(ModelList(data=models).model_dump_json(), media_type=_JSON)

    async def model(self, request: Request) -> Response:
        served = self._spaces.find(request.path_params["model"])
        return Response(model_of(served, self._began).model_dump_json(), media_type=_JSON)

    async def health(self, request: Request) -> Response:
        return _status(self._spaces.is_alive, "no worker encodes queries of the current space", "encoder_down")

    async def readiness(self, request: Request) -> Response:
        if request.app.state.is_ending():
            return _status(False, "the service shuts down", "shutting_down")
        return _status(self._spaces.is_ready, "the current space cannot be queried yet", "space_loading")

    async def metrics_text(self, request: Request) -> Response:
        return Response(self.metrics.text(), headers={"content-type": _PROMETHEUS})

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(self._document)


async def _unless_left(request: Request, step: asyncio.Future[T]) -> T:
    """Return the result of a step for a request whose body was read.

    Raises:
        ClientDisconnect: the client has closed its connection.
        LaneClosed: the service ends before the step does.
    """
    leaving = asyncio.ensure_future(request.receive())  # only a disconnect can come
    try:
        await asyncio.wait((step, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not step.done():
            raise ClientDisconnect
        return step.result()
    except asyncio.CancelledError:  # uvicorn's, when the time to drain is over
        raise LaneClosed("the service ends before this request can be answered") from None
    finally:
        step.cancel()
        leaving.cancel()


def _status(is_well: bool, problem: str, code: str) -> Response:
    return JSONResponse({"status": "ok"}) if is_well else error_response(503, problem, code)


async def _answer_nobody(request: Request, error: Exception | None) -> Response:
    return Response(status_code=_CLIENT_GONE)


class _Gate:
    """Asks for the API key, counts requests when they are answered, and ends connections while the service drains."""

    def __init__(self, app: ASGIApp, endpoints: _Endpoints) -> None:
        self._app, self._keys, self._metrics = app, endpoints.keys, endpoints.metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun, status = time.perf_counter(), 500

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if scope["app"].state.is_ending():
                    MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        app = self._app if scope["path"] in _PROBES or self._has_key(scope) else _unauthorized
        try:
            await app(scope, receive, watched)
        finally:
            endpoint = getattr(scope.get("route"), "path", "other")
            self._metrics.count(endpoint, status, time.perf_counter() - begun)
            if (accepted := scope.get("state", {}).get("begun")) is not None:
                self._metrics.count_accepted(accepted.lane, time.monotonic() - accepted.received_at)

    def _has_key(self, scope: Scope) -> bool:
        if self._keys is None:
            return True
        scheme, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and self._keys.accept(key.strip())


async def _unauthorized(scope: Scope, receive: Receive, send: Send) -> None:
    message = "The request has no API key that is known here. Send the header Authorization: Bearer KEY."
    headers = {"www-authenticate": "Bearer", "connection": "close"}
    await error_response(401, message, "invalid_api_key", headers=headers)(scope, receive, send)
