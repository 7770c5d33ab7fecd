"""Batches as OpenAI's API has them, and their lines: the requests of an input file, and what is written of them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import IO, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from surge_dagster.engine.model.prompts import Task
from surge_dagster.service.errors import ClientError
from surge_dagster.service.files import Record
from surge_dagster.service.requests import EmbeddingRequest, parse_request, require_offered
from surge_dagster.service.spaces import ServedSpace

Endpoint = Literal["/v1/embeddings", "/documents/v1/embeddings"]
Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
MOST_LINE_BYTES = 8 << 20  # as of the body of a request
_MOST_PROBLEMS = 100


class BatchRequest(BaseModel, strict=True, frozen=True):
    """The body of `POST …/batches`; other fields are ignored."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None


class BatchError(BaseModel, frozen=True):
    """Why a batch has failed, and the line that is wrong where one is."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(BaseModel, frozen=True):
    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(BaseModel, frozen=True):
    total: int = 0
    completed: int = 0
    failed: int = 0


class Progress(BaseModel, frozen=True):
    """What the files hold of the lines that are answered.

    Attributes:
        task: of lines that do not say whether they hold queries or documents.
        output_id, error_id: of the files that are written, of which clients get none before the end.
        line: number of the last one.
        input_bytes, output_bytes, error_bytes: up to its end.
    """

    task: Task
    output_id: str
    error_id: str
    line: int = 0
    input_bytes: int = 0
    output_bytes: int = 0
    error_bytes: int = 0


class Batch(Record, frozen=True):
    """A batch. `model` is the name of the space that it is pinned to; OpenAI's API knows no `progress`."""

    object: Literal["batch"] = "batch"
    endpoint: Endpoint
    model: str | None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: Status = "validating"
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    expires_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None
    progress: Progress


@dataclass(frozen=True, slots=True)
class Line:
    """A request. `number` counts from 1; `end` is where the next line begins; `task` None is the batch's own."""

    number: int
    end: int
    custom_id: str
    request: EmbeddingRequest
    task: Task | None


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True)

    custom_id: Annotated[str, Field(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: Endpoint
    body: dict[str, Any]


def read_lines(file: IO[bytes], number: int = 0) -> Iterator[tuple[int, int, bytes]]:
    """Number, end and content of each line from where the file stands; lines of blanks are left out.

    Args:
        number: of the line before.
    """
    end = file.tell()
    while raw := file.readline(MOST_LINE_BYTES + 1):
        number, end, part = number + 1, end + len(raw), raw
        while len(raw) > MOST_LINE_BYTES and part and not part.endswith(b"\n"):  # it is refused as a whole
            part = file.readline(MOST_LINE_BYTES)
            end += len(part)
        if raw.strip():
            yield number, end, raw


def parse_line(number: int, end: int, raw: bytes) -> Line:
    """Raises `ClientError`, as for a request with this body."""
    if len(raw) > MOST_LINE_BYTES:
        message = f"The line has more than {MOST_LINE_BYTES:,} bytes. Divide its texts among several."
        raise ClientError(400, message, "request_too_large")
    try:
        fields = _Fields.model_validate_json(raw)
    except ValidationError as error:
        raise field_error(error, "line") from None
    request = parse_request(json.dumps(fields.body).encode())
    task: Task | None = "document" if fields.url.startswith("/documents") else None
    return Line(number, end, fields.custom_id, request, request.input_type or task)


def field_error(error: ValidationError, what: str) -> ClientError:
    """The first problem of a JSON object."""
    first = error.errors(include_url=False, include_context=False)[0]
    if not first["loc"]:
        return ClientError(400, f"The {what} is no JSON object in UTF-8: {first['msg']}.", "invalid_json")
    name = ".".join(map(str, first["loc"]))
    return ClientError(400, f"The field {name!r} of the {what} is wrong: {first['msg']}.", "invalid_value", name)


def check_lines(
    lines: Iterable[tuple[int, int, bytes]], served: ServedSpace | None, task: Task
) -> tuple[int, list[BatchError]]:
    """How many lines there are, and what is wrong with them; after some problems no more are looked for.

    Args:
        served: the space of all lines; None where the first line names none.
        task: of lines that do not say whether they hold queries or documents.
    """
    total, problems, model = 0, list[BatchError](), None
    with closing(sqlite3.connect("")) as seen:  # a file without a name, so that memory is bounded
        seen.execute("CREATE TABLE lines (custom_id TEXT PRIMARY KEY, number INTEGER) WITHOUT ROWID")
        for number, end, raw in lines:
            total += 1
            try:
                line = parse_line(number, end, raw)
                model = model or line.request.model
                if line.request.model != model:
                    message = f"The line has the model {line.request.model!r}: expected that of the first, {model!r}."
                    raise ClientError(400, message, "mismatched_model", "body.model")
                if served is not None:
                    require_offered(line.request, served, line.task or task)
                if not seen.execute("INSERT OR IGNORE INTO lines VALUES (?, ?)", (line.custom_id, number)).rowcount:
                    [[first]] = seen.execute("SELECT number FROM lines WHERE custom_id = ?", (line.custom_id,))
                    message = f"The custom_id {line.custom_id!r} is that of line {first}, too. Give each its own."
                    raise ClientError(400, message, "duplicate_custom_id", "custom_id")
            except ClientError as error:
                problems.append(BatchError(code=error.code, message=str(error), param=error.param, line=number))
                if len(problems) == _MOST_PROBLEMS:
                    break
    if not total:
        problems.append(BatchError(code="empty_file", message="The file has no lines. Send one request in each line."))
    return total, problems


def answered(batch_id: str, line: Line, status: int, body: bytes, truncated_rows: str = "") -> bytes:
    """A line of the output (200) or error file, with what the endpoint answers, and the header that it gives then."""
    of_line, name = _id(batch_id, line).encode(), json.dumps(line.custom_id).encode()
    headers = b',"headers":{"surge-truncated-rows":"%b"}' % truncated_rows.encode() if truncated_rows else b""
    response = b'{"status_code":%d,"request_id":"%b"%b,"body":%b}' % (status, of_line, headers, body)
    return b'{"id":"%b","custom_id":%b,"response":%b,"error":null}\n' % (of_line, name, response)


def unanswered(batch_id: str, line: Line, error: BatchError) -> bytes:
    """A line of the error file, of a request that was not tried."""
    facts = {"code": error.code, "message": error.message}
    whole = {"id": _id(batch_id, line), "custom_id": line.custom_id, "response": None, "error": facts}
    return json.dumps(whole).encode() + b"\n"


def _id(batch_id: str, line: Line) -> str:
    return f"batch_req_{batch_id.removeprefix('batch_')}_{line.number}"
