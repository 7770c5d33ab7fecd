"""Output files in an object store, through obstore.

No object is visible before it is complete, so there are no temp files. `object_upload` says what
happens when two writers publish the same object.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self
from urllib.parse import urlsplit

import obstore
import pyarrow as pa
from obstore.exceptions import BaseError

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.store.object_client import ClientLimits, StorageOptions, connect
from surge_dagster.engine.store.object_reader import TAIL_BYTES, ObjectReader, fetch_end
from surge_dagster.engine.store.object_upload import PIECE_BYTES, ObjectUpload
from surge_dagster.engine.store.request_errors import request_errors
from surge_dagster.engine.store.retries import Retrier
from surge_dagster.engine.store.store import ObjectEnd, Store, StoredObject, plain_etag
from surge_dagster.engine.support.urls import is_bare, split_url

_HIDDEN = "."


class ObjectStore(Store):
    """A bucket, which the obstore store is for, or what lies below a prefix in it, which ends with
    a slash."""

    is_remote = True

    def __init__(
        self, url: str, identity: str, prefix: str, store: Any, retrier: Retrier, part_bytes: int
    ) -> None:
        super().__init__(url, identity)
        # What a part holds, here and in obstore, and the pieces between the two.
        self.upload_bytes = 2 * (part_bytes + min(PIECE_BYTES, part_bytes))
        self._prefix = prefix
        self._store = store
        self._retrier = retrier
        self._part_bytes = part_bytes

    @property
    def retries(self) -> Mapping[str, int]:
        """See `Store`; retries within obstore are not counted."""
        return self._retrier.counts

    def until(self, over: threading.Event) -> Self:
        same = copy.copy(self)
        same._retrier = self._retrier.until(over)
        return same

    def list(self, folder: str, *, deep: bool = False, begin: str = "") -> Iterator[StoredObject]:
        """See `Store`; `begin` takes those of a deep listing whose names in the folder begin so."""
        prefix = f"{self._prefix}{folder}".rstrip("/")
        base = f"{prefix}/" if prefix else ""

        def attempt() -> list[tuple[str, int, str]]:
            with request_errors():
                if begin:
                    first = base + begin
                    chunks = _beginning(
                        first, obstore.list(self._store, prefix=prefix or None, offset=first)
                    )
                elif deep:
                    chunks = obstore.list(self._store, prefix=prefix or None)
                else:
                    chunks = [
                        obstore.list_with_delimiter(self._store, prefix=prefix or None)["objects"]
                    ]
                # What obstore says of an object takes more memory.
                return [
                    (meta["path"], meta["size"], plain_etag(meta["e_tag"]))
                    for chunk in chunks
                    for meta in chunk
                ]

        for path, size, etag in self._retrier.call(f"LIST {base}", attempt):
            inner = path.removeprefix(base)
            if not any(part.startswith(_HIDDEN) for part in inner.split("/")):
                yield StoredObject(path.removeprefix(self._prefix), size, etag)

    def folders(self) -> Sequence[str]:
        prefix = self._prefix.rstrip("/") or None

        def attempt() -> Sequence[str]:
            with request_errors():
                return obstore.list_with_delimiter(self._store, prefix=prefix)["common_prefixes"]

        prefixes = self._retrier.call(f"LIST {self._prefix}", attempt)
        names = [path.rstrip("/").rpartition("/")[2] for path in prefixes]
        return sorted(name for name in names if not name.startswith(_HIDDEN))

    def open(
        self,
        name: str,
        listed: StoredObject | None = None,
        *,
        tail_bytes: int = TAIL_BYTES,
        ahead: bool = False,
    ) -> pa.NativeFile:
        """See `Store` and `ObjectReader`; the object's end, which holds its footer, comes with the
        first request."""
        reader = ObjectReader(self._store, self._key(name), self._retrier, tail_bytes, ahead=ahead)
        if listed is not None:
            same = not (listed.etag and reader.etag) or plain_etag(reader.etag) == listed.etag
            if reader.size() != listed.size or not same:
                raise FileNotFoundError(
                    errno.ENOENT, "another object stands in its place now", self.location(name)
                )
        return pa.PythonFile(reader, mode="r")

    def read_end(self, name: str, size: int) -> ObjectEnd:
        whole, etag, content = fetch_end(self._store, self._key(name), self._retrier, size)
        return ObjectEnd(StoredObject(name, whole, plain_etag(etag)), content)

    def is_settled(self, stored: StoredObject, seen_ns: int) -> bool:
        """Whether the store gave an etag: it changes with the content, at any time."""
        return bool(stored.etag)

    def require_conditions(self, name: str) -> None:
        """See `Store`: a PUT that may only create the object must be refused; it would give it the
        content it has."""
        key = self._key(name)
        with self.create(name) as upload:
            upload.sink.write(fetch_end(self._store, key, self._retrier, TAIL_BYTES)[2])
            answer = self._retrier.call(f"PUT {key}", lambda: upload.put(None))
        if answer is not None:
            self.delete(name)
            raise ConfigError(
                f"{self.url!r} is a store that ignores conditions of writes (If-None-Match), so that of two writers "
                "neither would notice the other. Use a store that has them."
            )

    def create(self, name: str) -> ObjectUpload:
        return ObjectUpload(self._store, self._retrier, name, self._key(name), self._part_bytes)

    def delete(self, name: str) -> None:
        def attempt() -> None:
            with request_errors():
                obstore.delete(self._store, self._key(name))

        with contextlib.suppress(FileNotFoundError):
            self._retrier.call(f"DELETE {self._key(name)}", attempt)

    def _key(self, name: str) -> str:
        return f"{self._prefix}{name}"


def open_object_store(
    url: str,
    options: StorageOptions | None = None,
    *,
    what: str = "output",
    limits: ClientLimits | None = None,
    retrier: Callable[[str], Retrier] = Retrier,
) -> ObjectStore:
    """Open what lies in an object store: `s3://bucket/prefix`, or another scheme that obstore
    knows."""
    options, limits = options or StorageOptions(), limits or ClientLimits()
    parts = split_url(url, what=what)
    if not is_bare(url):  # the error does not show the URL
        raise ConfigError(
            f"the {parts.scheme}:// {what} holds more than a bucket and a path. Credentials belong into the "
            "environment or into storage_options."
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
    return ObjectStore(clean, identity, prefix, store, retrier(clean), limits.part_bytes)


def _beginning(begin: str, chunks: Iterable[Sequence[Any]]) -> Iterator[Sequence[Any]]:
    """Of a listing in the order of the names, those up to the last that begins so; no further page
    is requested."""
    for chunk in chunks:
        beginning = [meta for meta in chunk if meta["path"].startswith(begin)]
        yield beginning
        if len(beginning) < len(chunk):
            return


def _without_user(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
