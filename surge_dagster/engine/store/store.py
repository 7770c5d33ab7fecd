"""The interface of a store: what the engine needs of a local disk or an object store.

An object at its final name is complete, or it is not there. Names are relative to the store's root
and have `/` between their parts. A part that begins with a dot hides the objects below it from
listings of the folders above. A store that refuses an operation, or does not answer, raises
`TransientError`.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

import pyarrow as pa

from surge_dagster.engine.support.waiting import in_background, result_of

CONCURRENT_READS = 32  # of a bucket
T = TypeVar("T")


class StoredObject(NamedTuple):  # a listing makes and compares tens of thousands of them
    """One object as a listing shows it: name relative to the store, size in bytes, and a tag that
    changes with it."""

    name: str
    size: int
    etag: str


def is_hidden(name: str) -> bool:
    """Return whether a name lies in a hidden folder, or is that of a hidden part.

    On a disk, such folders come and go with their files.
    """
    return any(part.startswith(".") for part in name.split("/"))


def plain_etag(etag: str | None) -> str:
    """Return an etag without its quotes, which Azure's listings leave out."""
    return (etag or "").strip('"')


@dataclass(frozen=True, slots=True)
class ObjectEnd:
    """The last bytes of one version of an object, and which version that was."""

    stored: StoredObject
    content: bytes


class Upload(ABC):
    """One object on its way into `sink`; leaving its `with` block without `publish` leaves nothing
    behind."""

    sink: pa.NativeFile  # `publish` closes it, not the writer

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    @abstractmethod
    def publish(self, still_wanted: Callable[[], None]) -> StoredObject:
        """Make the object appear under its name, complete and durable; on a disk, `Store.sync`
        makes the name durable.

        Args:
            still_wanted: called last, and again whenever another writer has replaced the object
                since; what it raises stops the publication.
        """


class Store(ABC):
    """Objects below one folder of a disk, or one prefix of a bucket.

    Attributes:
        url: of the folder or prefix, without a slash at the end.
        identity: distinguishes this output from every other one, without secrets.
        is_remote: whether a read is a request: worth sending several concurrently, and caching its
            answer on disk.
        upload_bytes: memory that an upload may hold.
    """

    is_remote = False
    upload_bytes = 0

    def __init__(self, url: str, identity: str) -> None:
        self.url = url
        self.identity = identity

    def until(self, over: threading.Event) -> Self:
        """Return the same store; once `over` is set, its operations raise `Cancelled` instead of
        waiting."""
        return self

    def location(self, name: str) -> str:
        """Return the path or URL of an object, for messages and receipts."""
        return f"{self.url}/{name}"

    def prepare(self, folder: str) -> None:  # noqa: B027
        """Make a folder that is not hidden ready for writing; raises `ConfigError` if it cannot be
        used."""

    def sweep(self, folder: str) -> None:  # noqa: B027
        """Remove the temp files of dead writers in a folder and, if it is hidden, below it; a
        bucket has none."""

    def sync(self, folder: str) -> None:  # noqa: B027
        """Make the names of the objects published in a folder durable; in a bucket they are."""

    @abstractmethod
    def list(self, folder: str, *, deep: bool = False) -> Iterator[StoredObject]:
        """Yield the objects of a folder, or of its folders too (`deep`), in no particular order; no
        hidden ones."""

    @abstractmethod
    def folders(self) -> Sequence[str]:
        """Return the names of the folders at the root, sorted; hidden ones are left out."""

    @abstractmethod
    def open(self, name: str, listed: StoredObject | None = None) -> pa.NativeFile:
        """Open an object for reading; raises `FileNotFoundError` if `listed` was replaced."""

    @abstractmethod
    def read_end(self, name: str, size: int) -> ObjectEnd:
        """Return the last `size` bytes of an object, or all of it; raises `FileNotFoundError`."""

    @abstractmethod
    def is_settled(self, stored: StoredObject, seen_ns: int) -> bool:
        """Return whether an object seen at a time (Unix, ns) can never have the same name, size and
        tag with other content."""

    def reads_ahead(self, names: Sequence[str], read: Callable[[Self, str], T]) -> Generator[T]:
        """Yield what is read of each name, in their order; from a bucket while the next ones are
        being read.

        If the generator ends early, it does not wait for reads under way, as an executor would.

        Args:
            read: called in any thread, with a store whose waits end when the results are no longer
                needed.
        """
        if not self.is_remote:
            for name in names:
                yield read(self, name)
            return
        over = threading.Event()
        view = self.until(over)
        ahead: deque[Future[T]] = deque()
        try:
            for name in names:
                ahead.append(in_background(partial(read, view, name), "surge-footer"))
                if len(ahead) == CONCURRENT_READS:
                    yield result_of(ahead.popleft())
            while ahead:
                yield result_of(ahead.popleft())
        finally:
            over.set()

    @abstractmethod
    def create(self, name: str) -> Upload:
        """Begin an object; its folder was prepared, or is hidden."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove an object, if it is there."""
