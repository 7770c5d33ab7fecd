"""One object on its way to a store: one conditional PUT, or a multipart upload when it is larger than a part.

It appears under its name in one step, in `publish`. A PUT replaces only the object that stood at the name when
`still_wanted` was last called. A writer whose condition fails looks again and calls `still_wanted` again: of two
writers, the one whose source is out of date finds out and discards its result. This also covers a PUT whose answer was
lost: the next round replaces the object with the same bytes.

obstore takes no condition when a multipart upload completes. So the upload looks at the object just before; two writers
that complete within that moment do not notice each other. A killed or failed upload leaves parts in the bucket that no
listing shows; a lifecycle rule of the bucket removes them (docs/storage.md).
"""

from __future__ import annotations

import io
import secrets
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import obstore
import pyarrow as pa
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError, PreconditionError

from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.store.retries import Retrier, classified, request_errors
from surge_dagster.engine.store.store import StoredObject

PIECE_BYTES = 1024 * 1024  # passed to obstore's writer in one call
_ROUNDS = 8  # how often two writers may replace each other's object before one of them gives up
_MARK = "surge_upload"  # name of an attribute of objects that were uploaded in parts


class ObjectUpload:
    """See `Upload`.

    Args:
        store: an obstore store.
        name, key: of the object, within the output and within the bucket.
        known: whether an object is expected at the name; a wrong guess costs a request.
    """

    def __init__(self, store: Any, retrier: Retrier, name: str, key: str, part_bytes: int, *, known: bool) -> None:
        self._store = store
        self._retrier = retrier
        self._name = name
        self._key = key
        self._part_bytes = part_bytes
        self._piece_bytes = min(PIECE_BYTES, part_bytes)
        self._known = known
        self._buffer = bytearray()
        self._size = 0
        self._writer: Any = None  # of a multipart upload
        self._mark = secrets.token_hex(16)  # distinguishes a completed multipart upload from another writer's
        self._failed = False
        self.sink = pa.PythonFile(_Sink(self._take), mode="w")

    def __enter__(self) -> Self:
        return self

    def publish(self, still_wanted: Callable[[], None]) -> StoredObject:
        """Make the object appear under its name, complete.

        Args:
            still_wanted: called after a look at the object that stands at the name, and again whenever that has
                changed; what it raises stops the publication.

        Raises:
            TransientError: the store does not answer, or other writers keep replacing the object.
        """
        self.sink.close()
        return self._publish_parts(still_wanted) if self._writer else self._publish_whole(still_wanted)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._failed = True
        self._buffer = bytearray()
        self._writer = None  # a writer that is never closed completes nothing
        if not self.sink.closed:
            self.sink.close()

    def _take(self, content: memoryview) -> None:
        if self._failed:  # the caller closes its writer, whose footer must not complete a broken object
            return
        self._size += len(content)
        for start in range(0, len(content), self._piece_bytes):
            self._buffer += content[start : start + self._piece_bytes]
            if len(self._buffer) > (self._part_bytes if self._writer is None else self._piece_bytes):
                self._send()

    def _send(self) -> None:
        # A new buffer, since a request that was given up may still read this one.
        body, self._buffer = self._buffer, bytearray()
        self._failed = True
        if self._writer is None:
            # This stores nothing yet, and the bytes are still here for another attempt.
            what = f"begin the upload of {self._key}"
            self._writer = self._retrier.call(what, lambda: self._begin(body), kind="begin")
        else:
            self._continue(lambda: self._append(self._writer, body))
        self._failed = False

    def _begin(self, body: bytearray) -> Any:
        writer = obstore.open_writer(
            self._store, self._key, attributes={_MARK: self._mark}, buffer_size=self._part_bytes, max_concurrency=1
        )
        self._append(writer, body)
        return writer

    @staticmethod
    def _append(writer: Any, body: bytearray) -> None:
        with request_errors():
            writer.write(body)

    def _continue(self, attempt: Callable[[], None]) -> None:
        """Do a later step of a multipart upload; only obstore repeats its requests, as earlier parts are not kept."""
        self._retrier.call(f"upload {self._key} in parts", attempt, kind="write", attempts=1)

    def _publish_whole(self, still_wanted: Callable[[], None]) -> StoredObject:
        current = self._look() if self._known else None
        for _ in range(_ROUNDS):
            still_wanted()
            stored = self._retrier.call(f"PUT {self._key}", lambda c=current: self._put(c), kind="write")
            if stored is not None:
                return StoredObject(self._name, self._size, stored["e_tag"] or "")
            current = self._look()
        raise self._contended()

    def _put(self, replacing: Any) -> Any:
        """The etag and version of the stored object; None when another object than `replacing` stands at the name."""
        tags = {name: replacing[name] for name in ("e_tag", "version") if replacing[name]} if replacing else {}
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
        for _ in range(_ROUNDS):
            before = self._look()
            still_wanted()
            if self._look() == before:
                return self._complete()
        raise self._contended()

    def _complete(self) -> StoredObject:
        writer = self._writer

        def attempt() -> None:
            try:
                with request_errors():
                    writer.close()
            except (FileNotFoundError, NotFoundError) as error:
                raise classified(error) from None

        failure: TransientError | None = None
        try:
            self._continue(attempt)
        except TransientError as error:  # the answer may have been lost after the upload was complete
            failure = error
        found = self._retrier.call(f"GET {self._key}", self._marked)
        if found is None:
            raise failure or TransientError(f"{self._key!r} was replaced as soon as it was published. Run again.")
        return StoredObject(self._name, self._size, found["e_tag"] or "")

    def _marked(self) -> Any:
        """The object at the name if it is this upload's."""
        try:
            with request_errors():
                # A HEAD through obstore carries no attributes.
                found = obstore.get(self._store, self._key, options={"range": (0, 1)})
        except (FileNotFoundError, NotFoundError):
            return None
        return found.meta if found.attributes.get(_MARK) == self._mark else None

    def _look(self) -> Any:
        """The object that stands at the name now, or None."""

        def attempt() -> Any:
            try:
                with request_errors():
                    return obstore.head(self._store, self._key)
            except (FileNotFoundError, NotFoundError):
                return None

        return self._retrier.call(f"HEAD {self._key}", attempt)

    def _contended(self) -> TransientError:
        return TransientError(
            f"other writers replaced {self._key!r} {_ROUNDS} times while it was published. The result was discarded; "
            "check who else writes to this output, then run again."
        )


class _Sink(io.RawIOBase):
    """A stream that passes its content to a function."""

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
