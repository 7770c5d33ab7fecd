"""An object in a store as a file that Arrow can read: the first request reads its end, later ones
read ranges.

obstore's own reader requests the size first, and may mix two versions of an object that is replaced
while it is read.
"""

from __future__ import annotations

import io
from functools import partial
from typing import Any

import obstore
from obstore.exceptions import BaseError, NotSupportedError, PreconditionError

from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.store.requests import Requests

TAIL_BYTES = 64 * 1024
READ_BYTES = 1024 * 1024  # of a request, if smaller reads follow each other


class ObjectReader(io.RawIOBase):
    """Reads one version of one object; each read beyond its end is a request.

    Args:
        tail_bytes: of the object's end, which the first request brings and which are kept.
    """

    def __init__(
        self, store: Any, key: str, requests: Requests, tail_bytes: int = TAIL_BYTES
    ) -> None:
        super().__init__()
        self._store = store
        self._key = key
        self._requests = requests
        self._position = 0
        self._size, self.etag, self._tail = fetch_end(store, key, requests, tail_bytes)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def size(self) -> int:
        return self._size

    def readinto(self, buffer: Any, /) -> int:
        begin = self._position
        length = max(0, min(len(buffer), self._size - begin))
        tail_start = self._size - len(self._tail)
        if begin >= tail_start:
            content = self._tail[begin - tail_start : begin - tail_start + length]
        else:
            content = self._fetch(begin, length)
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)

    def _fetch(self, start: int, length: int) -> bytes:
        request = partial(_range, self._store, self._key, start, length, self.etag)
        try:
            return self._requests.send(f"GET {self._key}", request)
        except (PreconditionError, FileNotFoundError):
            raise _replaced(self._key) from None


def fetch_end(
    store: Any, key: str, requests: Requests, length: int
) -> tuple[int, str | None, bytes]:
    """Return size and etag of an object now, and its last `length` bytes, or all of it; one request
    if the store can."""

    def request() -> tuple[int, str | None, bytes]:
        try:
            return _suffix(store, key, length)
        except (BaseError, OSError) as error:
            if not _is_without_suffixes(error):
                raise
        meta = obstore.head(store, key)
        size = meta["size"]
        etag = meta["e_tag"]
        kept = min(length, size)
        return size, etag, _range(store, key, size - kept, kept, etag) if kept else b""

    try:
        return requests.send(f"GET {key}", request)
    except PreconditionError:
        raise _replaced(key) from None


def _suffix(store: Any, key: str, length: int) -> tuple[int, str | None, bytes]:
    answer = obstore.get(store, key, options={"range": {"suffix": length}})
    return answer.meta["size"], answer.meta["e_tag"], bytes(answer.bytes())


def _is_without_suffixes(error: BaseError | OSError) -> bool:
    """Return whether the store gives no range from the end: Azure never does, and an empty object
    has no range at all."""
    text = str(error)
    return isinstance(error, NotSupportedError) or "NotPartial" in text or "code: 416" in text


def _range(store: Any, key: str, start: int, length: int, etag: str | None) -> bytes:
    options: Any = {"range": (start, start + length)}
    if etag:
        options["if_match"] = etag
    return bytes(obstore.get(store, key, options=options).bytes())


def _replaced(key: str) -> TransientError:
    return TransientError(f"{key!r} was replaced or removed while it was read. Run again.")
