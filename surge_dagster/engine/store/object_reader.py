"""An object in a store as a file that Arrow can read: the first request reads its end, later ones
read ranges.

obstore's own reader asks for the size first and may mix two versions of an object that is replaced
meanwhile.
"""

from __future__ import annotations

import io
from collections import deque
from concurrent.futures import Future
from functools import partial
from typing import Any

import obstore
from obstore.exceptions import PreconditionError

from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.store.request_errors import (
    NOT_PARTIAL,
    UNSUPPORTED,
    RequestFailed,
    request_errors,
)
from surge_dagster.engine.store.retries import Retrier
from surge_dagster.engine.support.waiting import in_background, result_of

TAIL_BYTES = 64 * 1024
READ_AHEAD_BYTES = 1024 * 1024
_STREAMS = 2  # places of an object that are read in turns, as two columns of a Parquet file are


class ObjectReader(io.RawIOBase):
    """Reads one version of one object; small reads that follow each other share a request.

    Args:
        tail_bytes: of the object's end, which the first request brings and which are kept.
        ahead: whether the next piece is requested while one is read, where pieces follow each
            other.
    """

    def __init__(
        self,
        store: Any,
        key: str,
        retrier: Retrier,
        tail_bytes: int = TAIL_BYTES,
        *,
        ahead: bool = False,
    ) -> None:
        super().__init__()
        self._store = store
        self._key = key
        self._retrier = retrier
        self._position = 0
        self._size, self.etag, self._tail = fetch_end(store, key, retrier, tail_bytes)
        self._start, self._buffer = 0, b""
        # of the last pieces
        self._ends: deque[int] | None = deque(maxlen=_STREAMS) if ahead else None
        # pieces that were requested ahead, by their starts
        self._next: dict[int, Future[bytes]] = {}

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
                held = self._buffer = self._piece(
                    self._position, min(max(wanted, READ_AHEAD_BYTES), left)
                )
                self._start, begin = self._position, 0
        self._position += wanted
        return held[begin : begin + wanted]

    def _piece(self, start: int, length: int) -> bytes:
        """The bytes from `start`, this many or more; a column of a Parquet file is read piece by
        piece."""
        answer = self._next.pop(start, None)
        piece = b"" if answer is None else result_of(answer)
        if len(piece) < length:
            piece = self._fetch(start, length)
        if self._ends is not None:
            end = start + len(piece)
            if start in self._ends and end < self._size:
                while len(self._next) >= _STREAMS:
                    self._next.pop(next(iter(self._next)))
                size = min(READ_AHEAD_BYTES, self._size - end)
                self._next[end] = in_background(partial(self._fetch, end, size), "surge-source")
            self._ends.append(end)
        return piece

    def _fetch(self, start: int, length: int) -> bytes:
        try:
            return self._retrier.call(
                f"GET {self._key}", lambda: _range(self._store, self._key, start, length, self.etag)
            )
        except (PreconditionError, FileNotFoundError):
            raise _replaced(self._key) from None


def fetch_end(store: Any, key: str, retrier: Retrier, length: int) -> tuple[int, str | None, bytes]:
    """Size and etag of an object now, and its last `length` bytes, or all of it; one request where
    possible."""

    def attempt() -> tuple[int, str | None, bytes]:
        try:
            with request_errors():
                answer = obstore.get(store, key, options={"range": {"suffix": length}})
                start, end = answer.range
                return (
                    answer.meta["size"],
                    answer.meta["e_tag"],
                    _whole(bytes(answer.bytes()), end - start),
                )
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
