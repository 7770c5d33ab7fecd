"""Files that clients upload and batches write, and records in JSON, on the local disk.

Each record is a file of its own that is replaced as a whole, so that `ls` and `cat` show what there is.
"""

from __future__ import annotations

import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import IO, Any, Generic, Literal, TypeVar, cast

from pydantic import BaseModel
from starlette.datastructures import QueryParams

from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.service.errors import ClientError

# Those of OpenAI's API; only files for batches are of use here.
PURPOSES = ("assistants", "batch", "evals", "fine-tune", "user_data", "vision")
_MOST_LISTED = 10_000
_CHUNK_BYTES = 1 << 20


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
    """The records of one kind in a folder; sorted by id, they stand in the order in which they were made.

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
        if re.fullmatch(f"{self._prefix}[0-9a-f]{{24}}", id):
            try:
                return self._kind.model_validate_json((self.folder / f"{id}.json").read_bytes())
            except FileNotFoundError:
                pass
        raise ClientError(404, f"There is no {self._prefix[:-1]} with the id {id!r}.", "not_found", "id")

    def put(self, record: R) -> None:
        """Write it, and wait until it is on the disk."""
        with self._store.create(f"{self._name}/{record.id}.json") as upload:
            upload.sink.write(record.model_dump_json(indent=1).encode() + b"\n")
            upload.publish(lambda: None)
        self._store.sync(self._name)

    def all(self, *, newest_first: bool = False) -> Iterator[R]:
        """Those that nobody removes meanwhile."""
        names = (PurePath(stored.name) for stored in self._store.list(self._name))
        for id in sorted((name.stem for name in names if name.suffix == ".json"), reverse=newest_first):
            try:
                yield self.get(id)
            except ClientError:
                continue

    def page(self, query: QueryParams, limit: int, is_wanted: Callable[[R], bool] | None = None) -> Page[R]:
        """What OpenAI's API answers to `after`, `limit` (else this one) and `order`; the newest come first."""
        given = query.get("limit", str(limit))
        if not given.isdecimal() or not 1 <= int(given) <= _MOST_LISTED:
            raise ClientError(400, f"limit is {given!r}: expected 1 to {_MOST_LISTED:,}.", "invalid_value", "limit")
        falls, after = query.get("order") != "asc", query.get("after")
        found = list[R]()
        for record in self.all(newest_first=falls):
            is_beyond = not after or (record.id < after if falls else record.id > after)
            if is_beyond and (is_wanted is None or is_wanted(record)):
                found.append(record)
            if len(found) > int(given):
                break
        data = found[: int(given)]
        ends = (data[0].id, data[-1].id) if data else (None, None)
        return Page(data=data, has_more=len(found) > len(data), first_id=ends[0], last_id=ends[1])


class FileObject(Record, frozen=True):
    """A file; that of results has the purpose `batch_output`."""

    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


class FileStore(Records[FileObject]):
    """Files of a local store."""

    def __init__(self, store: LocalStore) -> None:
        super().__init__(store, "files", "file-", FileObject)

    def content(self, id: str) -> Path:
        """Where the content of a file is, or will be."""
        return self.folder / f"{id}.jsonl"

    def make(self, id: str) -> Path:
        """Where a batch writes the content of a file that it registers later."""
        path = self.content(id)
        if not path.exists():
            path.touch()
            self._store.sync("files")
        return path

    def upload(self, filename: str, purpose: str, source: IO[bytes]) -> FileObject:
        """Keep a file that a client has sent; it is there as a whole or not at all."""
        id = self.new_id()
        with self._store.create(f"files/{id}.jsonl") as upload:
            shutil.copyfileobj(source, cast(Any, upload.sink), _CHUNK_BYTES)
            upload.publish(lambda: None)
        return self.register(id, filename, purpose)

    def register(self, id: str, filename: str, purpose: str) -> FileObject:
        """Make a file whose content is there known to clients."""
        size = self.content(id).stat().st_size
        record = FileObject(id=id, bytes=size, created_at=int(time.time()), filename=filename, purpose=purpose)
        self.put(record)
        return record

    def remove(self, id: str) -> None:
        (self.folder / f"{id}.json").unlink()
        self.content(id).unlink(missing_ok=True)
