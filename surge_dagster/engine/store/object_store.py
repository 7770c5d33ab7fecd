"""Output files in an object store, through obstore.

An upload is one conditional PUT, or a multipart upload when it is larger than a part. It appears
under its name in one step, in `publish`. A PUT replaces only the object that stood at the name when
`still_wanted` was last called. A writer whose condition fails looks again and calls `still_wanted`
again: of two writers, the one whose source is out of date finds out and discards its result.
obstore does not repeat a conditional PUT whose answer was lost or whose body was damaged. The next
round does: it replaces the object with the same bytes.

obstore takes no condition when a multipart upload completes. So the upload looks at the object
before and after `still_wanted`, and calls that again if the object has changed. Two writers that
complete within the moment that is left do not notice each other. A killed or failed upload leaves
parts in the bucket that no listing shows; a lifecycle rule of the bucket removes them
(docs/storage.md).
"""

from __future__ import annotations

import contextlib
import copy
import errno
import io
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import obstore
import pyarrow as pa
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

from surge_dagster.engine.errors import ConfigError, TransientError
from surge_dagster.engine.store.object_client import ClientLimits, StorageOptions, connect
from surge_dagster.engine.store.object_reader import (
    READ_BYTES,
    TAIL_BYTES,
    ObjectReader,
    fetch_end,
)
from surge_dagster.engine.store.requests import AnswerLost, BodyDamaged, Requests
from surge_dagster.engine.store.store import (
    ObjectEnd,
    Store,
    StoredObject,
    Upload,
    is_hidden,
    plain_etag,
)
from surge_dagster.engine.support.urls import is_bare, split_url

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


class ObjectStore(Store):
    """A bucket, or what lies below a prefix in it, which ends with a slash.

    Args:
        store: obstore's, of the whole bucket.
    """

    is_remote = True

    def __init__(
        self, url: str, identity: str, prefix: str, store: Any, requests: Requests, part_bytes: int
    ) -> None:
        super().__init__(url, identity)
        # What a part holds, here and in obstore, and the pieces between the two.
        self.upload_bytes = 2 * (part_bytes + min(PIECE_BYTES, part_bytes))
        self._prefix = prefix
        self._store = store
        self._requests = requests
        self._part_bytes = part_bytes

    def until(self, over: threading.Event) -> Self:
        same = copy.copy(self)
        same._requests = self._requests.until(over)
        return same

    def list(
        self, folder: str, *, deep: bool = False, hidden: bool = False
    ) -> Iterator[StoredObject]:
        """See `Store`; `hidden` takes also those that are hidden."""
        prefix = f"{self._prefix}{folder}".rstrip("/")
        base = f"{prefix}/" if prefix else ""

        def request() -> list[tuple[str, int, str]]:
            if deep:
                pages = obstore.list(self._store, prefix=prefix or None)
                found = (meta for page in pages for meta in page)
            else:
                found = obstore.list_with_delimiter(self._store, prefix=prefix or None)["objects"]
            # obstore's own records take more memory
            return [(meta["path"], meta["size"], plain_etag(meta["e_tag"])) for meta in found]

        for path, size, etag in self._requests.send(f"LIST {base}", request):
            inner = path.removeprefix(base)
            if hidden or not any(map(is_hidden, inner.split("/"))):
                yield StoredObject(path.removeprefix(self._prefix), size, etag)

    def folders(self) -> Sequence[str]:
        prefix = self._prefix.rstrip("/") or None
        listing = self._requests.send(
            f"LIST {self._prefix}",
            partial(obstore.list_with_delimiter, self._store, prefix=prefix),
        )
        names = [path.rstrip("/").rpartition("/")[2] for path in listing["common_prefixes"]]
        return sorted(name for name in names if not is_hidden(name))

    def open(
        self,
        name: str,
        listed: StoredObject | None = None,
        *,
        tail_bytes: int = TAIL_BYTES,
    ) -> pa.NativeFile:
        """See `Store` and `ObjectReader`; the object's end, which holds its footer, comes with the
        first request."""
        reader = ObjectReader(self._store, self._key(name), self._requests, tail_bytes)
        if listed is not None:
            has_etags = listed.etag and reader.etag
            is_same = not has_etags or plain_etag(reader.etag) == listed.etag
            if reader.size() != listed.size or not is_same:
                raise FileNotFoundError(
                    errno.ENOENT, "another object stands in its place now", self.location(name)
                )
        return pa.PythonFile(io.BufferedReader(reader, READ_BYTES), mode="r")

    def read_end(self, name: str, size: int) -> ObjectEnd:
        whole, etag, content = fetch_end(self._store, self._key(name), self._requests, size)
        return ObjectEnd(StoredObject(name, whole, plain_etag(etag)), content)

    def is_settled(self, stored: StoredObject, seen_ns: int) -> bool:
        """Whether the store gave an etag: it changes with the content, at any time."""
        return bool(stored.etag)

    def create(self, name: str) -> ObjectUpload:
        return ObjectUpload(self._store, self._requests, name, self._key(name), self._part_bytes)

    def delete(self, name: str) -> None:
        key = self._key(name)
        with contextlib.suppress(FileNotFoundError):
            self._requests.send(f"DELETE {key}", partial(obstore.delete, self._store, key))

    def _key(self, name: str) -> str:
        return f"{self._prefix}{name}"


def open_object_store(
    url: str,
    options: StorageOptions | None = None,
    *,
    what: str = "output",
    limits: ClientLimits | None = None,
) -> ObjectStore:
    """Open what lies in an object store: `s3://bucket/prefix`, or another scheme of obstore."""
    options = options or StorageOptions()
    limits = limits or ClientLimits()
    parts = split_url(url, what=what)
    if not is_bare(url):  # the error does not show the URL
        raise ConfigError(
            f"the {parts.scheme}:// {what} holds more than a bucket and a path. Credentials belong "
            "into the environment or into storage_options."
        )
    if not parts.netloc and parts.scheme != "memory":
        raise ConfigError(
            f"the {what} {url!r} names no bucket; expected {parts.scheme}://bucket/path."
        )
    clean = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
    path = parts.path.strip("/")
    prefix = f"{path}/" if path else ""
    try:
        store, service = connect(parts.scheme, parts.netloc, options, limits)
    except ConfigError as error:
        raise ConfigError(f"cannot open the {what} {clean!r}: {error}") from error
    except (BaseError, ValueError, TypeError) as error:
        # The error's text may quote the options.
        raise ConfigError(
            f"the {what} {clean!r} cannot be opened with these options ({type(error).__name__})."
        ) from None
    # Two memory stores with the same URL hold different objects.
    service = secrets.token_hex() if parts.scheme == "memory" else _without_user(service)
    identity = f"{clean} at {service}"
    return ObjectStore(clean, identity, prefix, store, Requests(clean), limits.part_bytes)


def _without_user(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
