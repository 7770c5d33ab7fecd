"""One object on its way to a store: kept in memory while it fits in a part, sent part by part when it grows beyond.

Either way it appears under its name in one step, in `publish`, and only in the place of what stood there when it was
last asked whether it is still wanted. A writer whose place was taken meanwhile looks again and asks again: of two
writers, the one whose source is out of date finds that out and throws its result away.

An answer can be lost after the store has done what it was asked. Each upload leaves a mark of its own on its object, so
that a writer that finds its place taken can tell that it took it itself.
"""

from __future__ import annotations

import io
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Protocol, Self

import pyarrow as pa

from surge_dagster.engine.errors import Cancelled, SurgeError, TransientError
from surge_dagster.engine.store.retries import RequestFailed, Retrier
from surge_dagster.engine.store.store import StoredObject
from surge_dagster.engine.store.xml_client import Body, ConditionFailed, NoSuchUpload, UnfinishedUpload, Version

log = logging.getLogger(__name__)

_ROUNDS = 8  # how often two writers may take each other's place before one of them gives up
_CLOCK_SLACK_SECONDS = 2.0


class WriteClient(Protocol):
    """Single requests that write; `XmlClient` says what each does and raises.

    Attributes:
        part_retries: whether a part can be sent again.
        conditional_parts: whether completing a multipart upload can be made to depend on what stands at its name.
    """

    @property
    def part_retries(self) -> bool: ...

    @property
    def conditional_parts(self) -> bool: ...

    def head(self, key: str) -> Version | None: ...

    def put(self, key: str, body: Body, replacing: Version | None, mark: str) -> str: ...

    def begin(self, key: str, mark: str) -> str: ...

    def put_part(self, key: str, upload_id: str, number: int, body: Body) -> str: ...

    def complete(self, key: str, upload_id: str, parts: list[str], replacing: Version | None) -> None: ...

    def abort(self, key: str, upload_id: str) -> None: ...

    def unfinished(self, prefix: str) -> Iterator[UnfinishedUpload]: ...


class ObjectUpload:
    """See `Upload`.

    Args:
        name, key: of the object, within the store and within the bucket.
        part_bytes: held in memory at most, beside what is being written.
        known: whether something is thought to stand at the name; a wrong guess costs a request.
    """

    def __init__(
        self, client: WriteClient, retrier: Retrier, name: str, key: str, part_bytes: int, *, known: bool
    ) -> None:
        self._client = client
        self._retrier = retrier
        self._name = name
        self._key = key
        self._part_bytes = part_bytes
        self._known = known
        self._mark = secrets.token_hex(16)
        self._buffer = bytearray()
        self._upload_id: str | None = None
        self._parts: list[str] = []
        self._size = 0
        self._begin_lost = False
        self._failed = False
        self._created = time.monotonic()
        self._published = False
        self.sink = pa.PythonFile(_Sink(self._take), mode="w")

    def __enter__(self) -> Self:
        return self

    def write(self, data: bytes) -> None:
        """Write the whole object; instead of `sink`."""
        self.sink.write(data)

    def publish(self, still_wanted: Callable[[], None]) -> StoredObject:
        """Make the object appear under its name, complete.

        Args:
            still_wanted: called after it was looked what stands at the name, and again whenever that has changed; what
                it raises stops the publication.

        Raises:
            TransientError: the store does not answer, or other writers keep taking the place.
        """
        self.sink.close()
        if self._upload_id is not None:
            if self._buffer:
                self._send_part()
            stored = self._publish_parts(still_wanted)
        else:
            stored = self._publish_whole(still_wanted)
        self._published = True
        self._buffer = bytearray()
        return stored

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._failed = True
        self._buffer = bytearray()
        try:
            if not self.sink.closed:
                self.sink.close()
        finally:
            self._tidy_up()

    def _take(self, content: memoryview) -> None:
        if self._failed:  # whoever writes is closing, and what it writes goes nowhere
            return
        self._size += len(content)
        taken = 0
        while taken < len(content):
            room = self._part_bytes - len(self._buffer)
            if not room:  # sent only when more comes, so that what fits in one part is one PUT
                self._failed = True
                self._send_part()
                self._failed = False
                continue
            piece = content[taken : taken + room]
            self._buffer += piece
            taken += len(piece)

    def _send_part(self) -> None:
        if self._upload_id is None:
            self._upload_id = self._retrier.call(f"begin the upload of {self._key}", self._begin, kind="begin")
        upload_id, number, body = self._upload_id, len(self._parts) + 1, self._buffer
        self._parts.append(
            self._retrier.call(
                f"PUT part {number} of {self._key}",
                lambda: self._client.put_part(self._key, upload_id, number, body),
                kind="write",
                attempts=self._part_attempts,
            )
        )
        self._buffer = bytearray()

    @property
    def _part_attempts(self) -> int | None:
        return None if self._client.part_retries else 1

    def _begin(self) -> str:
        try:
            return self._client.begin(self._key, self._mark)
        except RequestFailed:
            self._begin_lost = True  # the store may have begun an upload whose id never came
            raise

    def _publish_whole(self, still_wanted: Callable[[], None]) -> StoredObject:
        current = self._look() if self._known else None
        for _ in range(_ROUNDS):
            still_wanted()
            replacing, body = current, self._buffer  # as it is now: a request that is given up may still be under way
            try:
                etag = self._retrier.call(
                    f"PUT {self._key}",
                    lambda r=replacing, b=body: self._client.put(self._key, b, r, self._mark),
                    kind="write",
                )
                return StoredObject(self._name, self._size, etag)
            except ConditionFailed:
                current = self._look()
                if current is not None and current.upload == self._mark:
                    return StoredObject(self._name, current.size, current.etag)
        raise self._contended()

    def _publish_parts(self, still_wanted: Callable[[], None]) -> StoredObject:
        for _ in range(_ROUNDS):
            replacing = self._look()
            if replacing is not None and replacing.upload == self._mark:
                return StoredObject(self._name, replacing.size, replacing.etag)
            still_wanted()
            if not self._client.conditional_parts and self._look() != replacing:
                continue
            try:
                self._retrier.call(
                    f"complete the upload of {self._key}",
                    lambda r=replacing: self._complete(r),
                    kind="write",
                    attempts=self._part_attempts,
                )
            except ConditionFailed:
                continue
            except NoSuchUpload:
                current = self._look()
                if current is None or current.upload != self._mark:
                    raise TransientError(
                        f"the upload of {self._key!r} was aborted by somebody else before it was complete. Run again."
                    ) from None
            stored = self._look()
            if stored is None or stored.upload != self._mark:
                raise TransientError(f"{self._key!r} was replaced as soon as it was published. Run again.")
            self._upload_id = None
            return StoredObject(self._name, stored.size, stored.etag)
        raise self._contended()

    def _complete(self, replacing: Version | None) -> None:
        if self._upload_id is None:
            raise RuntimeError("no upload was begun")
        self._client.complete(self._key, self._upload_id, self._parts, replacing)

    def _look(self) -> Version | None:
        return self._retrier.call(f"HEAD {self._key}", lambda: self._client.head(self._key))

    def _contended(self) -> TransientError:
        return TransientError(
            f"other writers took the place of {self._key!r} {_ROUNDS} times while it was published. The result was "
            "thrown away; see who else writes to this output, then run again."
        )

    def _tidy_up(self) -> None:
        """Leave no unfinished upload behind; what this cannot do, `sweep` of a later run does."""
        upload_id, self._upload_id = self._upload_id, None
        try:
            if upload_id is not None:
                self._abort(upload_id)
            if self._begin_lost:
                for lost in self._retrier.call(
                    f"list the uploads of {self._key}", lambda: list(self._client.unfinished(self._key))
                ):
                    # An older one is another writer's. One that began just now can be too: then that writer fails its
                    # partition as if the store had, and a later run does it again.
                    young = lost.age_seconds is not None and lost.age_seconds <= self._age_seconds()
                    if lost.key == self._key and young:
                        self._abort(lost.upload_id)
        except SurgeError as error:
            log.warning("%s What was sent of it stays until a later run removes it.", error)
        except Cancelled:
            log.warning("What was sent of %s stays until a later run removes it.", self._key)

    def _abort(self, upload_id: str) -> None:
        self._retrier.call(
            f"abort the upload of {self._key}", lambda: self._client.abort(self._key, upload_id), kind="remove"
        )

    def _age_seconds(self) -> float:
        return time.monotonic() - self._created + _CLOCK_SLACK_SECONDS


class _Sink(io.RawIOBase):
    """Hands what is written to it on."""

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
