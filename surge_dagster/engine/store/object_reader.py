"""An object in a store as a file that Arrow can read: the first request reads its end, later ones read ranges.

obstore's own reader asks for the size first and may mix two versions of an object that is replaced meanwhile.
"""

from __future__ import annotations

import io
from typing import Any

import obstore
from obstore.exceptions import PreconditionError

from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.store.request_errors import NOT_PARTIAL, UNSUPPORTED, RequestFailed, request_errors
from surge_dagster.engine.store.retries import Retrier

TAIL_BYTES = 64 * 1024
READ_AHEAD_BYTES = 1024 * 1024


class ObjectReader(io.RawIOBase):
    """Reads one version of one object; small reads that follow each other share a request.

    Args:
        store: an obstore store.
        key: within it.
        tail_bytes: of the object's end, which the first request brings and which are kept.

    Raises:
        FileNotFoundError: there is no such object.
        TransientError: the store does not answer, or the object was replaced while it was read.
    """

    def __init__(self, store: Any, key: str, retrier: Retrier, tail_bytes: int = TAIL_BYTES) -> None:
        super().__init__()
        self._store = store
        self._key = key
        self._retrier = retrier
        self._position = 0
        self._size, self._etag, self._tail = fetch_end(store, key, retrier, tail_bytes)
        self._start, self._buffer = 0, b""

    @property
    def etag(self) -> str | None:
        """Tag of the version that is read."""
        return self._etag

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
        left = max(0, self._size - self._position)
        wanted = left if size is None or size < 0 else min(size, left)
        if not wanted:
            return b""
        begin, held = self._position - (self._size - len(self._tail)), self._tail
        if begin < 0:
            begin, held = self._position - self._start, self._buffer
            if not (begin >= 0 and begin + wanted <= len(self._buffer)):
                held = self._buffer = self._fetch(self._position, min(max(wanted, READ_AHEAD_BYTES), left))
                self._start, begin = self._position, 0
        self._position += wanted
        return held[begin : begin + wanted]

    def readinto(self, buffer: Any, /) -> int:
        content = self.read(len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def _fetch(self, start: int, length: int) -> bytes:
        try:
            return self._retrier.call(
                f"GET {self._key}", lambda: _range(self._store, self._key, start, length, self._etag)
            )
        except (PreconditionError, FileNotFoundError):
            raise _replaced(self._key) from None


def fetch_end(store: Any, key: str, retrier: Retrier, length: int) -> tuple[int, str | None, bytes]:
    """Size and etag of an object as it is now, and its last `length` bytes, or all of it; one request where possible.

    Raises:
        FileNotFoundError: there is no such object.
        TransientError: the store does not answer, or the object was replaced while it was read.
    """

    def attempt() -> tuple[int, str | None, bytes]:
        try:
            with request_errors():
                found = obstore.get(store, key, options={"range": {"suffix": length}})
                start, end = found.range
                return found.meta["size"], found.meta["e_tag"], _whole(bytes(found.bytes()), end - start)
        except RequestFailed as failed:
            if failed.cause not in (UNSUPPORTED, NOT_PARTIAL, "416"):
                raise
        # Azure has no ranges from the end, and an empty object has no range at all.
        with request_errors():
            meta = obstore.head(store, key)
        size, etag = meta["size"], meta["e_tag"]
        kept = min(length, size)
        return size, etag, _range(store, key, size - kept, kept, etag) if kept else b""

    try:
        return retrier.call(f"GET {key}", attempt)
    except PreconditionError:
        raise _replaced(key) from None


def _range(store: Any, key: str, start: int, length: int, etag: str | None) -> bytes:
    options: Any = {"range": (start, start + length)} | ({"if_match": etag} if etag else {})
    with request_errors():
        return _whole(bytes(obstore.get(store, key, options=options).bytes()), length)


def _whole(content: bytes, length: int) -> bytes:
    if len(content) != length:
        raise RequestFailed("short", f"{len(content):,} of {length:,} bytes came", retryable=True)
    return content


def _replaced(key: str) -> TransientError:
    return TransientError(f"{key!r} was replaced or removed while it was read. Run again.")
