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
_PIECE_BYTES = 1024 * 1024  # of small reads that follow each other


class ObjectReader(io.RawIOBase):
    """Reads one version of one object; small reads that follow each other share a request.

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
        self._start = 0
        self._buffer = b""

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

    def read(self, size: int | None = -1, /) -> bytes:
        remaining = max(0, self._size - self._position)
        wanted = remaining if size is None or size < 0 else min(size, remaining)
        if not wanted:
            return b""

        begin = self._position
        self._position += wanted
        tail_start = self._size - len(self._tail)
        if begin >= tail_start:
            return self._tail[begin - tail_start : begin - tail_start + wanted]

        if begin < self._start or begin + wanted > self._start + len(self._buffer):
            self._buffer = self._fetch(begin, min(max(wanted, _PIECE_BYTES), remaining))
            self._start = begin
        return self._buffer[begin - self._start : begin - self._start + wanted]

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
