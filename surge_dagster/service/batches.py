"""Batches: what clients ask to have encoded when the device has time, kept in a folder until it is done.

A thread per space works them off in the order in which they were made. What was open when a service ended, however it
ended, goes on when the next one has the folder.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.prompts import Task
from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.engine.support.waiting import wait_for_thread
from surge_dagster.service.batch_lines import (
    OPEN,
    Batch,
    BatchError,
    BatchErrors,
    BatchRequest,
    Progress,
    parse_line,
    read_lines,
)
from surge_dagster.service.batch_run import BatchEnd, BatchRun
from surge_dagster.service.errors import ClientError
from surge_dagster.service.files import FileStore, Records
from surge_dagster.service.spaces import ServedSpaces

log = logging.getLogger(__name__)

_WINDOW_SECONDS = 24 * 3600
_AGAIN_SECONDS = 10.0  # after an error of the disk


class Batches:
    """The batches and files of a folder, which no other service may use meanwhile.

    Args:
        spaces: are started before this, and closed after it.

    Raises:
        ConfigError: the folder cannot be written, or another service uses it.
    """

    def __init__(self, spaces: ServedSpaces, folder: Path) -> None:
        store = LocalStore(folder)
        store.prepare("")
        self._owned = FileLock(folder / ".service.lock", thread_local=False)
        try:
            self._owned.acquire(blocking=False)
        except Timeout:
            raise ConfigError(f"another service uses the folder {folder}. Give each service one of its own.") from None
        self.files, self.records = FileStore(store), Records(store, "batches", "batch_", Batch)
        self._spaces = spaces
        self._changes = threading.RLock()
        self._stopping = threading.Event()
        self._running: dict[str, str] = {}  # the batch of each space
        self._cancelled: set[str] = set()
        self._threads: dict[str, threading.Thread] = {}

    def start(self) -> None:
        """Go on with what is open."""
        for batch in self.records.all():
            if batch.status in OPEN:
                if batch.status == "cancelling":
                    self._cancelled.add(batch.id)
                self._work_on(batch)

    def close(self) -> None:
        """End the threads; what they had in the lanes is done again later."""
        self._stopping.set()
        for thread in list(self._threads.values()):
            wait_for_thread(thread)
        self._owned.release()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def create(self, asked: BatchRequest, task: Task) -> Batch:
        """Make a batch of an uploaded file, in the space that its first line names.

        Args:
            task: of lines that do not say whether they hold queries or documents.

        Raises:
            ClientError: there is no such file, or it is for something else.
            UnknownSpace, SpaceLoading: see `ServedSpaces.find`.
        """
        model = self._first_model(asked.input_file_id)
        space = self._spaces.find(model).space.name if model else None
        with self._changes:
            if (purpose := self.files.get(asked.input_file_id).purpose) != "batch":
                message = f"The file {asked.input_file_id} has the purpose {purpose!r}: expected 'batch'."
                raise ClientError(400, message, "invalid_purpose", "input_file_id")
            now = int(time.time())
            batch = Batch(
                id=self.records.new_id(),
                model=space,
                created_at=now,
                expires_at=now + _WINDOW_SECONDS,
                progress=Progress(task=task, output_id=self.files.new_id(), error_id=self.files.new_id()),
                **asked.model_dump(),
            )
            self.records.put(batch)
            self._work_on(batch)
        return batch

    def cancel(self, id: str) -> Batch:
        """End a batch soon; what is answered by then stays."""
        with self._changes:
            batch = self.records.get(id)
            if batch.status not in OPEN:
                raise ClientError(409, f"The batch {id} is {batch.status} and cannot be cancelled.", "batch_ended")
            if batch.status != "cancelling":
                batch = self._change(id, status="cancelling", cancelling_at=int(time.time()))
            self._cancelled.add(id)
            return batch if id in self._running.values() else self._end(id, "cancelled")

    def delete_file(self, id: str) -> None:
        with self._changes:
            self.files.get(id)
            for batch in self.records.all():
                if batch.status in OPEN and batch.input_file_id == id:
                    message = f"The batch {batch.id} reads the file {id}. Cancel it, or wait for its end."
                    raise ClientError(409, message, "file_in_use", "id")
            self.files.remove(id)

    def _first_model(self, file_id: str) -> str | None:
        """The model of the first line; None where it has none, of which the check of the lines tells."""
        self.files.get(file_id)
        with self.files.content(file_id).open("rb") as file:
            for line in read_lines(file):
                try:
                    return parse_line(*line).request.model
                except ClientError:
                    break
        return None

    def _work_on(self, batch: Batch) -> None:
        space = batch.model or ""
        with self._changes:
            if space not in self._threads:
                thread = threading.Thread(target=self._work, args=(space,), name="surge-batches", daemon=True)
                self._threads[space] = thread
                thread.start()

    # Below runs in the thread of a space.

    def _work(self, space: str) -> None:
        while (batch := self._next(space)) is not None:
            try:
                self.run(batch)
            except Exception as error:  # of the disk, or a defect
                log.exception("the batch %s is tried again in %g s", batch.id, _AGAIN_SECONDS)
                if time.time() > batch.expires_at:
                    self._end(batch.id, "failed", [BatchError(code="internal_error", message=str(error))])
                self._stopping.wait(_AGAIN_SECONDS)

    def _next(self, space: str) -> Batch | None:
        with self._changes:
            open_ones = (each for each in self.records.all() if each.status in OPEN and (each.model or "") == space)
            batch = None if self._stopping.is_set() else next(open_ones, None)
            if batch is None:
                del self._threads[space]
                self._running.pop(space, None)
            else:
                self._running[space] = batch.id
            return batch

    def run(self, batch: Batch) -> None:
        """Work off a batch; returns early when the service stops."""
        run = BatchRun(batch, self._spaces, self.files, partial(self._check, batch), partial(self._change, batch.id))
        try:
            if batch.status == "validating":
                run.validate()
            run.encode()
            self._change(batch.id, status="finalizing", finalizing_at=int(time.time()))
            self._end(batch.id, "completed")
        except BatchEnd as end:
            if end.errors and run.batch.in_progress_at:
                run.refuse(end.errors[0])
            if end.status:
                self._end(batch.id, end.status, end.errors if end.status == "failed" else ())

    def _check(self, batch: Batch) -> None:
        if self._stopping.is_set():
            raise BatchEnd("")
        if batch.id in self._cancelled:
            raise BatchEnd("cancelled")
        if time.time() > batch.expires_at:
            message = "The batch was not done within its completion window. Make one of the requests that are left."
            raise BatchEnd("expired", [BatchError(code="batch_expired", message=message)])

    def _change(self, id: str, **changes: Any) -> Batch:
        with self._changes:
            batch = self.records.get(id)
            if batch.status == "cancelling" and changes.get("status") in OPEN:
                del changes["status"]
            batch = batch.model_copy(update=changes)
            self.records.put(batch)
            return batch

    def _end(self, id: str, status: str, errors: Sequence[BatchError] = ()) -> Batch:
        """Show clients what the batch has written, as far as its record knows of it."""
        with self._changes:
            progress = self.records.get(id).progress
            if id in self._cancelled:
                status = "cancelled"
                self._cancelled.discard(id)
            shown: dict[str, Any] = {}
            for kind in ("output", "error"):
                file_id, size = getattr(progress, f"{kind}_id"), getattr(progress, f"{kind}_bytes")
                if size:
                    os.truncate(self.files.content(file_id), size)
                    self.files.register(file_id, f"{id}_{kind}.jsonl", "batch_output")
                    shown[f"{kind}_file_id"] = file_id
                else:
                    self.files.content(file_id).unlink(missing_ok=True)
            if errors:
                shown["errors"] = BatchErrors(data=list(errors))
            return self._change(id, status=status, **{f"{status}_at": int(time.time())}, **shown)
