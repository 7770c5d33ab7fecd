"""Output files in an object store: one conditional PUT each, or a multipart upload that is completed at the end.

Nothing is visible before it is complete, so there are no temp files. What dead writers leave are unfinished multipart
uploads, which no listing shows but which are paid for; `sweep` aborts those that are too old to be a living writer's.
"""

from __future__ import annotations

import copy
import errno
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import obstore
import pyarrow as pa
from obstore.exceptions import BaseError
from obstore.store import GCSStore, S3Store, from_url

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.store.credentials import AwsCredentials, GoogleCredentials
from surge_dagster.engine.store.object_reader import ObjectReader, fetch_end
from surge_dagster.engine.store.object_upload import ObjectUpload, WriteClient
from surge_dagster.engine.store.obstore_client import ObstoreClient
from surge_dagster.engine.store.obstore_errors import request_errors
from surge_dagster.engine.store.retries import Retrier
from surge_dagster.engine.store.storage_options import StorageOptions
from surge_dagster.engine.store.store import ObjectEnd, StoredObject
from surge_dagster.engine.store.xml_client import XmlClient
from surge_dagster.engine.support.urls import is_bare, split_url

log = logging.getLogger(__name__)

_GCS_ENDPOINT = "https://storage.googleapis.com"
_HIDDEN = "."


class ObjectStore:
    """A bucket, or what lies below a prefix in it.

    Args:
        url: without a slash at the end.
        identity: the URL and where it is served, without secrets; None where tags may come again with other content.
        prefix: of every key, empty or with a slash at the end.
        store: an obstore store of the whole bucket, which retries nothing by itself.
        client: writes to the same bucket.
        retrier: counts for both.
    """

    def __init__(
        self,
        url: str,
        identity: str | None,
        prefix: str,
        store: Any,
        client: WriteClient,
        retrier: Retrier,
        options: StorageOptions,
    ) -> None:
        self._url = url
        self._identity = identity
        self._prefix = prefix
        self._store = store
        self._client = client
        self._retrier = retrier
        self._options = options
        self._names: set[str] = set()  # seen in a listing: an object to be replaced is looked at first

    @property
    def url(self) -> str:
        return self._url

    @property
    def identity(self) -> str | None:
        return self._identity

    @property
    def is_remote(self) -> bool:
        return True

    @property
    def retries(self) -> Mapping[str, int]:
        """Requests that were sent again so far, by cause."""
        return self._retrier.counts

    @property
    def upload_bytes(self) -> int:
        """Memory that an upload may hold."""
        return self._options.part_bytes

    def until(self, over: threading.Event) -> ObjectStore:
        """The same store, which waits for nothing once `over` is set: what it would try again raises `Cancelled`."""
        same = copy.copy(self)
        same._retrier = self._retrier.until(over)
        return same

    def location(self, name: str) -> str:
        """Where a person finds the object."""
        return f"{self._url}/{name}"

    def prepare(self, folder: str) -> None:
        """Nothing: a bucket has no folders."""

    def sweep(self, folder: str) -> None:
        """Abort the unfinished uploads of dead writers in a folder and below it.

        One that is younger than `abandoned_after_seconds` by the store's own clock, or whose age the store does not
        say, may be a living writer's and stays.

        Raises:
            TransientError: the store does not answer.
        """
        prefix = f"{self._prefix}{folder}/"
        found = self._retrier.call(f"list the uploads of {prefix}", lambda: list(self._client.unfinished(prefix)))
        for upload in found:
            if upload.age_seconds is None or upload.age_seconds < self._options.abandoned_after_seconds:
                continue
            log.info("removing an unfinished upload of %s, %.0f s old", upload.key, upload.age_seconds)
            self._retrier.call(
                f"abort the upload of {upload.key}",
                lambda u=upload: self._client.abort(u.key, u.upload_id),
                kind="remove",
            )

    def list(self, folder: str, *, deep: bool = False) -> Iterator[StoredObject]:
        """Yield the objects of a folder in no particular order; hidden ones are left out.

        Args:
            deep: yield those of its folders as well.

        Raises:
            TransientError: the store does not answer.
        """
        prefix = f"{self._prefix}{folder}".rstrip("/")
        base = f"{prefix}/" if prefix else ""

        def attempt() -> list[Any]:
            with request_errors():
                if deep:
                    return [meta for chunk in obstore.list(self._store, prefix=prefix or None) for meta in chunk]
                return list(obstore.list_with_delimiter(self._store, prefix=prefix or None)["objects"])

        for meta in self._retrier.call(f"LIST {base}", attempt):
            inner = meta["path"].removeprefix(base)
            if any(part.startswith(_HIDDEN) for part in inner.split("/")):
                continue
            name = meta["path"].removeprefix(self._prefix)
            self._names.add(name)
            yield StoredObject(name, meta["size"], meta["e_tag"] or "")

    def folders(self) -> list[str]:
        """Names of the folders at the root, sorted; hidden ones are left out.

        Raises:
            TransientError: the store does not answer.
        """

        def attempt() -> list[str]:
            with request_errors():
                return list(
                    obstore.list_with_delimiter(self._store, prefix=self._prefix.rstrip("/") or None)["common_prefixes"]
                )

        found = self._retrier.call(f"LIST {self._prefix}", attempt)
        names = [path.rstrip("/").rpartition("/")[2] for path in found]
        return sorted(name for name in names if not name.startswith(_HIDDEN))

    def open(self, name: str) -> pa.NativeFile:
        """Open an object for reading; its last 64 KiB, a footer above all, come with the first request.

        Raises:
            FileNotFoundError: there is no such object.
            TransientError: the store does not answer.
        """
        return pa.PythonFile(ObjectReader(self._store, self._key(name), self._retrier), mode="r")

    def read_end(self, name: str, size: int) -> ObjectEnd:
        """The last `size` bytes of an object, or all of it.

        Raises:
            FileNotFoundError: there is no such object.
            TransientError: the store does not answer, or does not give it.
        """
        whole, etag, content = fetch_end(self._store, self._key(name), self._retrier, size)
        return ObjectEnd(StoredObject(name, whole, etag or ""), content)

    def is_settled(self, stored: StoredObject, seen_ns: int) -> bool:
        """Whether the store gave an etag: it changes with the content, at any time."""
        return bool(stored.etag)

    def open_listed(self, listed: StoredObject) -> pa.NativeFile:
        """Open an object as a listing showed it.

        Raises:
            FileNotFoundError: it has gone, or another one stands at its name now.
            TransientError: the store does not answer.
        """
        reader = ObjectReader(self._store, self._key(listed.name), self._retrier)
        # Azure's listings leave out the quotes.
        same = not listed.etag or not reader.etag or reader.etag.strip('"') == listed.etag.strip('"')
        if reader.size() == listed.size and same:
            return pa.PythonFile(reader, mode="r")
        raise FileNotFoundError(errno.ENOENT, "another object stands in its place now", self.location(listed.name))

    def create(self, name: str) -> ObjectUpload:
        """Begin an object."""
        return ObjectUpload(
            self._client,
            self._retrier,
            name,
            self._key(name),
            self._options.part_bytes,
            known=name in self._names,
        )

    def delete(self, name: str) -> None:
        """Remove an object; harmless when there is none."""

        def attempt() -> None:
            with request_errors():
                obstore.delete(self._store, self._key(name))

        try:
            self._retrier.call(f"DELETE {self._key(name)}", attempt, kind="remove")
        except FileNotFoundError:
            return

    def sync(self, folder: str) -> None:
        """Nothing: an object store answers when an object is durable."""

    def _key(self, name: str) -> str:
        return f"{self._prefix}{name}"


def open_object_store(
    url: str, options: StorageOptions | None = None, *, retrier: Callable[[str], Retrier] = Retrier
) -> ObjectStore:
    """Open an output in an object store: `s3://bucket/prefix`, `gs://…`, or another scheme that obstore knows.

    Args:
        retrier: makes what repeats requests, given the store's URL.

    Raises:
        ConfigError: the URL or the options cannot be used, or there are no credentials.
    """
    options = options or StorageOptions()
    parts = split_url(url, what="output")
    if not is_bare(url):  # not shown
        raise ConfigError(
            f"the {parts.scheme}:// output holds more than a bucket and a path. Credentials belong into the "
            "environment or into storage_options."
        )
    if not parts.netloc and parts.scheme != "memory":
        raise ConfigError(f"the output {url!r} names no bucket; expected {parts.scheme}://bucket/path.")
    clean = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
    path = parts.path.strip("/")
    prefix = f"{path}/" if path else ""
    try:
        store, client, served_at = _connect(parts.scheme, parts.netloc, options)
    except ConfigError as error:
        raise ConfigError(f"cannot open the output {clean!r}: {error}") from error
    except (BaseError, ValueError, TypeError) as error:
        # Its text may quote what it was given.
        raise ConfigError(
            f"the output {clean!r} cannot be opened with these options ({type(error).__name__})."
        ) from None
    identity = None if parts.scheme == "memory" else f"{clean} at {_without_user(served_at)}"
    return ObjectStore(clean, identity, prefix, store, client, retrier(clean), options)


def _without_user(endpoint: str) -> str:
    parts = urlsplit(endpoint)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _connect(scheme: str, bucket: str, options: StorageOptions) -> tuple[Any, WriteClient, str]:
    """Both clients of a bucket, and the base URL of its service, empty where obstore alone knows it."""
    common: dict[str, Any] = {
        "client_options": {
            "timeout": timedelta(seconds=options.timeout_seconds),
            "connect_timeout": timedelta(seconds=options.connect_timeout_seconds),
            "allow_http": bool(options.endpoint and options.endpoint.startswith("http://")),
        },
        "retry_config": {"max_retries": 0},
    }
    timeouts = {
        "timeout_seconds": options.timeout_seconds,
        "connect_timeout_seconds": options.connect_timeout_seconds,
    }
    endpoint = (options.endpoint or "").rstrip("/")
    if scheme in ("s3", "s3a"):
        aws = AwsCredentials(options)
        endpoint = endpoint or aws.endpoint
        common["client_options"]["allow_http"] = endpoint.startswith("http://")
        bucket_url = f"{endpoint}/{bucket}"
        store: Any = S3Store(
            bucket,
            config={"endpoint": endpoint, "region": aws.region, "virtual_hosted_style_request": False},
            credential_provider=aws,  # pyright: ignore[reportArgumentType]
            **common,
        )
        return store, XmlClient(bucket_url, "s3", aws.sign, **timeouts), endpoint
    if scheme in ("gs", "gcs"):
        google = GoogleCredentials(options)
        config: Any = {"base_url": endpoint} if endpoint else {}
        store = GCSStore(bucket, config=config, credential_provider=google, **common)  # pyright: ignore[reportArgumentType]
        endpoint = endpoint or _GCS_ENDPOINT
        return store, XmlClient(f"{endpoint}/{bucket}", "gcs", google.sign, **timeouts), endpoint
    if scheme == "memory":
        store = from_url("memory://")
    else:
        config = {"endpoint": endpoint} if endpoint else {}
        store = from_url(f"{scheme}://{bucket}", config=config, **common)
    return store, ObstoreClient(store, options.part_bytes), endpoint
