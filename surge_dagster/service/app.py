"""The HTTP application: OpenAI's embeddings and models, files and batches, health and metrics."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter, Depends, FastAPI
from fastapi.security import HTTPBearer
from pydantic import BaseModel
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse, Response

from surge_dagster.service import batch_routes, embeddings
from surge_dagster.service.batches import Batches
from surge_dagster.service.embeddings import ROOTS, HeldAnswers, Serving
from surge_dagster.service.errors import HANDLERS, Error, Refusal
from surge_dagster.service.gate import ApiKeys, Gate, Metrics
from surge_dagster.service.spaces import ServedSpaces
from surge_dagster.version import __version__

_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
# Of each operation, for the OpenAPI document.
_ANY_REFUSAL: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "refused; 429 has the header Retry-After", "model": Error},
    "5XX": {"description": "failed; 503 has the header Retry-After", "model": Error},
}


class Status(BaseModel):
    status: Literal["ok"] = "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSettings:
    """Where the service listens, and its limits.

    Attributes:
        port: 0 takes a free one.
        uds: path of a Unix socket, which is bound in place of `host` and `port`.
        api_keys: file of digests, see `ApiKeys`; without one only this machine is served.
        batches: folder for files and batches; without one there are none.
        max_answer_bytes: of the vectors of all answers that are not sent yet.
        max_connections: at a time; below the 1,024 descriptors that Linux gives a process by
            default.
        idle_seconds: between two requests of a connection; more than the 60 s of nginx.
        drain_seconds: time after SIGTERM for the answers to requests that were accepted.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    uds: Path | None = None
    api_keys: Path | None = None
    batches: Path | None = None
    max_body_bytes: int = 8 * 1024 * 1024
    max_answer_bytes: int = 512 * 1024 * 1024
    max_header_bytes: int = 16 * 1024
    max_connections: int = 900
    idle_seconds: int = 75
    drain_seconds: int = 25


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
    gate = Middleware(Gate, spaces, keys, metrics, is_private=settings.uds is not None)
    app = FastAPI(
        title="surge-dagster",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        max_body_size=settings.max_body_bytes,
        middleware=[gate],
        exception_handlers=HANDLERS,
        responses=_ANY_REFUSAL,
    )
    app.state.batches = Batches(spaces, settings.batches) if settings.batches else None
    app.state.is_ending = lambda: False
    app.state.serving = Serving(
        spaces,
        HeldAnswers(settings.max_answer_bytes),
        {"query": ThreadPoolExecutor(2, "queries"), "document": ThreadPoolExecutor(1, "documents")},
        began=int(time.time()),
    )
    _include_routes(app, spaces, metrics, has_keys=keys is not None)
    return app


def _include_routes(
    app: FastAPI, spaces: ServedSpaces, metrics: Metrics, *, has_keys: bool
) -> None:
    # The gate checks keys, before a body is read; this is for the OpenAPI document.
    with_key = [Depends(HTTPBearer(auto_error=False))] if has_keys else []
    for root in ROOTS:  # first, because routes are compared in their order
        app.include_router(embeddings.router, prefix=root, dependencies=with_key)
    for root in ROOTS:
        app.include_router(batch_routes.router, prefix=root, dependencies=with_key)
    app.include_router(_metrics(metrics), dependencies=with_key)
    app.include_router(_probes(spaces))


def _metrics(metrics: Metrics) -> APIRouter:
    router = APIRouter()

    @router.get("/metrics", response_class=PlainTextResponse)
    async def read_metrics() -> Response:
        """Return metrics of Prometheus."""
        return Response(metrics.text(), headers={"content-type": _PROMETHEUS})

    return router


def _probes(spaces: ServedSpaces) -> APIRouter:
    router = APIRouter()

    @router.get("/healthz")
    async def health() -> Status:
        """Tell whether queries can be encoded."""
        if not spaces.is_alive:
            message = "No worker encodes queries of the current space."
            raise Refusal(503, "encoder_down", message)
        return Status()

    @router.get("/readyz")
    async def readiness() -> Status:
        """Tell whether to send requests here."""
        if not spaces.is_ready:
            message = "The current space cannot be queried yet."
            raise Refusal(503, "space_loading", message)
        return Status()

    return router
