"""Paths of files and batches, as OpenAI's API has them."""

from __future__ import annotations

import asyncio
from functools import partial
from importlib.util import find_spec

from pydantic import BaseModel, ValidationError
from pydantic_core import to_json
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route
from starlette.types import Message

from surge_dagster.engine.model.prompts import Task
from surge_dagster.service.batch_lines import BatchRequest, field_error
from surge_dagster.service.batches import Batches
from surge_dagster.service.errors import ClientError
from surge_dagster.service.requests import read_body
from surge_dagster.service.settings import ServiceSettings

# Those of OpenAI's API; only files for batches are of use here.
_PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")
_FILES_LISTED, _BATCHES_LISTED = 10_000, 20
# Times the limit that an upload may have for its client to be answered, as of other bodies.
_READ_ON = 4


def batch_routes(batches: Batches | None, settings: ServiceSettings) -> list[Route]:
    """The routes of both base URLs; the base URL says whether lines hold queries or documents.

    Args:
        batches: started here; without them, each path answers what to set.
    """
    roots: dict[str, Task] = {"/v1": "query", "/documents/v1": "document"}
    has_forms = find_spec("python_multipart") is not None
    if batches is None or not has_forms:
        install = "" if has_forms else "run pip install 'surge-dagster[serve]', and "
        message = f"This service has no files and batches. To have them, {install}start it with --batches FOLDER."
        paths = (f"{root}/{kind}{{rest:path}}" for root in roots for kind in ("files", "batches"))
        return [Route(path, partial(_absent, message=message), methods=["DELETE", "GET", "POST"]) for path in paths]
    batches.start()
    endpoints = _Endpoints(batches, settings)
    return [
        Route(f"{root}{path}", endpoint, methods=[method])
        for root, task in roots.items()
        for method, path, endpoint in (
            ("POST", "/files", endpoints.create_file),
            ("GET", "/files", endpoints.files),
            ("GET", "/files/{id}", endpoints.file),
            ("DELETE", "/files/{id}", endpoints.delete_file),
            ("GET", "/files/{id}/content", endpoints.content),
            ("POST", "/batches", partial(endpoints.create_batch, task=task)),
            ("GET", "/batches", endpoints.batches),
            ("GET", "/batches/{id}", endpoints.batch),
            ("POST", "/batches/{id}/cancel", endpoints.cancel),
        )
    ]


def _absent(request: Request, message: str) -> Response:
    raise ClientError(501, message, "not_available")


class _Endpoints:
    """Those that are no coroutines run in a thread, since they wait for the disk."""

    def __init__(self, batches: Batches, settings: ServiceSettings) -> None:
        self._batches, self._settings = batches, settings

    async def create_file(self, request: Request) -> Response:
        try:
            async with self._bounded(request).form(max_files=1) as form:
                file, purpose = form.get("file"), form.get("purpose")
                if not isinstance(file, UploadFile):
                    message = "The field 'file' is missing: expected a form (multipart/form-data) with a file."
                    raise ClientError(400, message, "missing_required_parameter", "file")
                if purpose not in _PURPOSES:
                    message = f"The field 'purpose' is {purpose!r}: expected 'batch'."
                    raise ClientError(400, message, "invalid_value", "purpose")
                keep = partial(self._batches.files.upload, file.filename or "", str(purpose), file.file)
                return _json(await asyncio.to_thread(keep))
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
        return Response(to_json({"id": id, "object": "file", "deleted": True}), media_type="application/json")

    def content(self, request: Request) -> Response:
        file = self._batches.files.get(request.path_params["id"])
        return FileResponse(self._batches.files.content(file.id), media_type="application/octet-stream")

    async def create_batch(self, request: Request, task: Task) -> Response:
        try:
            asked = BatchRequest.model_validate_json(await read_body(request, self._settings))
        except ValidationError as error:
            raise field_error(error, "body") from None
        return _json(await asyncio.to_thread(self._batches.create, asked, task))

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
                    raise ClientError(408, said, "request_timeout", ends_connection=True) from None
                size += len(message.get("body", b""))
                if size <= limit:
                    return message
                if not message.get("more_body") or size > _READ_ON * limit:
                    said = f"The file is larger than {limit:,} bytes. Divide it among several."
                    raise ClientError(413, said, "request_too_large", ends_connection=True)

        return Request(request.scope, receive)


def _json(answer: BaseModel) -> Response:
    return Response(answer.model_dump_json(), media_type="application/json")
