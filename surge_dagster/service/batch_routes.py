"""Paths of files and batches, as OpenAI's API has them.

Those that are no coroutines run in a thread, since they wait for the disk.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Form, Query, Request, UploadFile
from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse, Response

from surge_dagster.engine.model.prompts import Task
from surge_dagster.service.batches import Batch, Batches, BatchRequest
from surge_dagster.service.errors import Refusal
from surge_dagster.service.files import MOST_LISTED, FileDeleted, FileObject, Page

# Those of OpenAI's API; only files for batches are of use here.
_Purpose = Literal["assistants", "batch", "evals", "fine-tune", "user_data", "vision"]
_LARGEST_FILE_BYTES = 200 * 1024 * 1024
_Limit = Annotated[int, Query(ge=1, le=MOST_LISTED)]
_Order = Annotated[str, Query(description="asc, or desc for anything else")]
_CONTENT: dict[int | str, dict[str, Any]] = {200: {"content": {"application/octet-stream": {}}}}

# A client could write any number of warnings.
logging.getLogger("python_multipart").setLevel(logging.ERROR)


async def _opened(request: Request) -> Batches:
    batches = request.app.state.batches
    if batches is None:
        message = (
            "This service has no files and batches. To have them, start it with --batches FOLDER."
        )
        raise Refusal(501, "not_available", message)
    return batches


_Opened = Annotated[Batches, Depends(_opened)]
router = APIRouter(dependencies=[Depends(_opened)])


@router.post("/files", max_body_size=_LARGEST_FILE_BYTES)
async def create_file(
    batches: _Opened, file: UploadFile, purpose: Annotated[_Purpose, Form()]
) -> FileObject:
    """Keep a file."""
    # No record can hold surrogates.
    name = (file.filename or "").encode("utf-8", "replace").decode()
    return await run_in_threadpool(batches.files.upload, name, purpose, file.file)


@router.get("/files")
def list_files(
    batches: _Opened,
    limit: _Limit = MOST_LISTED,
    after: str | None = None,
    order: _Order = "desc",
    purpose: str | None = None,
) -> Page[FileObject]:
    """List files, the newest first."""
    return batches.files.page(limit, after, order, purpose)


@router.get("/files/{id}")
def retrieve_file(batches: _Opened, id: str) -> FileObject:
    """Describe a file."""
    return batches.files.get(id)


@router.delete("/files/{id}")
def delete_file(batches: _Opened, id: str) -> FileDeleted:
    """Delete a file."""
    return batches.delete_file(id)


@router.get("/files/{id}/content", response_class=Response, responses=_CONTENT)
def read_file(batches: _Opened, id: str) -> Response:
    """Read a file."""
    path = batches.files.content(batches.files.get(id).id)
    return FileResponse(path, media_type="application/octet-stream")


@router.post("/batches")
def create_batch(batches: _Opened, request: Request, body: BatchRequest) -> Batch:
    """Make a batch."""
    task: Task = "document" if request.url.path.startswith("/documents") else "query"
    return batches.create(body, task)


@router.get("/batches")
def list_batches(
    batches: _Opened, limit: _Limit = MOST_LISTED, after: str | None = None, order: _Order = "desc"
) -> Page[Batch]:
    """List batches, the newest first."""
    return batches.records.page(limit, after, order)


@router.get("/batches/{id}")
def retrieve_batch(batches: _Opened, id: str) -> Batch:
    """Describe a batch."""
    return batches.records.get(id)


@router.post("/batches/{id}/cancel")
def cancel_batch(batches: _Opened, id: str) -> Batch:
    """End a batch."""
    return batches.cancel(id)
