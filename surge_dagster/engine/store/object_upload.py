"""One object on its way to a store: one conditional PUT, or a multipart upload when it is larger
than a part.

It appears under its name in one step, in `publish`. A PUT replaces only the object that stood at
the name when `still_wanted` was last called. A writer whose condition fails looks again and calls
`still_wanted` again: of two writers, the one whose source is out of date finds out and discards its
result. This also covers a PUT whose answer was lost: the next round replaces the object with the
same bytes.

obstore takes no condition when a multipart upload completes. So the upload looks at the object
before and after `still_wanted`, and calls that again if the object has changed. Two writers that
complete within the moment that is left do not notice each other. A killed or failed upload leaves
parts in the bucket that no listing shows; a lifecycle rule of the bucket removes them
(docs/storage.md).
"""

from __future__ import annotations

import io
from collections.abc import Callable
from types import TracebackType
from typing import Any

import obstore
import pyarrow as pa
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError, PreconditionError

from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.store.request_errors import classified, request_errors
from surge_dagster.engine.store.retries import Retrier
from surge_dagster.engine.store.store import (
    PUBLISH_ROUNDS,
    StoredObject,
    Upload,
    plain_etag,
    replaced_by_others,
)

PIECE_BYTES = 1024 * 1024  # passed to obstore's writer in one call


class ObjectUpload(Upload):
    """An object in memory, or the later part of it when it is larger than a part."""

    def __init__(self, store: Any, retrier: Retrier, name: str, key: str, part_bytes: int) -> None:
        self._store = store
        self._retrier = retrier
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
        return (
            self._publish_parts(still_wanted) if self._writer else self._publish_whole(still_wanted)
        )

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
            if len(self._buffer) > (
                self._part_bytes if self._writer is None else self._piece_bytes
            ):
                self._send()

    def _send(self) -> None:
        # A new buffer, since a request that was given up may still read this one.
        body, self._buffer = self._buffer, bytearray()
        self._failed = True
        if self._writer is None:
            # This stores nothing yet, and the bytes are still here for another attempt.
            self._writer = self._retrier.call(
                f"begin the upload of {self._key}", lambda: self._begin(body)
            )
        else:
            self._continue(lambda: self._writer.write(body))
        self._failed = False

    def _begin(self, body: bytearray) -> Any:
        with request_errors():
            writer: Any = obstore.open_writer(
                self._store, self._key, buffer_size=self._part_bytes, max_concurrency=1
            )
            writer.write(body)
        return writer

    def _continue(self, request: Callable[[], object]) -> None:
        """Do a later step of a multipart upload; only obstore repeats its requests, as earlier
        parts are not kept."""

        def attempt() -> None:
            try:
                with request_errors():
                    request()
            except (FileNotFoundError, NotFoundError) as error:  # it was aborted
                raise classified(error) from None

        self._retrier.call(f"upload {self._key} in parts", attempt, attempts=1)

    def _publish_whole(self, still_wanted: Callable[[], None]) -> StoredObject:
        current = None
        for _ in range(PUBLISH_ROUNDS):
            still_wanted()
            stored = self._retrier.call(f"PUT {self._key}", lambda c=current: self.put(c))
            if stored is not None:
                return StoredObject(self._name, self._size, plain_etag(stored["e_tag"]))
            current = self._look()
        raise replaced_by_others(self._key)

    def put(self, replacing: Any) -> Any:
        """The etag and version of the stored object; None when another object than `replacing`
        stands at the name."""
        tags = (
            {name: replacing[name] for name in ("e_tag", "version") if replacing[name]}
            if replacing
            else {}
        )
        mode: Any = tags or "create"
        try:
            return obstore.put(self._store, self._key, self._buffer, mode=mode, use_multipart=False)
        except (AlreadyExistsError, PreconditionError):
            return None
        except (FileNotFoundError, NotFoundError) as error:
            if replacing is None:
                raise classified(error) from None  # there is no such bucket
            return None
        except (BaseError, OSError) as error:
            raise classified(error) from None

    def _publish_parts(self, still_wanted: Callable[[], None]) -> StoredObject:
        if self._buffer:
            self._send()
        before = self._look()
        still_wanted()
        now = self._look()
        if now != before:
            still_wanted()
        return self._complete(now)

    def _complete(self, before: Any) -> StoredObject:
        """Complete the upload; `before` is the object that stood at the name until now, or None."""
        failure: TransientError | None = None
        try:
            self._continue(self._writer.close)
        except (
            TransientError
        ) as error:  # the answer may have been lost after the upload was complete
            failure = error
        stored = self._look()
        if failure is not None and (
            stored is None or stored == before or stored["size"] != self._size
        ):
            raise failure
        if stored is None:
            raise TransientError(
                f"{self._key!r} was removed as soon as it was published. Run again."
            )
        return StoredObject(self._name, self._size, plain_etag(stored["e_tag"]))

    def _look(self) -> Any:
        """The object that stands at the name now, or None."""

        def attempt() -> Any:
            try:
                with request_errors():
                    return obstore.head(self._store, self._key)
            except (FileNotFoundError, NotFoundError):
                return None

        return self._retrier.call(f"HEAD {self._key}", attempt)


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
