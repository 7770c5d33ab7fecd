"""Writing through obstore alone, for the clouds that only it speaks to (Azure), and for its memory store.

Whole objects are put on a condition and tried again like everywhere. The parts of a large object go through obstore's
own writer, which cannot send one of them again: what fails there fails the upload, which leaves nothing visible.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, NotFoundError, PreconditionError

from surge_dagster.engine.store.obstore_errors import request_errors
from surge_dagster.engine.store.xml_client import Body, ConditionFailed, UnfinishedUpload, Version

_MARK = "surge_upload"


class ObstoreClient:
    """Single requests through an obstore store; see `XmlClient` for what each does."""

    part_retries = False
    conditional_parts = False

    def __init__(self, store: Any, part_bytes: int) -> None:
        self._store = store
        self._part_bytes = part_bytes
        self._writers: dict[str, Any] = {}

    def head(self, key: str) -> Version | None:
        try:
            with request_errors():
                # Only an answer with a body carries the attributes; the body is not read.
                found = obstore.get(self._store, key)
        except (FileNotFoundError, NotFoundError):
            return None
        etag = found.meta["e_tag"] or ""
        mark = found.attributes.get(_MARK)
        return Version(found.meta["size"], etag, etag, str(mark) if mark else None)

    def put(self, key: str, body: Body, replacing: Version | None, mark: str) -> str:
        mode: Any = {"e_tag": replacing.condition} if replacing else "create"
        try:
            with request_errors():
                stored = obstore.put(
                    self._store, key, bytes(body), mode=mode, attributes={_MARK: mark}, use_multipart=False
                )
        except (AlreadyExistsError, PreconditionError, FileNotFoundError, NotFoundError):
            raise ConditionFailed from None
        return stored["e_tag"] or ""

    def begin(self, key: str, mark: str) -> str:
        with request_errors():
            self._writers[mark] = obstore.open_writer(
                self._store, key, attributes={_MARK: mark}, buffer_size=self._part_bytes, max_concurrency=1
            )
        return mark

    def put_part(self, key: str, upload_id: str, number: int, body: Body) -> str:
        with request_errors():
            self._writers[upload_id].write(bytes(body))
        return ""

    def complete(self, key: str, upload_id: str, parts: list[str], replacing: Version | None) -> None:
        with request_errors():
            self._writers.pop(upload_id).close()

    def abort(self, key: str, upload_id: str) -> None:
        self._writers.pop(upload_id, None)  # never closed, it completes nothing

    def unfinished(self, prefix: str) -> Iterator[UnfinishedUpload]:
        yield from ()  # Azure forgets uncommitted blocks by itself, after a week
