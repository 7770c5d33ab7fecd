"""Files that clients upload and batches write, and records in JSON, on the local disk.

Each record is a file of its own that is replaced as a whole, so that `ls` and `cat` show what there
is.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import IO, Any, Generic, Literal, TypeVar, cast

from pydantic import BaseModel

from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.service.errors import ClientError

MOST_LISTED = 10_000


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
        self._store, self._name, self._prefix, self._kind = store, folder, prefix, kind
        store.prepare(folder)
        store.sweep(folder)

    def new_id(self) -> str:
        return f"{self._prefix}{time.time_ns():016x}{secrets.token_hex(4)}"

    def get(self, id: str) -> R:
        """Raises `ClientError` (404) where there is none."""
        if re.fullmatch(rf"{self._prefix}[0-9a-f]{{24}}[\w-]{{0,16}}", id, re.ASCII):
            try:
                return self._kind.model_validate_json((self.folder / f"{id}.json").read_bytes())
            except FileNotFoundError:
                pass
        raise ClientError(
            404, f"There is no {self._prefix[:-1]} with the id {id!r}.", "not_found", "id"
        )

    def put(self, record: R) -> None:
        """Write it, and wait until it is on the disk."""
        with self._store.create(f"{self._name}/{record.id}.json") as upload:
            upload.sink.write(record.model_dump_json(indent=1).encode() + b"\n")
            upload.publish(lambda: None)
        self._store.sync(self._name)

    def all(self) -> Iterator[R]:
        """Those that nobody removes meanwhile."""
        names = (PurePath(stored.name) for stored in self._store.list(self._name))
        for id in sorted(name.stem for name in names if name.suffix == ".json"):
            try:
                yield self.get(id)
            except ClientError:
                continue

    def page(
        self, limit: int, after: str | None = None, order: str = "desc", purpose: str | None = None
    ) -> Page[R]:
        """Return a page of the records, the newest first unless the order is `asc`."""
        found = [
            record
            for record in self.all()
            if not purpose or getattr(record, "purpose", None) == purpose
        ]
        if order == "asc":
            found = [record for record in found if not after or record.id > after]
        else:
            found = [record for record in reversed(found) if not after or record.id < after]
        data = found[:limit]
        first_id = data[0].id if data else None
        last_id = data[-1].id if data else None
        return Page(data=data, has_more=len(found) > len(data), first_id=first_id, last_id=last_id)


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
        """Where the content of a file is, or will be."""
        return self.folder / f"{id}.jsonl"

    def append(self, id: str, size: int, content: bytes) -> int:
        """Write behind this size of a file that is registered later; gives the new size when it is
        on the disk."""
        with self.content(id).open("ab") as file:
            file.truncate(size)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        self._store.sync("files")
        return size + len(content)

    def upload(self, filename: str, purpose: str, source: IO[bytes]) -> FileObject:
        """Keep a file that a client has sent; it is there as a whole or not at all."""
        id = self.new_id()
        with self._store.create(f"files/{id}.jsonl") as upload:
            shutil.copyfileobj(source, cast(Any, upload.sink))
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
