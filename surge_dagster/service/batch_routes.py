"""Paths of files and batches, as OpenAI's API has them."""

from __future__ import annotations

import asyncio
import logging
import reprlib
from collections.abc import Callable
from typing import cast

from pydantic import BaseModel, ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from surge_dagster.engine.model.prompts import Task
from surge_dagster.service.batch_lines import Batch, BatchRequest, field_error
from surge_dagster.service.batches import Batches
from surge_dagster.service.bodies import require_type
from surge_dagster.service.errors import ClientError
from surge_dagster.service.files import PURPOSES, FileObject


def batch_routes(root: str, task: Task, batches: Batches | None) -> list[Route]:
    """The routes below a base URL.

    Args:
        task: of lines that do not say whether they hold queries or documents.
        batches: without them, the answer says what to set.
    """
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # a client could write any number of warnings
    found = cast(Batches, batches)  # without them no endpoint uses it

    async def create_file(request: Request) -> Response:
        require_type(request, "multipart/form-data")  # a form of another type with many fields blocks all requests
        return _json(await _uploaded(request, found))

    async def create_batch(request: Request) -> Response:
        require_type(request, "application/json")
        return _json(await _created(await request.body(), found, task))

    def content(request: Request) -> Response:
        file = found.files.get(_id(request))
        return FileResponse(found.files.content(file.id), media_type="application/octet-stream")

    endpoints: list[tuple[str, str, Callable[[Request], object]]] = [
        ("POST", "/files", create_file),
        ("GET", "/files", lambda request: _json(found.files.page(request.query_params))),
        ("GET", "/files/{id}", lambda request: _json(found.files.get(_id(request)))),
        ("DELETE", "/files/{id}", lambda request: _json(found.delete_file(_id(request)))),
        ("GET", "/files/{id}/content", content),
        ("POST", "/batches", create_batch),
        ("GET", "/batches", lambda request: _json(found.records.page(request.query_params))),
        ("GET", "/batches/{id}", lambda request: _json(found.records.get(_id(request)))),
        ("POST", "/batches/{id}/cancel", lambda request: _json(found.cancel(_id(request)))),
    ]  # those that are no coroutines run in a thread, since they wait for the disk
    return [
        Route(f"{root}{path}", endpoint if batches else _unavailable, methods=[method])
        for method, path, endpoint in endpoints
    ]


def _unavailable(request: Request) -> Response:
    message = "This service has no files and batches. To have them, start it with --batches FOLDER."
    raise ClientError(501, message, "not_available")


def _id(request: Request) -> str:
    return request.path_params["id"]


def _json(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")


async def _uploaded(request: Request, batches: Batches) -> FileObject:
    try:
        form = await request.form(max_files=1, max_fields=10, max_part_size=64 * 1024)
    except (HTTPException, UnicodeError, LookupError) as error:  # the form may name any encoding
        if isinstance(error, HTTPException) and error.status_code == 413:
            raise
        reason = error.detail if isinstance(error, HTTPException) else error
        raise ClientError(400, f"The form cannot be read: {reason}", "invalid_form") from None
    try:
        file, purpose = form.get("file"), form.get("purpose")
        if not isinstance(file, UploadFile):
            message = "The field 'file' is missing: expected a form (multipart/form-data) with a file."
            raise ClientError(400, message, "missing_required_parameter", "file")
        if purpose not in PURPOSES:
            message = f"The field 'purpose' is {reprlib.repr(purpose)}: expected 'batch'."
            raise ClientError(400, message, "invalid_value", "purpose")
        name = (file.filename or "").encode("utf-8", "replace").decode()  # surrogates are in no record
        return await asyncio.to_thread(batches.files.upload, name, str(purpose), file.file)
    finally:
        await form.close()


async def _created(body: bytes, batches: Batches, task: Task) -> Batch:
    try:
        asked = BatchRequest.model_validate_json(body)
    except ValidationError as error:
        raise field_error(error, "body") from None
    return await asyncio.to_thread(batches.create, asked, task)
