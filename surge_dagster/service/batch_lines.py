"""Batches as OpenAI's API has them, and their lines: the requests of an input file, and what is
written of them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from surge_dagster.engine.model.prompts import Task
from surge_dagster.service.errors import ClientError
from surge_dagster.service.files import Record
from surge_dagster.service.requests import (
    EmbeddingRequest,
    parse_request,
    require_offered,
    wrong_value,
)
from surge_dagster.service.spaces import ServedSpace

Endpoint = Literal["/v1/embeddings", "/documents/v1/embeddings"]
Status = Literal["validating", "failed", "in_progress", "completed", "cancelled"]
OPEN = ("validating", "in_progress")
MOST_LINE_BYTES = 8 << 20  # as of the body of a request
_MOST_PROBLEMS = 100


def _without_surrogates(value: str) -> str:
    value.encode()
    return value


_Encodable = Annotated[str, AfterValidator(_without_surrogates)]


class BatchRequest(BaseModel, strict=True, frozen=True):
    """The body of `POST …/batches`; other fields are ignored."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Annotated[dict[_Encodable, _Encodable], Field(max_length=16)] | None = None


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


class Batch(Record, frozen=True):
    """A batch, which never expires. `model` is the name of the space that it is pinned to.

    OpenAI's API knows no `output_bytes` and `error_bytes`: what the files hold of the requests that
    are counted.
    """

    object: Literal["batch"] = "batch"
    endpoint: Endpoint
    model: str
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: Status = "validating"
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    metadata: dict[str, str] | None = None
    output_bytes: int = 0
    error_bytes: int = 0

    @property
    def task(self) -> Task:
        """Of lines that do not say whether they hold queries or documents."""
        return _task_of(self.endpoint)

    def results_id(self, kind: str) -> str:
        """Of the file that is written, of which clients get none before the end; the kind is
        `output` or `error`."""
        return f"file-{self.id.removeprefix('batch_')}-{kind}"


@dataclass(frozen=True, slots=True)
class Line:
    """A request; `number` counts from 1."""

    number: int
    size: int
    custom_id: str
    request: EmbeddingRequest
    task: Task


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True)

    custom_id: Annotated[str, Field(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: Endpoint
    body: dict[str, Any]


def read_lines(file: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Number and content of each line; lines of blanks are left out."""
    return ((number, raw) for number, raw in enumerate(file, 1) if raw.strip())


def parse_line(number: int, raw: bytes, task: Task = "query") -> Line:
    """A line of a batch with this task; raises `ClientError`, as for a request with this body."""
    if len(raw) > MOST_LINE_BYTES:
        message = (
            f"The line has more than {MOST_LINE_BYTES:,} bytes. Divide its texts among several."
        )
        raise ClientError(400, message, "request_too_large")
    try:
        fields = _Fields.model_validate_json(raw)
    except ValidationError as error:
        raise wrong_value(error.errors(include_url=False, include_context=False), "line") from None
    request = parse_request(fields.body)
    of_path: Task = "document" if "document" in (task, _task_of(fields.url)) else "query"
    return Line(number, len(raw), fields.custom_id, request, request.input_type or of_path)


def _task_of(endpoint: Endpoint) -> Task:
    return "document" if endpoint.startswith("/documents") else "query"


def check_lines(
    lines: Iterable[tuple[int, bytes]], served: ServedSpace, task: Task
) -> tuple[int, list[BatchError]]:
    """How many lines a batch with this task has, and what is wrong with them; after some problems
    no more are read."""
    total, problems, model = 0, list[BatchError](), None
    with closing(sqlite3.connect("")) as seen:  # a file without a name, so that memory is bounded
        seen.execute(
            "CREATE TABLE lines (custom_id TEXT PRIMARY KEY, number INTEGER) WITHOUT ROWID"
        )
        for number, raw in lines:
            total += 1
            try:
                line = parse_line(number, raw, task)
                model = model or line.request.model
                if line.request.model != model:
                    message = f"The line has the model {line.request.model!r}: expected that of the first, {model!r}."
                    raise ClientError(400, message, "mismatched_model", "body.model")
                require_offered(line.request, served, line.task)
                if not seen.execute(
                    "INSERT OR IGNORE INTO lines VALUES (?, ?)", (line.custom_id, number)
                ).rowcount:
                    [[first]] = seen.execute(
                        "SELECT number FROM lines WHERE custom_id = ?", (line.custom_id,)
                    )
                    message = f"The custom_id {line.custom_id!r} is that of line {first}, too. Give each its own."
                    raise ClientError(400, message, "duplicate_custom_id", "custom_id")
            except ClientError as error:
                problems.append(
                    BatchError(code=error.code, message=str(error), param=error.param, line=number)
                )
                if len(problems) == _MOST_PROBLEMS:
                    break
    return total, problems


def answered(
    batch_id: str, line: Line, status: int, body: bytes, truncated_rows: str = ""
) -> bytes:
    """A line of the output (200) or error file, with what the endpoint answers, and the header that
    it gives then."""
    headers = (
        b',"headers":{"surge-truncated-rows":"%b"}' % truncated_rows.encode()
        if truncated_rows
        else b""
    )
    id = _id(batch_id, line).encode()
    return _result(
        batch_id,
        line,
        b'{"status_code":%d,"request_id":"%b"%b,"body":%b}' % (status, id, headers, body),
    )


def unanswered(batch_id: str, line: Line, error: BatchError) -> bytes:
    """A line of the error file, of a request that was not tried."""
    return _result(batch_id, line, b"null", {"code": error.code, "message": error.message})


def _result(
    batch_id: str, line: Line, response: bytes, error: dict[str, str] | None = None
) -> bytes:
    facts = {"id": _id(batch_id, line), "custom_id": line.custom_id, "error": error}
    return b'%b,"response":%b}\n' % (json.dumps(facts).encode()[:-1], response)


def _id(batch_id: str, line: Line) -> str:
    return f"batch_req_{batch_id.removeprefix('batch_')}_{line.number}"
