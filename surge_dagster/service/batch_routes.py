"""Paths of files and batches, as OpenAI's API has them.

Those that are no coroutines run in a thread, since they wait for the disk.
"""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Form, Query, Request, UploadFile
from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse, Response

from surge_dagster.service.batches import Batch, Batches, BatchRequest
from surge_dagster.service.embeddings import task_of
from surge_dagster.service.errors import Refusal
from surge_dagster.service.records import MOST_LISTED, FileDeleted, FileObject, Page, Records

# Those of OpenAI's API; only files for batches are of use here.
_Purpose = Literal["assistants", "batch", "evals", "fine-tune", "user_data", "vision"]
_LARGEST_FILE_BYTES = 200 * 1024 * 1024
_Limit = Annotated[int, Query(ge=1, le=MOST_LISTED)]
_Order = Annotated[str, Query(description="asc, or desc for anything else")]
_LifeSeconds = Annotated[int | None, Form(alias="expires_after[seconds]", ge=3_600, le=2_592_000)]
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


async def _records_of_key(request: Request, batches: _Opened) -> Records:
    return Records(batches.records.folder, request.state.owner)


_Records = Annotated[Records, Depends(_records_of_key)]
router = APIRouter(dependencies=[Depends(_opened)])


@router.post("/files", max_body_size=_LARGEST_FILE_BYTES)
async def create_file(
    records: _Records,
    file: UploadFile,
    purpose: Annotated[_Purpose, Form()],
    life_seconds: _LifeSeconds = None,
) -> FileObject:
    """Keep a file."""
    name = file.filename or ""
    return await run_in_threadpool(records.upload, name, purpose, file.file, life_seconds)


@router.get("/files")
def list_files(
    records: _Records,
    limit: _Limit = MOST_LISTED,
    after: str | None = None,
    order: _Order = "desc",
    purpose: str | None = None,
) -> Page[FileObject]:
    """List files, the newest first."""
    return records.page(FileObject, limit, after, order, purpose)


@router.get("/files/{id}")
def retrieve_file(records: _Records, id: str) -> FileObject:
    """Describe a file."""
    return records.get(FileObject, id)


@router.delete("/files/{id}")
def delete_file(records: _Records, id: str) -> FileDeleted:
    """Delete a file."""
    return records.delete_file(id)


@router.get("/files/{id}/content", response_class=Response, responses=_CONTENT)
def read_file(records: _Records, id: str) -> Response:
    """Read a file."""
    path = records.content(records.get(FileObject, id).id)
    return FileResponse(path, media_type="application/octet-stream")


@router.post("/batches")
def create_batch(
    batches: _Opened, records: _Records, request: Request, body: BatchRequest
) -> Batch:
    """Make a batch."""
    return batches.create(records, body, task_of(request))


@router.get("/batches")
def list_batches(
    records: _Records,
    limit: _Limit = MOST_LISTED,
    after: str | None = None,
    order: _Order = "desc",
) -> Page[Batch]:
    """List batches, the newest first."""
    return records.page(Batch, limit, after, order)


@router.get("/batches/{id}")
def retrieve_batch(records: _Records, id: str) -> Batch:
    """Describe a batch."""
    return records.get(Batch, id)


@router.post("/batches/{id}/cancel")
def cancel_batch(records: _Records, id: str) -> Batch:
    """End a batch; what it has encoded is thrown away."""
    batch = records.get(Batch, id)
    cancelled = batch.ended("cancelled")
    if not records.end(cancelled):
        raise Refusal(409, "batch_ended", f"The batch {id} has ended: {batch.status}.")
    return cancelled
