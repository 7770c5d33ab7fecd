"""Output files in an object store, through obstore.

No object is visible before it is complete, so there are no temp files. `object_upload` says what
happens when two writers publish the same object.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import io
import secrets
import threading
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Self
from urllib.parse import urlsplit

import obstore
import pyarrow as pa
from obstore.exceptions import BaseError

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.store.object_client import ClientLimits, StorageOptions, connect
from surge_dagster.engine.store.object_reader import (
    READ_BYTES,
    TAIL_BYTES,
    ObjectReader,
    fetch_end,
)
from surge_dagster.engine.store.object_upload import PIECE_BYTES, ObjectUpload
from surge_dagster.engine.store.requests import Requests
from surge_dagster.engine.store.store import ObjectEnd, Store, StoredObject, is_hidden, plain_etag
from surge_dagster.engine.support.urls import is_bare, split_url


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
        self, folder: str, *, deep: bool = False, begin: str = "", hidden: bool = False
    ) -> Iterator[StoredObject]:
        """See `Store`; `begin` takes those of a deep listing whose names in the folder begin so,
        `hidden` also those that are hidden."""
        prefix = f"{self._prefix}{folder}".rstrip("/")
        base = f"{prefix}/" if prefix else ""

        def request() -> list[tuple[str, int, str]]:
            if deep:
                first = base + begin
                offset = first if begin else None
                chunks = obstore.list(self._store, prefix=prefix or None, offset=offset)
                found = _beginning(first, chunks)
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


def _beginning(begin: str, chunks: Iterable[Sequence[Any]]) -> Iterator[Any]:
    """Yield the objects of a listing in the order of the names, up to the last that begins so; no
    further page is requested."""
    for chunk in chunks:
        for meta in chunk:
            if not meta["path"].startswith(begin):
                return
            yield meta


def _without_user(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
