"""Files that clients upload and batches write, and records in JSON, on the local disk.

Each record is a file of its own that is replaced as a whole, so that `ls` and `cat` show what there
is.
"""

from __future__ import annotations

import re
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Generic, Literal, TypeVar

from pydantic import BaseModel

from surge_dagster.engine.store.local_store import LocalStore, LocalUpload
from surge_dagster.service.errors import Refusal

MOST_LISTED = 10_000
_COPIED_BYTES = 1 << 20


class Record(BaseModel, frozen=True):
    id: str


R = TypeVar("R", bound=Record)


class Page(BaseModel, Generic[R]):
    """Some of the records, in their order."""

    object: Literal["list"] = "list"
    data: list[R]
    has_more: bool
    first_id: str | None
    last_id: str | None


class Records(Generic[R]):
    """The records of one kind in a folder; sorted by id, they stand in the order in which they were
    made.

    Raises:
        ConfigError: the folder cannot be written.
    """

    def __init__(self, store: LocalStore, folder: str, prefix: str, kind: type[R]) -> None:
        self.folder = store.root / folder
        self._store = store
        self._name = folder
        self._prefix = prefix
        self._kind = kind
        store.prepare(folder)
        store.sweep(folder)

    def new_id(self) -> str:
        return f"{self._prefix}{time.time_ns():016x}{secrets.token_hex(4)}"

    def get(self, id: str) -> R:
        """Return a record; raises `Refusal` (404) if there is none."""
        if re.fullmatch(rf"{self._prefix}[0-9a-f]{{24}}[\w-]{{0,16}}", id, re.ASCII):
            try:
                return self._kind.model_validate_json((self.folder / f"{id}.json").read_bytes())
            except FileNotFoundError:
                pass
        message = f"There is no {self._prefix[:-1]} with the id {id!r:.100}."
        raise Refusal(404, "not_found", message, "id")

    def put(self, record: R) -> None:
        """Write a record, and wait until it is on the disk."""
        with self._store.create(f"{self._name}/{record.id}.json") as upload:
            upload.sink.write(record.model_dump_json(indent=1).encode() + b"\n")
            upload.publish(lambda: None)
        self._store.sync(self._name)

    def all(self) -> list[R]:
        """Return the records, without those that are removed at the same time."""
        records = list[R]()
        for path in sorted(self.folder.glob(f"{self._prefix}*.json")):
            with suppress(Refusal):
                records.append(self.get(path.stem))
        return records

    def page(
        self, limit: int, after: str | None, order: str, purpose: str | None = None
    ) -> Page[R]:
        """Return a page of the records, the newest first unless the order is `asc`."""
        found = self.all()
        if order != "asc":
            found.reverse()
        if purpose is not None:
            found = [each for each in found if getattr(each, "purpose", None) == purpose]
        if after:
            is_rising = order == "asc"
            found = [each for each in found if each.id != after and (each.id > after) == is_rising]
        data = found[:limit]
        return Page(
            data=data,
            has_more=len(found) > limit,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
        )


class FileObject(Record, frozen=True):
    """A file; that of results has the purpose `batch_output`."""

    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


class FileDeleted(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class FileStore(Records[FileObject]):
    """Files of a local store."""

    def __init__(self, store: LocalStore) -> None:
        super().__init__(store, "files", "file-", FileObject)

    def content(self, id: str) -> Path:
        """Return where the content of a file is, or will be."""
        return self.folder / f"{id}.jsonl"

    def create(self, id: str) -> LocalUpload:
        """Return an upload, with which a file's content is there as a whole or not at all."""
        return self._store.create(f"files/{id}.jsonl")

    def upload(self, filename: str, purpose: str, source: IO[bytes]) -> FileObject:
        """Keep a file that a client has sent."""
        id = self.new_id()
        with self.create(id) as upload:
            while part := source.read(_COPIED_BYTES):
                upload.sink.write(part)
            upload.publish(lambda: None)
        return self.register(id, filename, purpose)

    def register(self, id: str, filename: str, purpose: str) -> FileObject:
        """Make a file whose content is there known to clients."""
        size = self.content(id).stat().st_size
        record = FileObject(
            id=id, bytes=size, created_at=int(time.time()), filename=filename, purpose=purpose
        )
        self.put(record)
        return record

    def remove(self, id: str) -> FileDeleted:
        (self.folder / f"{id}.json").unlink()
        self.content(id).unlink(missing_ok=True)
        return FileDeleted(id=id)
