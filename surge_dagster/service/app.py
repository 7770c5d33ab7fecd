"""The HTTP application: OpenAI's embeddings and models, files and batches, health and metrics.

A lane returns a future, so no thread waits for an encoder. Large requests are tokenized in threads,
and large answers are written there.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from fastapi import APIRouter, Depends, FastAPI
from fastapi.security import HTTPBearer
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response

from surge_dagster.engine.model.prompts import Task
from surge_dagster.service import batch_routes
from surge_dagster.service.answers import (
    ANY_REFUSAL,
    EmbeddingList,
    Model,
    ModelList,
    Status,
    embedding_list,
    model_of,
    row_ranges,
)
from surge_dagster.service.batches import Batches
from surge_dagster.service.errors import HANDLERS, Refusal
from surge_dagster.service.gate import Gate
from surge_dagster.service.keys import ApiKeys
from surge_dagster.service.lane import Encoded
from surge_dagster.service.metrics import ACCEPTED, Metrics
from surge_dagster.service.requests import EmbeddingRequest, require_offered
from surge_dagster.service.settings import ServiceSettings
from surge_dagster.service.spaces import ServedSpace, ServedSpaces, converted
from surge_dagster.version import __version__

_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
# Characters of texts, and numbers of an answer, that take about two milliseconds.
_LARGE_REQUEST = 4 * 1024
_LARGE_ANSWER = 16 * 1024
_ROOTS: dict[str, Task] = {"/v1": "query", "/documents/v1": "document"}
T = TypeVar("T")


def service_app(spaces: ServedSpaces, settings: ServiceSettings) -> FastAPI:
    """Return the application; while `app.state.is_ending()`, it ends connections.

    The caller starts `app.state.batches`, when the spaces are started, and closes it before them;
    None without a folder.

    Args:
        spaces: started by the caller, who also closes them.

    Raises:
        ConfigError: the file of API keys is wrong, or the folder of batches.
    """
    keys = ApiKeys(settings.api_keys) if settings.api_keys else None
    metrics = Metrics(spaces)
    app = FastAPI(
        title="surge-dagster",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        max_body_size=settings.max_body_bytes,
        middleware=[Middleware(Gate, keys=keys, metrics=metrics)],
        exception_handlers=HANDLERS,
    )
    app.state.batches = Batches(spaces, settings.batches) if settings.batches else None
    app.state.is_ending = lambda: False
    _add_probes(app, spaces)

    # The gate checks keys, before a body is read; this is for the OpenAPI document.
    with_key = [Depends(HTTPBearer(auto_error=False))] if keys else []
    router = APIRouter(dependencies=with_key, responses=ANY_REFUSAL)

    @router.get("/metrics", response_class=PlainTextResponse)
    async def read_metrics() -> Response:
        """Return metrics of Prometheus."""
        return Response(metrics.text(), headers={"content-type": _PROMETHEUS})

    # The threads for documents are busy for seconds, and must keep no query waiting.
    threads: dict[Task, Executor] = {
        "query": ThreadPoolExecutor(2, "queries"),
        "document": ThreadPoolExecutor(1, "documents"),
    }
    for root, task in _ROOTS.items():
        router.include_router(_embeddings_router(spaces, root, task, threads))
        router.include_router(batch_routes.router, prefix=root)
    app.include_router(router)
    return app


def _add_probes(app: FastAPI, spaces: ServedSpaces) -> None:
    @app.get("/healthz", responses=ANY_REFUSAL)
    async def health() -> Status:
        """Tell whether queries can be encoded."""
        if not spaces.is_alive:
            message = "No worker encodes queries of the current space."
            raise Refusal(503, "encoder_down", message)
        return Status()

    @app.get("/readyz", responses=ANY_REFUSAL)
    async def readiness() -> Status:
        """Tell whether to send requests here."""
        if not spaces.is_ready:
            message = "The current space cannot be queried yet."
            raise Refusal(503, "space_loading", message)
        return Status()


def _embeddings_router(
    spaces: ServedSpaces, root: str, root_task: Task, threads: dict[Task, Executor]
) -> APIRouter:
    router = APIRouter(prefix=root)
    began = int(time.time())

    @router.post("/embeddings", response_model=EmbeddingList)
    async def embeddings(request: Request, body: EmbeddingRequest) -> Response:
        """Encode texts; the path says whether as queries or as documents."""
        received_at = time.monotonic()
        served = spaces.find(body.model)
        require_offered(body, served)
        task = body.input_type or root_task
        lane = served.queries if task == "query" else served.documents
        answer = Future[Encoded]()
        accept = partial(lane.accept, body.input, truncate=body.truncate is True, answer=answer)
        try:
            if sum(map(len, body.input)) <= _LARGE_REQUEST:
                accept()
            else:
                loop = asyncio.get_running_loop()
                await _unless_gone(request, loop.run_in_executor(threads[task], accept))
            setattr(request.state, ACCEPTED, (lane, received_at))
            encoded = await _unless_gone(request, asyncio.wrap_future(answer))
        finally:
            answer.cancel()  # which drops its texts, however far they have come

        write = partial(_written, served, body, encoded)
        if encoded.vectors.size > _LARGE_ANSWER:
            return await asyncio.to_thread(write)
        return write()

    @router.get("/models")
    async def models() -> ModelList:
        """List the spaces that are served."""
        return ModelList(data=[model_of(served, began) for served in spaces.served()])

    @router.get("/models/{name:path}")
    async def model(name: str) -> Model:
        """Describe the space of this name or of this model."""
        return model_of(spaces.find(name), began)

    return router


def _written(served: ServedSpace, body: EmbeddingRequest, encoded: Encoded) -> Response:
    space = served.space.name
    vectors = converted(served.space, encoded.vectors, body.dimensions)
    answer = embedding_list(vectors, body.encoding_format, space, encoded.tokens)
    headers = {"surge-space": space}
    rows = row_ranges(encoded.truncated)
    if rows:
        headers["surge-truncated-rows"] = rows
    return Response(answer.model_dump_json(), headers=headers, media_type="application/json")


async def _unless_gone(request: Request, step: asyncio.Future[T]) -> T:
    """Return the result of a step for a request whose body was read.

    Raises:
        ClientDisconnect: the client has closed its connection.
        Refusal: the service ends before the step does.
    """
    leaving = asyncio.ensure_future(request.receive())  # only a disconnect can come
    try:
        await asyncio.wait((step, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not step.done():
            raise ClientDisconnect
        return step.result()
    except asyncio.CancelledError:  # by uvicorn, when the time to drain is over
        message = "The service ends before this request is answered. Send it again."
        raise Refusal(503, "shutting_down", message) from None
    finally:
        step.cancel()
        leaving.cancel()
