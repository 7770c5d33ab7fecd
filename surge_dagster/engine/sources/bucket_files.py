"""Source files in a bucket: one listing, and the ends of many files read concurrently."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import TypeVar

import pyarrow as pa

from surge_dagster.engine.sources.endings import is_source_file
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
    """A folder or one object of this name, below the folder that the store is opened at; all of it
    without a name."""

    is_remote = True

    def __init__(
        self, url: str, store: ObjectStore, name: str, pattern: NamePattern | None
    ) -> None:
        super().__init__(url, pattern)
        self._store = store
        self._name = name

    def _found(self, scope: str, begin: str) -> Iterator[SourceFile]:
        above = f"{self._name}/" if self._name else ""
        place = f"{above}{scope}".rstrip("/")
        looks = [
            lambda folder: list(self._store.list(folder, deep=True, begin=begin)),
            self._object,
        ]
        if scope and is_source_file(scope):
            looks.reverse()  # what is more likely is looked at first
        for stored in looks[0](place) or looks[1](place):
            relative = (
                stored.name.removeprefix(above)
                if stored.name != self._name
                else stored.name.rpartition("/")[2]
            )
            if is_source_file(relative) and not any(
                part.startswith(HIDDEN) for part in relative.split("/")
            ):
                token = stored.etag.strip('"') or f"{_NO_ETAG}{stored.size}"
                yield SourceFile(relative, stored.size, token, partial(self._open, stored))

    def _object(self, name: str) -> Sequence[StoredObject]:
        try:
            return [self._store.read_end(name, 1).stored] if name else []
        except FileNotFoundError:
            return []

    @property
    def identity(self) -> str:
        return f"{self._store.identity}/{self._name}"

    def is_settled(self, file: SourceFile) -> bool:
        return bool(_etag(file))

    def ends(
        self, files: Sequence[SourceFile], read: Callable[[pa.NativeFile], T]
    ) -> Generator[T | Exception]:
        above = f"{self._name}/" if self._name else ""
        listed = {above + file.relative: file for file in files}

        def read_one(store: Store, name: str) -> T | Exception:
            file = listed[name]
            return read_end(
                partial(store.open, name, StoredObject(name, file.size, _etag(file))), read
            )

        yield from reads_ahead(self._store, list(listed), read_one)

    def _open(self, stored: StoredObject) -> pa.NativeFile:
        return self._store.open(stored.name, stored, tail_bytes=FIRST_BYTES, ahead=True)


def _etag(file: SourceFile) -> str:
    return "" if file.token.startswith(_NO_ETAG) else file.token
