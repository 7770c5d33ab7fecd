"""Paths of files and batches, as OpenAI's API has them."""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Form, Query, UploadFile
from starlette.responses import FileResponse, Response

from surge_dagster.engine.model.prompts import Task
from surge_dagster.service.batch_lines import Batch, BatchRequest
from surge_dagster.service.batches import Batches
from surge_dagster.service.bodies import require_form, require_json
from surge_dagster.service.errors import ClientError
from surge_dagster.service.files import MOST_LISTED, FileDeleted, FileObject, Page

# Those of OpenAI's API; only files for batches are of use here.
_Purpose = Literal["assistants", "batch", "evals", "fine-tune", "user_data", "vision"]
_Limit = Annotated[int, Query(ge=1, le=MOST_LISTED)]
_Order = Annotated[str, Query(description="asc, or desc for anything else")]
_CONTENT: dict[int | str, dict[str, Any]] = {200: {"content": {"application/octet-stream": {}}}}


def batch_router(batches: Batches | None, task: Task) -> APIRouter:
    """Return the routes below a base URL.

    Args:
        batches: None: every answer says what to set.
        task: of lines that do not say whether they hold queries or documents.
    """
    # a client could write any number of warnings
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    paths = _BatchPaths(batches, task)
    router = APIRouter(dependencies=[Depends(paths.require_batches)])
    add = router.add_api_route
    add("/files", paths.create_file, methods=["POST"], dependencies=[Depends(require_form)])
    add("/files", paths.list_files)
    add("/files/{id}", paths.file)
    add("/files/{id}", paths.delete_file, methods=["DELETE"])
    add("/files/{id}/content", paths.content, response_class=Response, responses=_CONTENT)
    add("/batches", paths.create_batch, methods=["POST"], dependencies=[Depends(require_json)])
    add("/batches", paths.list_batches)
    add("/batches/{id}", paths.batch)
    add("/batches/{id}/cancel", paths.cancel, methods=["POST"])
    return router


class _BatchPaths:
    """What each path does; those that are no coroutines run in a thread, since they wait for the
    disk."""

    def __init__(self, batches: Batches | None, task: Task) -> None:
        self._batches = batches
        self._task: Task = task

    async def require_batches(self) -> None:
        _ = self._found

    @property
    def _found(self) -> Batches:
        if self._batches is None:
            message = "This service has no files and batches. To have them, start it with --batches FOLDER."
            raise ClientError(501, message, "not_available")
        return self._batches

    async def create_file(
        self, file: UploadFile, purpose: Annotated[_Purpose, Form()]
    ) -> FileObject:
        """Keep a file."""
        # surrogates are in no record
        name = (file.filename or "").encode("utf-8", "replace").decode()
        return await asyncio.to_thread(self._found.files.upload, name, purpose, file.file)

    def list_files(
        self,
        limit: _Limit = MOST_LISTED,
        after: str | None = None,
        order: _Order = "desc",
        purpose: str | None = None,
    ) -> Page[FileObject]:
        """List files, the newest first."""
        return self._found.files.page(limit, after, order, purpose)

    def file(self, id: str) -> FileObject:
        """Describe a file."""
        return self._found.files.get(id)

    def delete_file(self, id: str) -> FileDeleted:
        """Delete a file."""
        return self._found.delete_file(id)

    def content(self, id: str) -> Response:
        """Read a file."""
        file = self._found.files.get(id)
        return FileResponse(
            self._found.files.content(file.id), media_type="application/octet-stream"
        )

    def create_batch(self, asked: BatchRequest) -> Batch:
        """Make a batch."""
        return self._found.create(asked, self._task)

    def list_batches(
        self, limit: _Limit = MOST_LISTED, after: str | None = None, order: _Order = "desc"
    ) -> Page[Batch]:
        """List batches, the newest first."""
        return self._found.records.page(limit, after, order)

    def batch(self, id: str) -> Batch:
        """Describe a batch."""
        return self._found.records.get(id)

    def cancel(self, id: str) -> Batch:
        """End a batch."""
        return self._found.cancel(id)
