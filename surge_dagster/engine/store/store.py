"""Where output files lie: one small interface over local disk and object stores.

An object at its final name is complete, or it is not there. Names are relative to the store's root and have `/`
between their parts; a part that begins with a dot hides what lies below it from listings of what lies above.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import pyarrow as pa


class StoredObject(NamedTuple):
    """One object as a listing shows it: name relative to the store, size in bytes, and a tag that changes with it.

    A tuple, since a listing makes tens of thousands of them, and compares each with what is known of it.
    """

    name: str
    size: int
    etag: str


@dataclass(frozen=True, slots=True)
class ObjectEnd:
    """The last bytes of one version of an object, and which version that was."""

    stored: StoredObject
    content: bytes


class Upload(Protocol):
    """One object on its way; leaving its `with` block without `publish` leaves nothing behind."""

    @property
    def sink(self) -> pa.NativeFile: ...

    def write(self, data: bytes) -> None:
        """Write the whole object, which is small; instead of `sink`."""
        ...

    def publish(self, still_wanted: Callable[[], None]) -> StoredObject: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Store(Protocol):
    """Objects under names with `/`, relative to the store's root."""

    @property
    def url(self) -> str: ...

    @property
    def identity(self) -> str | None:
        """Tells this output from every other one, without secrets; None: nothing about it may be remembered."""
        ...

    @property
    def is_remote(self) -> bool:
        """Whether a read is a request: worth sending several at a time, and worth remembering its answer on disk."""
        ...

    @property
    def retries(self) -> Mapping[str, int]:
        """Requests that were sent again since the store was opened, by cause."""
        ...

    @property
    def upload_bytes(self) -> int:
        """Memory that an upload may hold."""
        ...

    def until(self, over: threading.Event) -> Store:
        """The same store, which waits for nothing once `over` is set: what it would try again raises `Cancelled`."""
        ...

    def location(self, name: str) -> str: ...

    def prepare(self, folder: str) -> None:
        """Make a folder that is not hidden ready for writing."""
        ...

    def sweep(self, folder: str) -> None:
        """Remove what writers that died left in a folder and below it; once per run, before it writes there."""
        ...

    def list(self, folder: str, *, deep: bool = False) -> Iterator[StoredObject]: ...

    def folders(self) -> list[str]: ...

    def open(self, name: str) -> pa.NativeFile: ...

    def read_end(self, name: str, size: int) -> ObjectEnd: ...

    def is_settled(self, stored: StoredObject, seen_ns: int) -> bool:
        """Whether what had this name, size and tag at a time (Unix, ns) can never have them with other content."""
        ...

    def open_listed(self, listed: StoredObject) -> pa.NativeFile:
        """Open an object as a listing showed it; `FileNotFoundError` when another one stands at its name now."""
        ...

    def create(self, name: str) -> Upload: ...

    def delete(self, name: str) -> None: ...

    def sync(self, folder: str) -> None: ...
