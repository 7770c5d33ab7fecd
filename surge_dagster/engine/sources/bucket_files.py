"""Source files in a bucket: one listing, and the ends of many files read concurrently."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import TypeVar

import pyarrow as pa

from surge_dagster.engine.sources.formats import is_source_file
from surge_dagster.engine.sources.listing import (
    FIRST_BYTES,
    HIDDEN,
    NamePattern,
    SourceFile,
    SourceFiles,
    read_end,
)
from surge_dagster.engine.store.concurrent_reads import reads_ahead
from surge_dagster.engine.store.object_store import ObjectStore
from surge_dagster.engine.store.store import Store, StoredObject

T = TypeVar("T")
_NO_ETAG = "size-"


class BucketFiles(SourceFiles):
    """The folder or object of a name below the store's own folder; without a name all of it."""

    is_remote = True

    def __init__(
        self, url: str, store: ObjectStore, name: str, pattern: NamePattern | None
    ) -> None:
        super().__init__(url, pattern)
        self._store = store
        self._name = name
        self._above = f"{name}/" if name else ""

    def _found(self, scope: str, begin: str) -> Iterator[SourceFile]:
        for stored in self._stored(f"{self._above}{scope}".rstrip("/"), begin):
            relative = stored.name.removeprefix(self._above)
            if stored.name == self._name:
                relative = stored.name.rpartition("/")[2]
            is_hidden = any(part.startswith(HIDDEN) for part in relative.split("/"))
            if is_source_file(relative) and not is_hidden:
                yield SourceFile(
                    relative=relative,
                    size=stored.size,
                    token=stored.etag.strip('"') or f"{_NO_ETAG}{stored.size}",
                    open=partial(self._open, stored),
                    is_settled=bool(stored.etag),
                )

    def _stored(self, place: str, begin: str) -> Sequence[StoredObject]:
        """Return what lies in a folder, or the object of this name; what is likelier first."""
        if place and is_source_file(place):
            return self._object(place) or self._folder(place, begin)
        return self._folder(place, begin) or self._object(place)

    def _folder(self, name: str, begin: str) -> Sequence[StoredObject]:
        return list(self._store.list(name, deep=True, begin=begin))

    def _object(self, name: str) -> Sequence[StoredObject]:
        try:
            return [self._store.read_end(name, 1).stored] if name else []
        except FileNotFoundError:
            return []

    @property
    def identity(self) -> str:
        return f"{self._store.identity}/{self._name}"

    def ends(
        self, files: Sequence[SourceFile], read: Callable[[pa.NativeFile], T]
    ) -> Generator[T | Exception]:
        listed = {self._above + file.relative: file for file in files}

        def read_one(store: Store, name: str) -> T | Exception:
            stored = StoredObject(name, listed[name].size, _etag(listed[name]))
            return read_end(partial(store.open, name, stored), read)

        yield from reads_ahead(self._store, list(listed), read_one)

    def _open(self, stored: StoredObject) -> pa.NativeFile:
        return self._store.open(stored.name, stored, tail_bytes=FIRST_BYTES, ahead=True)


def _etag(file: SourceFile) -> str:
    return "" if file.token.startswith(_NO_ETAG) else file.token
