"""One object on its way to a store: one conditional PUT, or a multipart upload when it is larger
than a part.

It appears under its name in one step, in `publish`. A PUT replaces only the object that stood at
the name when `still_wanted` was last called. A writer whose condition fails looks again and calls
`still_wanted` again: of two writers, the one whose source is out of date finds out and discards its
result. obstore does not repeat a conditional PUT whose answer was lost or whose body was damaged.
The next round does: it replaces the object with the same bytes.

obstore takes no condition when a multipart upload completes. So the upload looks at the object
before and after `still_wanted`, and calls that again if the object has changed. Two writers that
complete within the moment that is left do not notice each other. A killed or failed upload leaves
parts in the bucket that no listing shows; a lifecycle rule of the bucket removes them
(docs/storage.md).
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any

import obstore
import pyarrow as pa
from obstore.exceptions import AlreadyExistsError, PreconditionError

from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.store.requests import AnswerLost, BodyDamaged, Requests
from surge_dagster.engine.store.store import StoredObject, Upload, plain_etag

PIECE_BYTES = 1024 * 1024  # passed to obstore's writer in one call
_ROUNDS = 3


class ObjectUpload(Upload):
    """An object in memory, or the later part of it when it is larger than a part."""

    def __init__(
        self, store: Any, requests: Requests, name: str, key: str, part_bytes: int
    ) -> None:
        self._store = store
        self._requests = requests
        self._name = name
        self._key = key
        self._part_bytes = part_bytes
        self._piece_bytes = min(PIECE_BYTES, part_bytes)
        self._buffer = bytearray()
        self._size = 0
        self._writer: Any = None  # of a multipart upload
        self._failed = False
        self.sink = pa.PythonFile(_Sink(self._take), mode="w")

    def publish(self, still_wanted: Callable[[], None]) -> StoredObject:
        self.sink.close()
        if self._writer is None:
            return self._publish_whole(still_wanted)
        return self._publish_parts(still_wanted)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._failed = True
        self._buffer = bytearray()
        self._writer = None  # a writer that is never closed completes nothing
        if not self.sink.closed:
            self.sink.close()

    def _take(self, content: memoryview) -> None:
        # the caller closes its writer, whose footer must not complete a broken object
        if self._failed:
            return
        self._size += len(content)
        for start in range(0, len(content), self._piece_bytes):
            self._buffer += content[start : start + self._piece_bytes]
            limit = self._part_bytes if self._writer is None else self._piece_bytes
            if len(self._buffer) > limit:
                self._send()

    def _send(self) -> None:
        # A new buffer, since a request that was given up may still read this one.
        body = self._buffer
        self._buffer = bytearray()
        self._failed = True
        if self._writer is None:
            self._writer = self._request("POST", self._begin)
        self._request("PUT", partial(self._writer.write, body))
        self._failed = False

    def _begin(self) -> Any:
        return obstore.open_writer(
            self._store, self._key, buffer_size=self._part_bytes, max_concurrency=1
        )

    def _publish_whole(self, still_wanted: Callable[[], None]) -> StoredObject:
        current: Any = None
        failure = TransientError(
            f"other writers replaced {self._key!r} {_ROUNDS} times while it was published. "
            "The result was discarded; check who else writes to this output, then run again."
        )
        for _ in range(_ROUNDS):
            still_wanted()
            try:
                stored = self.put(current)
            except (AnswerLost, BodyDamaged) as error:
                failure = error
            else:
                if stored is not None:
                    return StoredObject(self._name, self._size, plain_etag(stored["e_tag"]))
            current = self._look()
        raise failure

    def put(self, replacing: Any) -> Any:
        """Return etag and version of the stored object; None if another object than `replacing`
        stands at the name."""
        mode: Any = "create"
        if replacing is not None:
            mode = {tag: replacing[tag] for tag in ("e_tag", "version") if replacing[tag]}
        request = partial(
            obstore.put, self._store, self._key, self._buffer, mode=mode, use_multipart=False
        )
        try:
            return self._request("PUT", request)
        except (AlreadyExistsError, PreconditionError, FileNotFoundError):
            return None

    def _publish_parts(self, still_wanted: Callable[[], None]) -> StoredObject:
        if self._buffer:
            self._send()
        before = self._look()
        still_wanted()
        if self._look() != before:
            still_wanted()
        self._request("POST", self._writer.close)

        stored = self._look()
        if stored is None:
            raise TransientError(
                f"{self._key!r} was removed as soon as it was published. Run again."
            )
        return StoredObject(self._name, self._size, plain_etag(stored["e_tag"]))

    def _look(self) -> Any:
        """Return the object that stands at the name now, or None."""
        try:
            return self._request("HEAD", partial(obstore.head, self._store, self._key))
        except FileNotFoundError:
            return None

    def _request(self, method: str, request: Callable[[], Any]) -> Any:
        return self._requests.send(f"{method} {self._key}", request)


class _Sink(io.RawIOBase):
    def __init__(self, take: Callable[[memoryview], None]) -> None:
        super().__init__()
        self._take = take
        self._position = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def write(self, content: Any, /) -> int:
        view = memoryview(content).cast("B")
        self._take(view)
        self._position += len(view)
        return len(view)
