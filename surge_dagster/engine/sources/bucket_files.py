"""Source files in a bucket, by one listing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import pyarrow as pa

from surge_dagster.engine.sources.formats import is_source_file
from surge_dagster.engine.sources.listing import (
    FIRST_BYTES,
    HIDDEN,
    NamePattern,
    SourceFile,
    SourceFiles,
    require_no_table,
)
from surge_dagster.engine.store.object_store import ObjectStore
from surge_dagster.engine.store.store import StoredObject


class BucketFiles(SourceFiles):
    """The folder or object of a name below the store's own folder; without a name all of it."""

    def __init__(
        self, url: str, store: ObjectStore, name: str, pattern: NamePattern | None
    ) -> None:
        super().__init__(url, store, name, pattern)
        self._bucket = store
        self._above = f"{name}/" if name else ""

    def _found(self, scope: str, begin: str) -> Iterator[SourceFile]:
        for stored in self._stored(f"{self._above}{scope}".rstrip("/"), begin):
            relative = stored.name.removeprefix(self._above)
            if stored.name == self._name:
                relative = stored.name.rpartition("/")[2]
            require_no_table(self.url, relative)
            is_hidden = any(part.startswith(HIDDEN) for part in relative.split("/"))
            if is_source_file(relative) and not is_hidden:
                yield SourceFile(
                    relative=relative,
                    stored=stored,
                    token=stored.etag or str(stored.size),
                    open=partial(self._open, stored),
                )

    def _stored(self, place: str, begin: str) -> Sequence[StoredObject]:
        """Return what lies in a folder, or the object of this name."""
        found = list(self._bucket.list(place, deep=True, begin=begin, hidden=True))
        if found or not place:
            return found
        try:
            return [self._bucket.read_end(place, 1).stored]
        except FileNotFoundError:
            return []

    def _open(self, stored: StoredObject) -> pa.NativeFile:
        return self._bucket.open(stored.name, stored, tail_bytes=FIRST_BYTES)
