"""Batches: what clients ask to have encoded when the device has time, kept in a folder until it is
done.

A thread works them off in the order in which they were made. One whose space takes nothing now is
tried again after the others. What was open when a service ended, however it ended, goes on when the
next one has the folder.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from surge_dagster.engine.errors import Cancelled, ConfigError, SurgeError
from surge_dagster.engine.model.prompts import Task
from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.engine.support.waiting import wait_for_thread
from surge_dagster.service.batch_lines import (
    OPEN,
    Batch,
    BatchErrors,
    BatchRequest,
    parse_line,
    read_lines,
)
from surge_dagster.service.batch_run import BatchFailed, BatchRun
from surge_dagster.service.errors import ClientError
from surge_dagster.service.files import FileDeleted, FileStore, Records
from surge_dagster.service.spaces import ServedSpaces

log = logging.getLogger(__name__)

_AGAIN_SECONDS = 10.0
# before the first request, since nothing else is done while they are read
_MOST_BLANK_LINES = 1_000


class Batches:
    """The batches and files of a folder, which no other service may use meanwhile. Use `with` to
    work on them.

    Args:
        spaces: are started before this, and closed after it.

    Raises:
        ConfigError: the folder cannot be written, or another service uses it.
    """

    def __init__(self, spaces: ServedSpaces, folder: Path) -> None:
        store = LocalStore(folder)
        store.prepare("")
        self._owned = FileLock(folder / ".service.lock", blocking=False, thread_local=False)
        try:
            self._owned.acquire()
        except Timeout:
            raise ConfigError(
                f"another service uses the folder {folder}. Give each service one of its own."
            ) from None
        self.files, self.records = FileStore(store), Records(store, "batches", "batch_", Batch)
        self._spaces = spaces
        self._changes = threading.RLock()
        self._stopping = False
        self._has_work = threading.Event()
        self._thread = threading.Thread(target=self._work, name="surge-batches", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread; what it had in the lanes is done again later."""
        self._stopping = True
        self._has_work.set()
        if self._thread.ident is not None:
            wait_for_thread(self._thread)
        self._owned.release()

    def create(self, asked: BatchRequest, task: Task) -> Batch:
        """Make a batch of an uploaded file, in the space that its first line names.

        Args:
            task: "document": all lines hold documents, whatever the endpoint, unless they say
                otherwise.

        Raises:
            ClientError: there is no such file, or its first line is wrong.
            UnknownSpace, SpaceLoading: see `ServedSpaces.find`.
        """
        with self._changes:
            self.files.get(asked.input_file_id)
            with self.files.content(asked.input_file_id).open("rb") as file:
                first = next(read_lines(islice(file, _MOST_BLANK_LINES)), None)
            if first is None:
                message = f"The file has no request in its first {_MOST_BLANK_LINES:,} lines. Send one in each line."
                raise ClientError(400, message, "empty_file", "input_file_id")
            space = self._spaces.find(parse_line(*first).request.model).space
            if task == "document":
                asked = asked.model_copy(update={"endpoint": "/documents/v1/embeddings"})
            id, fields = self.records.new_id(), asked.model_dump()
            batch = Batch(id=id, model=space.name, created_at=int(time.time()), **fields)
            self.records.put(batch)
        self._has_work.set()
        return batch

    def cancel(self, id: str) -> Batch:
        """End a batch; what is answered by now stays."""
        with self._changes:
            if (status := self.records.get(id).status) not in OPEN:
                raise ClientError(
                    409, f"The batch {id} is {status} and cannot be cancelled.", "batch_ended"
                )
            return self._end(id, "cancelled")

    def delete_file(self, id: str) -> FileDeleted:
        with self._changes:
            self.files.get(id)
            for batch in self._open():
                if batch.input_file_id == id:
                    message = (
                        f"The batch {batch.id} reads the file {id}. Cancel it, or wait for its end."
                    )
                    raise ClientError(409, message, "file_in_use", "id")
            return self.files.remove(id)

    def _open(self) -> list[Batch]:
        return [batch for batch in self.records.all() if batch.status in OPEN]

    # Below runs in the thread.

    def _work(self) -> None:
        while not self._stopping:
            self._has_work.clear()
            for batch in (tried := self._open()):
                try:
                    self.run(batch.id)
                except Cancelled:
                    pass
                except Exception as error:
                    is_known = isinstance(error, SurgeError)  # else it is of the disk, or a defect
                    log.warning(
                        "%s is tried again in %g s: %s",
                        batch.id,
                        _AGAIN_SECONDS,
                        error,
                        exc_info=not is_known,
                    )
            self._has_work.wait(_AGAIN_SECONDS if tried else None)

    def run(self, id: str) -> None:
        """Work off a batch.

        Raises:
            Cancelled: it has ended, or the service stops.
            SurgeError: it is to be tried again.
        """
        batch = self.records.get(id)
        run = BatchRun(
            batch, self._spaces, self.files, partial(self._check, id), partial(self._change, id)
        )
        self._check(id)
        try:
            if batch.status == "validating":
                run.validate()
            run.encode()
            self._end(id, "completed")
        except BatchFailed as failed:
            if run.batch.status == "in_progress":
                run.refuse(failed.errors[0])
            self._end(id, "failed", errors=BatchErrors(data=failed.errors))

    def _check(self, id: str) -> None:
        if self._stopping or self.records.get(id).status not in OPEN:
            raise Cancelled

    def _change(self, id: str, results: Mapping[str, bytes], **changes: Any) -> Batch:
        """Append results to the files of their kinds, and change the record; `Cancelled` where the
        batch has ended."""
        with self._changes:
            batch = self.records.get(id)
            if batch.status not in OPEN:
                raise Cancelled
            for kind, content in results.items():
                size = getattr(batch, f"{kind}_bytes")
                changes[f"{kind}_bytes"] = self.files.append(batch.results_id(kind), size, content)
            batch = batch.model_copy(update=changes)
            self.records.put(batch)
            return batch

    def _end(self, id: str, status: str, **shown: Any) -> Batch:
        """Show clients what the batch has written, as far as its record knows of it."""
        with self._changes:
            batch = self.records.get(id)
            shown |= {"status": status, f"{status}_at": int(time.time())}
            for kind in ("output", "error"):
                if size := getattr(batch, f"{kind}_bytes"):
                    shown[f"{kind}_file_id"] = file_id = batch.results_id(kind)
                    os.truncate(self.files.content(file_id), size)
                    self.files.register(file_id, f"{id}_{kind}.jsonl", "batch_output")
            return self._change(id, {}, **shown)
