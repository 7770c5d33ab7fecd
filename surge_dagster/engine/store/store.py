"""The interface of a store: what the engine needs of a local disk or an object store.

An object at its final name is complete, or it is not there. Names are relative to the store's root and have `/`
between their parts. A part that begins with a dot hides the objects below it from listings of the folders above.
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

    A tuple, because a listing makes and compares tens of thousands of them.
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
    def sink(self) -> pa.NativeFile:
        """The stream that takes the content; whoever writes does not close it."""
        ...

    def publish(self, still_wanted: Callable[[], None]) -> StoredObject:
        """Make the object appear under its name, complete and durable; on a disk, `Store.sync` makes the name durable.

        Args:
            still_wanted: called last; what it raises stops the publication.
        """
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Store(Protocol):
    """Objects below one folder of a disk, or one prefix of a bucket."""

    @property
    def url(self) -> str: ...

    @property
    def identity(self) -> str:
        """Distinguishes this output from every other one, without secrets."""
        ...

    @property
    def is_remote(self) -> bool:
        """Whether a read is a request: worth sending several concurrently, and worth keeping its answer on disk."""
        ...

    @property
    def retries(self) -> Mapping[str, int]:
        """Operations that were attempted again since the store was opened, by cause."""
        ...

    @property
    def upload_bytes(self) -> int:
        """Memory that an upload may hold."""
        ...

    def until(self, over: threading.Event) -> Store:
        """The same store; once `over` is set, its operations raise `Cancelled` instead of waiting."""
        ...

    def location(self, name: str) -> str:
        """The path or URL of an object, for messages and receipts."""
        ...

    def prepare(self, folder: str) -> None:
        """Make a folder that is not hidden ready for writing."""
        ...

    def sweep(self, folder: str) -> None:
        """Remove the temp files of dead writers in a folder and, if it is hidden, below it; a bucket has none."""
        ...

    def list(self, folder: str, *, deep: bool = False) -> Iterator[StoredObject]:
        """Yield the objects of a folder, with `deep` also those of its folders; hidden ones are left out."""
        ...

    def folders(self) -> list[str]:
        """Names of the folders at the root, sorted; hidden ones are left out."""
        ...

    def open(self, name: str, listed: StoredObject | None = None) -> pa.NativeFile:
        """Open an object for reading; with `listed`, only the version that a listing showed.

        Raises:
            FileNotFoundError: there is no such object or version.
        """
        ...

    def read_end(self, name: str, size: int) -> ObjectEnd:
        """The last `size` bytes of an object, or all of it."""
        ...

    def is_settled(self, stored: StoredObject, seen_ns: int) -> bool:
        """Whether an object seen at a time (Unix, ns) can never have the same name, size and tag with other content."""
        ...

    def create(self, name: str) -> Upload:
        """Begin an object."""
        ...

    def delete(self, name: str) -> None:
        """Remove an object; harmless when there is none."""
        ...

    def sync(self, folder: str) -> None:
        """Make the names of the objects published in a folder durable."""
        ...
