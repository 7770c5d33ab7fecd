"""Batches: files of requests that are encoded when the devices have time, and their paths, as
OpenAI's API has them.

All lines of a batch are checked when it is made. A thread works batches off in the order in which
they were made; one that cannot be encoded now is tried again after the others. What was open when a
service ended, however it ended, goes on when the next one has the folder.

Functions of paths that are no coroutines run in a thread, since they wait for the disk.
"""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Depends, Form, Query, Request, UploadFile
from pydantic import BaseModel, Field
from starlette.responses import FileResponse, Response

from surge_dagster.engine.errors import Cancelled, ConfigError, SurgeError
from surge_dagster.engine.model.prompts import Task
from surge_dagster.engine.output.current_space import named_space
from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.engine.support.waiting import every
from surge_dagster.service.batch_run import (
    BatchError,
    BatchFile,
    Endpoint,
    Line,
    check_lines,
    encode,
    parse_line,
    read_raw_lines,
    results,
)
from surge_dagster.service.embeddings import require_offered, task_of
from surge_dagster.service.errors import Refusal
from surge_dagster.service.records import (
    LIFE_SECONDS,
    FileDeleted,
    FileObject,
    Page,
    PageQuery,
    Record,
    Records,
    new_id,
    now,
)
from surge_dagster.service.spaces import ServedSpace, ServedSpaces

log = logging.getLogger(__name__)

_NO_LINE = (0, b"")
_RESULTS = ("output", "error")
_LARGEST_FILE_BYTES = 200 * 1024 * 1024
# Those of OpenAI's API; only files for batches are of use here.
_Purpose = Literal["assistants", "batch", "evals", "fine-tune", "user_data", "vision"]
_LifeSeconds = Annotated[int | None, Form(alias="expires_after[seconds]", ge=3_600, le=2_592_000)]
_CONTENT: dict[int | str, dict[str, Any]] = {200: {"content": {"application/octet-stream": {}}}}

# A client could write any number of warnings.
logging.getLogger("python_multipart").setLevel(logging.ERROR)


class ExpiresAfter(BaseModel, strict=True, frozen=True):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3_600, le=2_592_000)]


class BatchRequest(BaseModel, strict=True, frozen=True):
    """The body of `POST …/batches`; other fields are ignored."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchErrors(BaseModel, frozen=True):
    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(BaseModel, frozen=True):
    total: int
    completed: int = 0
    failed: int = 0


class Batch(Record, BatchRequest, frozen=True):
    """A batch. `model` is the name of the space that it is pinned to."""

    kind = "batch"

    object: Literal["batch"] = "batch"
    model: str
    task: Task
    status: Literal["in_progress", "failed", "completed", "cancelled"] = "in_progress"
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts

    def ended(self, status: str, **changes: Any) -> Self:
        """Return the batch with another status."""
        changes |= {"status": status, f"{status}_at": now()}
        return self.model_copy(update=changes)


class Batches:
    """The batches of a folder. Use `with` to work on them.

    Args:
        spaces: are started before this, and closed after it.
        lines_per_partition: that share the fate of a text which cannot be encoded.
        look_seconds: between two looks for batches that are to be encoded, or tried again.

    Raises:
        ConfigError: the folder cannot be written.
    """

    def __init__(
        self,
        spaces: ServedSpaces,
        folder: Path,
        lines_per_partition: int = 1_000,
        look_seconds: float = 5.0,
    ) -> None:
        store = LocalStore(folder)
        store.prepare("files")
        store.sweep("files")
        self.records = Records(folder)
        self._scratch = folder / "scratch"
        self._spaces = spaces
        self._lines_per_partition = lines_per_partition
        self._look_seconds = look_seconds
        self._is_stopping = False
        self._working = ExitStack()

    def __enter__(self) -> Self:
        working = every(self._look_seconds, self._work, "surge-batches")
        self._working.enter_context(working)
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread, which may be cut short; a later service goes on."""
        self._is_stopping = True
        self._working.close()

    def create(self, records: Records, body: BatchRequest, task: Task) -> Batch:
        """Make a batch of an uploaded file, in the space that its first line names.

        A file with wrong lines gives a batch that has failed.

        Args:
            records: of the key that made the file.
            task: "document": all lines hold documents, whatever the endpoint.

        Raises:
            Refusal: there is no such file, its first line is wrong, or its space is not served.
        """
        records.get(FileObject, body.input_file_id)
        path = records.content(body.input_file_id)
        _, raw = next(read_raw_lines(path), _NO_LINE)
        model = parse_line(raw).body.model
        served = self._spaces.find(model)
        if body.endpoint.startswith("/documents"):
            task = "document"

        check = partial(_require_of_batch, model=model, task=task, served=served)
        total, problems = check_lines(path, check)
        created_at = now()
        batch = Batch(
            id=new_id("batch_"),
            model=served.space.name,
            task=task,
            created_at=created_at,
            in_progress_at=created_at,
            expires_at=created_at + LIFE_SECONDS,
            request_counts=RequestCounts(total=total),
            **body.model_dump(),
        )
        if problems:
            batch = batch.ended("failed", errors=BatchErrors(data=problems))
        records.add(batch)
        return batch

    # Below runs in the thread.

    def _work(self) -> None:
        self.records.remove_expired()
        for id, records in self.records.open_batches():
            self._try_to_run(id, records)

    def _try_to_run(self, id: str, records: Records) -> None:
        try:
            self.run(records, id)
        except Cancelled:
            return
        except Exception as error:
            is_known = isinstance(error, SurgeError)
            log.warning("%s is tried again: %s", id, error, exc_info=not is_known)
            if not is_known:  # of the disk, or a defect: what is encoded may be damaged
                shutil.rmtree(self._scratch / id, ignore_errors=True)

    def run(self, records: Records, id: str) -> None:
        """Work off a batch.

        Raises:
            Cancelled: the service stops, or the batch was cancelled.
            SurgeError: it is to be tried again.
        """

        def is_over() -> bool:
            return self._is_stopping or records.get(Batch, id).status != "in_progress"

        batch = records.get(Batch, id)
        path = records.content(batch.input_file_id)
        file = BatchFile(path, self._lines_per_partition)
        scratch = self._scratch / id
        try:
            space = named_space(self._spaces.store, batch.model)
            with self._spaces.settings.pool(space, batch.task, is_bulk=True) as pool:
                reasons = encode(file, scratch, pool, is_over)
                self._complete(records, batch, results(file, reasons, scratch, pool, space))
        except (ConfigError, FileNotFoundError) as error:
            problem = BatchError(code="cannot_be_encoded", message=str(error))
            records.end(batch.ended("failed", errors=BatchErrors(data=[problem])))
        finally:
            if not self._is_stopping and is_over():
                shutil.rmtree(scratch, ignore_errors=True)

    def _complete(self, records: Records, batch: Batch, found: Iterator[tuple[str, str]]) -> None:
        """Write the files of results, and end the batch with them."""
        lines = Counter[str]()
        ids = {kind: f"file-{batch.id.removeprefix('batch_')}-{kind}" for kind in _RESULTS}
        with ExitStack() as stack:
            uploads = {kind: stack.enter_context(records.write(ids[kind])) for kind in _RESULTS}
            for kind, result in found:
                uploads[kind].sink.write(f"{result}\n".encode())
                lines[kind] += 1
                if self._is_stopping:
                    raise Cancelled
            for kind in lines:
                uploads[kind].publish(lambda: None)

        counts = RequestCounts(
            total=lines.total(), completed=lines["output"], failed=lines["error"]
        )
        expires = batch.output_expires_after
        seconds = expires.seconds if expires else None
        files = list[FileObject]()
        changes: dict[str, Any] = {"request_counts": counts}
        for kind in lines:
            name = f"{batch.id}_{kind}.jsonl"
            files.append(records.described(ids[kind], name, "batch_output", seconds))
            changes[f"{kind}_file_id"] = ids[kind]
        records.end(batch.ended("completed", **changes), files)


def _require_of_batch(line: Line, model: str, task: Task, served: ServedSpace) -> None:
    """Refuse a line of another model or task than those of the batch."""
    if line.body.model != model:
        message = f"The line has another model than the first line, {model!r:.100}."
        raise Refusal(400, "mismatched_model", message, "body.model")
    line_task = "document" if line.url.startswith("/documents") else task
    if (line.body.input_type or line_task) != task:
        message = f"The line is not a {task}, as the batch is. Make a batch for each task."
        raise Refusal(400, "mismatched_task", message, "url")
    require_offered(line.body, served)


router = APIRouter()


async def _records_of_key(request: Request) -> Records:
    batches: Batches = request.app.state.batches
    return Records(batches.records.folder, request.state.owner)


_Records = Annotated[Records, Depends(_records_of_key)]
_Page = Annotated[PageQuery, Query()]


@router.post("/files", max_body_size=_LARGEST_FILE_BYTES)
def create_file(
    records: _Records,
    file: UploadFile,
    purpose: Annotated[_Purpose, Form()],
    life_seconds: _LifeSeconds = None,
) -> FileObject:
    """Keep a file."""
    return records.upload(file.filename or "", purpose, file.file, life_seconds)


@router.get("/files")
def list_files(records: _Records, page: _Page) -> Page[FileObject]:
    """List files, the newest first."""
    return records.page(FileObject, page)


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
def create_batch(records: _Records, request: Request, body: BatchRequest) -> Batch:
    """Make a batch."""
    batches: Batches = request.app.state.batches
    return batches.create(records, body, task_of(request))


@router.get("/batches")
def list_batches(records: _Records, page: _Page) -> Page[Batch]:
    """List batches, the newest first."""
    return records.page(Batch, page)


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
