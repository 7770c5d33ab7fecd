"""The HTTP application: OpenAI's embeddings and models, health and metrics.

The lane hands back a future, so no thread waits for an encoder. Tokens of large requests are
counted in threads, and large answers are written there.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, Depends, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPBearer
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from surge_dagster.engine.errors import SurgeError
from surge_dagster.engine.model.prompts import Task
from surge_dagster.service.answers import (
    ANY_REFUSAL,
    OF_VECTORS,
    EmbeddingList,
    Model,
    ModelList,
    embeddings_body,
    model_of,
    row_ranges,
)
from surge_dagster.service.batch_routes import batch_router
from surge_dagster.service.batches import Batches
from surge_dagster.service.bodies import BodyLimit, require_json
from surge_dagster.service.errors import LaneClosed, answer_error, error_response, refusal_response
from surge_dagster.service.keys import ApiKeys
from surge_dagster.service.lane import Encoded, Lane
from surge_dagster.service.metrics import Metrics
from surge_dagster.service.requests import EmbeddingRequest, require_offered, wrong_body
from surge_dagster.service.settings import ServiceSettings
from surge_dagster.service.spaces import ServedSpace, ServedSpaces
from surge_dagster.version import __version__

_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_PROBES = ("/healthz", "/readyz")
# Characters of texts, and numbers of an answer, that take about two milliseconds.
_LARGE_REQUEST, _LARGE_ANSWER = 4 * 1024, 16 * 1024
_CLIENT_GONE = 499
T = TypeVar("T")


def service_app(spaces: ServedSpaces, settings: ServiceSettings) -> FastAPI:
    """Return the application; while `app.state.is_ending()`, it answers that no more requests
    should be sent here.

    `app.state.batches` is the caller's to start, when the spaces are, and to close before them;
    None without a folder.

    Args:
        spaces: started by the caller, who also closes them.

    Raises:
        ConfigError: the file of API keys is wrong, or the folder of batches.
    """
    keys = ApiKeys(settings.api_keys) if settings.api_keys else None
    batches = Batches(spaces, settings.batches) if settings.batches else None
    metrics = Metrics(spaces)
    app = FastAPI(
        title="surge-dagster",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        middleware=[
            Middleware(_Gate, keys=keys, metrics=metrics),
            Middleware(BodyLimit, settings=settings),
        ],
        exception_handlers={
            SurgeError: answer_error,
            HTTPException: answer_error,
            Exception: answer_error,
            RequestValidationError: _answer_wrong_body,
            ClientDisconnect: _answer_nobody,
        },
    )
    app.state.batches = batches
    app.state.is_ending = lambda: False

    probes = _Probes(spaces, metrics)
    app.add_api_route("/healthz", probes.health, responses=ANY_REFUSAL)
    app.add_api_route("/readyz", probes.readiness, responses=ANY_REFUSAL)

    # The gate checks keys, before a body is read; this is for the OpenAPI document.
    with_key = [Depends(HTTPBearer(auto_error=False))] if keys else []
    kept = APIRouter(dependencies=with_key, responses=ANY_REFUSAL)
    kept.add_api_route("/metrics", probes.metrics_text, response_class=PlainTextResponse)
    roots: dict[str, Task] = {"/v1": "query", "/documents/v1": "document"}
    accepting = _accepting_threads()
    for root, task in roots.items():
        endpoints = _Endpoints(spaces, task, accepting)
        kept.add_api_route(
            f"{root}/embeddings",
            endpoints.embeddings,
            methods=["POST"],
            summary=f"encode texts, by default as {task}",
            response_model=EmbeddingList,
            responses=OF_VECTORS,
            dependencies=[Depends(require_json)],
        )
        kept.add_api_route(f"{root}/models", endpoints.models)
        kept.add_api_route(f"{root}/models/{{name:path}}", endpoints.model)
        kept.include_router(batch_router(batches, task), prefix=root)
    app.include_router(kept)
    return app


def _accepting_threads() -> dict[Task, ThreadPoolExecutor]:
    """Return threads that count tokens; those of documents take seconds, and must keep no query
    waiting."""
    return {
        "query": ThreadPoolExecutor(2, "queries"),
        "document": ThreadPoolExecutor(1, "documents"),
    }


@dataclass(frozen=True, slots=True)
class _Begun:
    """What is needed of a request whose texts a lane has."""

    served: ServedSpace
    lane: Lane
    received_at: float


class _Endpoints:
    """The endpoints below a base URL, whose texts are of this task unless they say otherwise."""

    def __init__(
        self, spaces: ServedSpaces, task: Task, accepting: dict[Task, ThreadPoolExecutor]
    ) -> None:
        self._spaces = spaces
        self._task: Task = task
        self._accepting = accepting
        self._began = int(time.time())

    async def embeddings(self, request: Request, asked: EmbeddingRequest) -> Response:
        answer = Future[Encoded]()
        try:
            begun = request.state.begun = await self._begun(request, asked, answer)
            encoded = await _unless_left(request, asyncio.wrap_future(answer))
        finally:
            answer.cancel()  # which drops its texts, however far they have come

        space = begun.served.space.name

        def write() -> bytes:
            vectors = begun.served.converted(encoded.vectors, asked.dimensions)
            return embeddings_body(vectors, asked.encoding_format, space, int(encoded.tokens.sum()))

        headers = {"surge-space": space}
        if rows := row_ranges(encoded.truncated):
            headers["surge-truncated-rows"] = rows
        if encoded.vectors.size > _LARGE_ANSWER:
            content = await asyncio.to_thread(write)
        else:
            content = write()
        return Response(content, headers=headers, media_type="application/json")

    async def _begun(
        self, request: Request, asked: EmbeddingRequest, answer: Future[Encoded]
    ) -> _Begun:
        """Put the texts of a request into the queue of their lane."""
        begin = partial(self._begin, asked, answer, time.monotonic())
        if sum(map(len, asked.texts)) <= _LARGE_REQUEST:
            return begin()
        threads = self._accepting[asked.input_type or self._task]
        return await _unless_left(
            request, asyncio.get_running_loop().run_in_executor(threads, begin)
        )

    def _begin(
        self, asked: EmbeddingRequest, answer: Future[Encoded], received_at: float
    ) -> _Begun:
        served = self._spaces.find(asked.model)
        task = asked.input_type or self._task
        require_offered(asked, served, task)
        lane = served.queries if task == "query" else served.documents
        lane.accept(asked.texts, truncate=asked.truncate is True, answer=answer)
        return _Begun(served, lane, received_at)

    async def models(self) -> ModelList:
        """List the spaces that are served."""
        return ModelList(data=[model_of(served, self._began) for served in self._spaces.served()])

    async def model(self, name: str) -> Model:
        """Describe the space of this name or of this model."""
        return model_of(self._spaces.find(name), self._began)


class _Probes:
    def __init__(self, spaces: ServedSpaces, metrics: Metrics) -> None:
        self._spaces = spaces
        self._metrics = metrics

    async def health(self) -> Response:
        """Tell whether queries can be encoded."""
        return _status(
            self._spaces.is_alive, "no worker encodes queries of the current space", "encoder_down"
        )

    async def readiness(self, request: Request) -> Response:
        """Tell whether to send requests here."""
        if request.app.state.is_ending():
            return _status(False, "the service shuts down", "shutting_down")
        return _status(
            self._spaces.is_ready, "the current space cannot be queried yet", "space_loading"
        )

    async def metrics_text(self) -> Response:
        """Return metrics of Prometheus."""
        return Response(self._metrics.text(), headers={"content-type": _PROMETHEUS})


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


async def _answer_wrong_body(request: Request, error: Any) -> Response:
    return refusal_response(wrong_body(error.errors()))


async def _answer_nobody(request: Request, error: Exception | None) -> Response:
    return Response(status_code=_CLIENT_GONE)


class _Gate:
    """Asks for the API key, counts requests when they are answered, and ends connections while the
    service drains."""

    def __init__(self, app: ASGIApp, keys: ApiKeys | None, metrics: Metrics) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        begun_at = time.perf_counter()
        status = 500

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
            self._metrics.count(endpoint, status, time.perf_counter() - begun_at)
            accepted = scope.get("state", {}).get("begun")
            if accepted is not None:
                self._metrics.count_accepted(accepted.lane, time.monotonic() - accepted.received_at)

    def _has_key(self, scope: Scope) -> bool:
        if self._keys is None:
            return True
        scheme, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        return scheme.lower() == b"bearer" and self._keys.accept(key.strip())


async def _unauthorized(scope: Scope, receive: Receive, send: Send) -> None:
    message = (
        "The request has no API key that is known here. Send the header Authorization: Bearer KEY."
    )
    headers = {"www-authenticate": "Bearer", "connection": "close"}
    await error_response(401, message, "invalid_api_key", headers=headers)(scope, receive, send)
