"""Paths of files and batches, as OpenAI's API has them."""

from __future__ import annotations

import asyncio
import logging
import reprlib
from functools import partial
from importlib.util import find_spec

from pydantic import BaseModel, ValidationError
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message

from surge_dagster.engine.model.prompts import Task
from surge_dagster.service.batch_lines import BatchRequest, field_error
from surge_dagster.service.batches import Batches
from surge_dagster.service.errors import ClientError
from surge_dagster.service.files import PURPOSES
from surge_dagster.service.requests import read_body
from surge_dagster.service.settings import ServiceSettings

_FILES_LISTED, _BATCHES_LISTED = 10_000, 20
# Times the limit that an upload may have for its client to be answered, as of other bodies.
_READ_ON = 4


def batch_routes(root: str, task: Task, batches: Batches | None, settings: ServiceSettings) -> list[Route]:
    """The routes below a base URL.

    Args:
        task: of lines that do not say whether they hold queries or documents.
        batches: without them, the answer says what to set.
    """
    logging.getLogger("python_multipart").setLevel(logging.ERROR)  # a client could write any number of warnings
    endpoints = _Endpoints(batches, task, settings)
    return [
        Route(f"{root}{path}", endpoint, methods=[method])
        for method, path, endpoint in (
            ("POST", "/files", endpoints.create_file),
            ("GET", "/files", endpoints.files),
            ("GET", "/files/{id}", endpoints.file),
            ("DELETE", "/files/{id}", endpoints.delete_file),
            ("GET", "/files/{id}/content", endpoints.content),
            ("POST", "/batches", endpoints.create_batch),
            ("GET", "/batches", endpoints.batches),
            ("GET", "/batches/{id}", endpoints.batch),
            ("POST", "/batches/{id}/cancel", endpoints.cancel),
        )
    ]


class _Endpoints:
    """Those that are no coroutines run in a thread, since they wait for the disk."""

    def __init__(self, batches: Batches | None, task: Task, settings: ServiceSettings) -> None:
        self._found, self._settings = batches, settings
        self._task: Task = task

    @property
    def _batches(self) -> Batches:
        has_forms = find_spec("python_multipart") is not None
        if self._found is None or not has_forms:
            install = "" if has_forms else "run pip install 'surge-dagster[serve]', and "
            message = f"This service has no files and batches. To have them, {install}start it with --batches FOLDER."
            raise ClientError(501, message, "not_available")
        return self._found

    async def create_file(self, request: Request) -> Response:
        batches = self._batches
        try:
            async with self._bounded(request).form(max_files=1, max_fields=10, max_part_size=64 * 1024) as form:
                file, purpose = form.get("file"), form.get("purpose")
                if not isinstance(file, UploadFile):
                    message = "The field 'file' is missing: expected a form (multipart/form-data) with a file."
                    raise ClientError(400, message, "missing_required_parameter", "file")
                if purpose not in PURPOSES:
                    message = f"The field 'purpose' is {reprlib.repr(purpose)}: expected 'batch'."
                    raise ClientError(400, message, "invalid_value", "purpose")
                upload = partial(batches.files.upload, file.filename or "", str(purpose), file.file)
                return _json(await asyncio.to_thread(upload))
        except HTTPException as error:
            raise ClientError(400, f"The form cannot be read: {error.detail}", "invalid_form") from None

    def files(self, request: Request) -> Response:
        purpose = request.query_params.get("purpose")
        is_wanted = None if purpose is None else lambda file: file.purpose == purpose
        return _json(self._batches.files.page(request.query_params, _FILES_LISTED, is_wanted))

    def file(self, request: Request) -> Response:
        return _json(self._batches.files.get(request.path_params["id"]))

    def delete_file(self, request: Request) -> Response:
        id = request.path_params["id"]
        self._batches.delete_file(id)
        return JSONResponse({"id": id, "object": "file", "deleted": True})

    def content(self, request: Request) -> Response:
        file = self._batches.files.get(request.path_params["id"])
        return FileResponse(self._batches.files.content(file.id), media_type="application/octet-stream")

    async def create_batch(self, request: Request) -> Response:
        batches = self._batches
        try:
            asked = BatchRequest.model_validate_json(await read_body(request, self._settings))
        except ValidationError as error:
            raise field_error(error, "body") from None
        return _json(await asyncio.to_thread(batches.create, asked, self._task))

    def batches(self, request: Request) -> Response:
        return _json(self._batches.records.page(request.query_params, _BATCHES_LISTED))

    def batch(self, request: Request) -> Response:
        return _json(self._batches.records.get(request.path_params["id"]))

    def cancel(self, request: Request) -> Response:
        return _json(self._batches.cancel(request.path_params["id"]))

    def _bounded(self, request: Request) -> Request:
        """The same request, with a body of limited size, of which no part may be long in coming."""
        limit, seconds, size = self._settings.max_file_bytes, self._settings.body_seconds, 0

        async def receive() -> Message:
            nonlocal size
            while True:
                try:
                    async with asyncio.timeout(seconds):
                        message = await request.receive()
                except TimeoutError:
                    said = f"No part of the body came for {seconds:g} s. Send the request again."
                    raise ClientError(408, said, "request_timeout") from None
                size += len(message.get("body", b""))
                if size <= limit:
                    return message
                if not message.get("more_body") or size > _READ_ON * limit:
                    said = f"The file is larger than {limit:,} bytes. Divide it among several."
                    raise ClientError(413, said, "request_too_large")

        return Request(request.scope, receive)


def _json(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")
