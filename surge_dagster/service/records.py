"""Files and batches: their records in one SQLite file, and the contents of files in a folder.

A record belongs to the API key that made it, and does not exist for other keys. It expires. The
content of a file is there before its record, and is removed some time after it.
"""

from __future__ import annotations

import logging
import secrets
import shutil
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, ClassVar, Generic, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from surge_dagster.engine.store.local_store import LocalStore, LocalUpload
from surge_dagster.service.errors import Refusal

log = logging.getLogger(__name__)

MOST_LISTED = 1_000  # a megabyte
LIFE_SECONDS = 30 * 24 * 3600
_COPIED_BYTES = 1 << 20
# Of a content without a record, which an upload may be about to get.
_LEAST_CONTENT_SECONDS = 3600
_SCHEMA = """
CREATE TABLE IF NOT EXISTS records (
    id TEXT PRIMARY KEY, kind TEXT NOT NULL, owner TEXT NOT NULL, expires_at INTEGER NOT NULL,
    document TEXT NOT NULL
)
"""
_PAGE = """
SELECT document FROM records WHERE kind = :kind AND owner = :owner
    AND (:purpose IS NULL OR json_extract(document, '$.purpose') = :purpose)
    AND (COALESCE(:after, '') = '' OR id {past} :after)
    ORDER BY id {order} LIMIT :limit + 1
"""
_OPEN = "kind = 'batch' AND json_extract(document, '$.status') = 'in_progress'"
_INPUTS = f"SELECT json_extract(document, '$.input_file_id') FROM records WHERE {_OPEN}"


class Record(BaseModel, frozen=True):
    """What clients see of a file or a batch; in the order of their ids records were made."""

    kind: ClassVar[str]

    id: str
    created_at: int
    expires_at: int


R = TypeVar("R", bound=Record)


def new_id(prefix: str) -> str:
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(4)}"


def now() -> int:
    return int(time.time())


class FileObject(Record, frozen=True):
    """A file; that of results has the purpose `batch_output`."""

    kind = "file"

    object: Literal["file"] = "file"
    bytes: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"


class FileDeleted(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class PageQuery(BaseModel):
    """Which records a client asks for; only files have a purpose."""

    limit: int = Field(default=MOST_LISTED, ge=1, le=MOST_LISTED)
    after: str | None = None
    order: str = Field(default="desc", description="asc, or desc for anything else")
    purpose: str | None = None


class Page(BaseModel, Generic[R]):
    """Some of the records, in their order."""

    object: Literal["list"] = "list"
    data: list[R]
    has_more: bool
    first_id: str | None
    last_id: str | None


@dataclass(frozen=True, slots=True)
class Records:
    """The records of one API key in a folder.

    Attributes:
        owner: the digest of the key; "" without keys.
    """

    folder: Path
    owner: str = ""

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection; what was written is on the disk at the end."""
        with closing(sqlite3.connect(self.folder / "records.sqlite")) as database, database:
            database.execute(_SCHEMA)
            yield database

    def get(self, kind: type[R], id: str) -> R:
        """Return a record; raises `Refusal` (404) if this key has none."""
        query = "SELECT document FROM records WHERE id = ? AND kind = ? AND owner = ?"
        with self._opened() as database:
            row = database.execute(query, (id, kind.kind, self.owner)).fetchone()
        if row is None:
            message = f"There is no {kind.kind} with the id {id!r:.100}."
            raise Refusal(404, "not_found", message, "id")
        return kind.model_validate_json(row[0])

    def page(self, kind: type[R], query: PageQuery) -> Page[R]:
        """Return a page of the records, the newest first unless the order is `asc`; one that cannot
        be read is left out."""
        statement = _PAGE.format(past="<", order="DESC")
        if query.order == "asc":
            statement = _PAGE.format(past=">", order="ASC")
        values = query.model_dump() | {"kind": kind.kind, "owner": self.owner}
        with self._opened() as database:
            rows = database.execute(statement, values).fetchall()
        data = list[R]()
        for [document] in rows[: query.limit]:
            try:
                data.append(kind.model_validate_json(document))
            except ValidationError as error:
                log.warning("a record cannot be read: %s", error)
        return Page(
            data=data,
            has_more=len(rows) > query.limit,
            first_id=data[0].id if data else None,
            last_id=data[-1].id if data else None,
        )

    def add(self, record: Record) -> None:
        with self._opened() as database:
            self._insert(database, record)

    def _insert(self, database: sqlite3.Connection, record: Record) -> None:
        document = record.model_dump_json()
        values = (record.id, record.kind, self.owner, record.expires_at, document)
        database.execute("INSERT OR REPLACE INTO records VALUES (?, ?, ?, ?, ?)", values)

    def end(self, batch: Record, results: Sequence[FileObject] = ()) -> bool:
        """Write a batch that has ended, and its files; return False if it had ended before."""
        update = f"UPDATE records SET document = ? WHERE id = ? AND {_OPEN}"
        with self._opened() as database:
            is_new = database.execute(update, (batch.model_dump_json(), batch.id)).rowcount == 1
            if is_new:
                for file in results:
                    self._insert(database, file)
        return is_new

    def content(self, id: str) -> Path:
        """Return where the content of a file is, or will be."""
        return self.folder / "files" / f"{id}.jsonl"

    def write(self, id: str) -> LocalUpload:
        """Return an upload, with which a file's content is there as a whole or not at all."""
        return LocalStore(self.folder).create(f"files/{id}.jsonl")

    def upload(
        self,
        filename: str,
        purpose: str,
        source: IO[bytes],
        life_seconds: int | None = None,
    ) -> FileObject:
        """Keep a file that a client has sent."""
        id = new_id("file-")
        with self.write(id) as upload:
            shutil.copyfileobj(source, upload.sink, _COPIED_BYTES)
            upload.publish(lambda: None)
        file = self.described(id, filename, purpose, life_seconds)
        self.add(file)
        return file

    def described(
        self, id: str, filename: str, purpose: str, life_seconds: int | None
    ) -> FileObject:
        """Return the record of a content, which is on the disk then."""
        LocalStore(self.folder).sync("files")
        size = self.content(id).stat().st_size
        created_at = now()
        return FileObject(
            id=id,
            created_at=created_at,
            expires_at=created_at + (life_seconds or LIFE_SECONDS),
            bytes=size,
            filename=filename,
            purpose=purpose,
        )

    def delete_file(self, id: str) -> FileDeleted:
        """Delete a file; raises `Refusal` (409) if an open batch reads it."""
        self.get(FileObject, id)
        with self._opened() as database:
            is_used = f"? IN ({_INPUTS})"
            [in_use] = database.execute(f"SELECT {is_used}", (id,)).fetchone()
            if in_use:
                message = f"An open batch reads the file {id}. Cancel it, or wait for its end."
                raise Refusal(409, "file_in_use", message, "id")
            database.execute("DELETE FROM records WHERE id = ?", (id,))
        self.content(id).unlink(missing_ok=True)
        return FileDeleted(id=id)

    # Below are those of all keys.

    def open_batches(self) -> list[tuple[str, Records]]:
        """Return the ids of batches that have not ended, the oldest first, and records of their
        keys."""
        query = f"SELECT id, owner FROM records WHERE {_OPEN} ORDER BY id"
        with self._opened() as database:
            rows = database.execute(query).fetchall()
        return [(id, Records(self.folder, owner)) for id, owner in rows]

    def remove_expired(self) -> None:
        """Remove what has expired, except open batches and the files that they read."""
        is_expired = f"expires_at < ? AND NOT ({_OPEN}) AND id NOT IN ({_INPUTS})"
        with self._opened() as database:
            database.execute(f"DELETE FROM records WHERE {is_expired}", (now(),))
            kept = {row[0] for row in database.execute("SELECT id FROM records")}
        for path in (self.folder / "files").glob("file-*.jsonl"):
            if path.stem not in kept and path.stat().st_mtime < now() - _LEAST_CONTENT_SECONDS:
                path.unlink(missing_ok=True)
