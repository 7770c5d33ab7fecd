"""Batches: files of requests that are encoded when the devices have time.

All lines of a batch are checked when it is made. A thread works batches off in the order in which
they were made; one that cannot be encoded now is tried again after the others. What was open when a
service ended, however it ended, goes on when the next one has the folder.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field

from surge_dagster.engine.errors import Cancelled, ConfigError, SurgeError
from surge_dagster.engine.model.prompts import Task
from surge_dagster.engine.output.current_space import named_space
from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.engine.support.waiting import wait_for_thread
from surge_dagster.service.batch_run import (
    BatchError,
    BatchFile,
    Endpoint,
    Line,
    Result,
    check_lines,
    encode,
    parse_line,
    read_raw_lines,
    results,
)
from surge_dagster.service.embeddings import require_offered
from surge_dagster.service.errors import Refusal
from surge_dagster.service.files import FileDeleted, FileStore, Record, Records
from surge_dagster.service.spaces import ServedSpaces

log = logging.getLogger(__name__)

_AGAIN_SECONDS = 10.0
_CLOSING_SECONDS = 30.0
_NO_LINE = (0, b"")


class BatchRequest(BaseModel, strict=True, frozen=True):
    """The body of `POST …/batches`; other fields are ignored."""

    input_file_id: str
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = None


class BatchErrors(BaseModel, frozen=True):
    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(BaseModel, frozen=True):
    total: int
    completed: int = 0
    failed: int = 0


class Batch(Record, BatchRequest, frozen=True):
    """A batch, which never expires. `model` is the name of the space that it is pinned to."""

    object: Literal["batch"] = "batch"
    model: str
    task: Task
    status: Literal["in_progress", "failed", "completed", "cancelled"] = "in_progress"
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts


class Batches:
    """The batches and files of a folder. Use `with` to work on them.

    Args:
        spaces: are started before this, and closed after it.
        lines_per_partition: that share the fate of a text which cannot be encoded.

    Raises:
        ConfigError: the folder cannot be written.
    """

    def __init__(
        self, spaces: ServedSpaces, folder: Path, lines_per_partition: int = 1_000
    ) -> None:
        store = LocalStore(folder)
        self.files = FileStore(store)
        self.records = Records(store, "batches", "batch_", Batch)
        self._scratch = folder / "scratch"
        self._spaces = spaces
        self._lines_per_partition = lines_per_partition
        self._changes = threading.Lock()
        self._is_stopping = False
        self._has_work = threading.Event()
        self._thread = threading.Thread(target=self._work, name="surge-batches", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread; a later service goes on."""
        self._is_stopping = True
        self._has_work.set()
        wait_for_thread(self._thread, _CLOSING_SECONDS)

    def create(self, body: BatchRequest, task: Task) -> Batch:
        """Make a batch of an uploaded file, in the space that its first line names.

        A file with wrong lines gives a batch that has failed.

        Args:
            task: "document": all lines hold documents, whatever the endpoint.

        Raises:
            Refusal: there is no such file, its first line is wrong, or its space is not served.
        """
        self.files.get(body.input_file_id)
        path = self.files.content(body.input_file_id)
        _, raw = next(read_raw_lines(path), _NO_LINE)
        model = parse_line(raw).body.model
        served = self._spaces.find(model)
        if body.endpoint.startswith("/documents"):
            task = "document"

        def check(line: Line) -> None:
            if line.body.model != model:
                message = f"The line has another model than the first line, {model!r:.100}."
                raise Refusal(400, "mismatched_model", message, "body.model")
            line_task = "document" if line.url.startswith("/documents") else task
            if (line.body.input_type or line_task) != task:
                message = f"The line is not a {task}, as the batch is. Make a batch for each task."
                raise Refusal(400, "mismatched_task", message, "url")
            require_offered(line.body, served)

        total, problems = check_lines(path, check)
        now = int(time.time())
        batch = Batch(
            id=self.records.new_id(),
            model=served.space.name,
            task=task,
            created_at=now,
            in_progress_at=now,
            request_counts=RequestCounts(total=total),
            **body.model_dump(),
        )
        if problems:
            errors = BatchErrors(data=problems)
            batch = batch.model_copy(
                update={"status": "failed", "failed_at": now, "errors": errors}
            )
        self.records.put(batch)
        self._has_work.set()
        return batch

    def cancel(self, id: str) -> Batch:
        """End a batch; what it has encoded is thrown away."""
        self.records.get(id)
        return self._end(id, "cancelled")

    def delete_file(self, id: str) -> FileDeleted:
        self.files.get(id)
        for batch in self.open():
            if batch.input_file_id == id:
                message = (
                    f"The batch {batch.id} reads the file {id}. Cancel it, or wait for its end."
                )
                raise Refusal(409, "file_in_use", message, "id")
        return self.files.remove(id)

    def open(self) -> list[Batch]:
        """Return the batches that have not ended."""
        return [batch for batch in self.records.all() if batch.status == "in_progress"]

    def _end(self, id: str, status: str, **changes: Any) -> Batch:
        with self._changes:
            batch = self.records.get(id)
            if batch.status != "in_progress":
                raise Refusal(409, "batch_ended", f"The batch {id} has ended: {batch.status}.")
            changes |= {"status": status, f"{status}_at": int(time.time())}
            batch = batch.model_copy(update=changes)
            self.records.put(batch)
        return batch

    # Below runs in the thread.

    def _work(self) -> None:
        while not self._is_stopping:
            self._has_work.clear()
            batches = self.open()
            for batch in batches:
                try:
                    self.run(batch)
                except Cancelled:
                    continue
                except Exception as error:
                    is_known = isinstance(error, SurgeError)  # else it is of the disk, or a defect
                    log.warning(
                        "%s is tried again in %g s: %s",
                        batch.id,
                        _AGAIN_SECONDS,
                        error,
                        exc_info=not is_known,
                    )
            self._has_work.wait(_AGAIN_SECONDS if batches else None)

    def run(self, batch: Batch) -> None:
        """Work off a batch.

        Raises:
            Cancelled: the service stops, or the batch was cancelled.
            SurgeError: it is to be tried again.
        """

        def is_over() -> bool:
            return self._is_stopping or self.records.get(batch.id).status != "in_progress"

        path = self.files.content(batch.input_file_id)
        file = BatchFile(path, self._lines_per_partition)
        scratch = self._scratch / batch.id
        try:
            space = named_space(self._spaces.store, batch.model)
            with self._spaces.settings.pool(space, batch.task, is_bulk=True) as pool:
                reasons = encode(file, scratch, pool, is_over)
                changes = self._write(batch, results(file, reasons, scratch, pool, space))
            self._end(batch.id, "completed", **changes)
        except (Refusal, ConfigError) as error:  # a refusal: it was cancelled at its end
            if not is_over():
                problem = BatchError(code="cannot_be_encoded", message=str(error))
                self._end(batch.id, "failed", errors=BatchErrors(data=[problem]))
        finally:
            if not self._is_stopping and is_over():
                shutil.rmtree(scratch, ignore_errors=True)

    def _write(self, batch: Batch, found: Iterator[tuple[str, Result]]) -> dict[str, Any]:
        """Write the files of results, and return what the record says of them."""
        lines = {"output": 0, "error": 0}
        ids = {kind: f"file-{batch.id.removeprefix('batch_')}-{kind}" for kind in lines}
        with ExitStack() as stack:
            uploads = {kind: stack.enter_context(self.files.create(ids[kind])) for kind in lines}
            for kind, result in found:
                uploads[kind].sink.write(result.model_dump_json().encode() + b"\n")
                lines[kind] += 1
                if self._is_stopping:
                    raise Cancelled
            for kind, upload in uploads.items():
                if lines[kind]:
                    upload.publish(lambda: None)

        counts = RequestCounts(
            total=batch.request_counts.total, completed=lines["output"], failed=lines["error"]
        )
        changes: dict[str, Any] = {"request_counts": counts}
        for kind, id in ids.items():
            if lines[kind]:
                self.files.register(id, f"{batch.id}_{kind}.jsonl", "batch_output")
                changes[f"{kind}_file_id"] = id
        return changes
