"""The files of a space as one listing showed them; what each says of itself is read when somebody asks for it.

Only footers that are asked for are read, each once; of a bucket many at a time. When they are more than fit into one
round of requests, what was read is kept on disk (`footer_cache.py`), so that it is not asked for again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.files.checked_file import end_of
from surge_dagster.engine.files.embedding_file import FileFacts, InvalidFile, check_schema, read_facts
from surge_dagster.engine.files.file_formats import SUFFIXES, file_name
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.footer_cache import Entry, FooterCache
from surge_dagster.engine.output.freshness import PublishedFile
from surge_dagster.engine.store.concurrent_reads import READS_AT_ONCE, read_at_once
from surge_dagster.engine.store.store import Store, StoredObject
from surge_dagster.engine.support.unreadable import UNREADABLE, first_line, is_systems, not_given


@dataclass(frozen=True, slots=True)
class LoadableFile(PublishedFile):
    """A file of this space, and its columns."""

    columns: pa.Schema


Seen = LoadableFile | InvalidFile | FileNotFoundError


class ListedFiles:
    """What one listing showed.

    Args:
        store, space: of which the files are listed now.
    """

    def __init__(self, store: Store, space: Space) -> None:
        self._store = store
        self._space = space
        suffix = SUFFIXES[space.file_format]
        listed = {stored.name: stored for stored in store.list(space.name) if stored.name.endswith(suffix)}
        self._listed = dict(sorted(listed.items()))
        self._seen: dict[str, Seen] = {}
        self._cache: FooterCache | None = None
        # Columns are the same for thousands of files, and costly to take apart.
        self._written: dict[bytes | pa.Schema, bytes] = {}
        self._columns: dict[bytes, pa.Schema] = {}

    def name(self, key: str) -> str:
        """The name that a partition's file has, whether or not there is one."""
        return file_name(self._space.name, key, self._space.file_format)

    def all(self) -> dict[str, Seen]:
        """Every file, or what is wrong with it, or that it has gone since it was listed; by name, sorted."""
        return self.of(self._listed)

    def of(self, names: Iterable[str]) -> dict[str, Seen]:
        """The same of these names; what was not listed is left out.

        Raises:
            TransientError: a file cannot be read now.
        """
        listed = [name for name in names if name in self._listed]
        unseen = [name for name in listed if name not in self._seen]
        with self._kept_on_disk(len(unseen)):
            unseen = [name for name in unseen if not self._is_known(name)]
            if self._store.is_remote:
                read_at_once(self._store, unseen, self._read, self._keep)
            else:
                for name in unseen:
                    self._keep(name, self._read(self._store, name))
        return {name: self._seen[name] for name in listed}

    @contextmanager
    def _kept_on_disk(self, files: int) -> Iterator[None]:
        """Reading the cache takes longer than to ask for a few footers."""
        if files <= READS_AT_ONCE or not self._store.is_remote or self._store.identity is None:
            yield
            return
        cache = self._cache = FooterCache(self._store.identity, self._space.name)
        try:
            yield
        finally:
            self._cache = None  # as large as all footers together
            cache.save(self._listed)

    def _is_known(self, name: str) -> bool:
        entry = self._cache.entry(self._listed[name]) if self._cache is not None else None
        if entry is None or not entry.columns:
            return False
        self._see(name, entry.facts, entry.columns)
        return True

    def _read(self, store: Store, name: str) -> Entry | InvalidFile | FileNotFoundError:
        """What a file says of itself, and its columns as they are kept; or why it is none."""
        try:
            return self._footer(store, self._listed[name])
        except (InvalidFile, FileNotFoundError) as error:
            return error

    def _keep(self, name: str, found: Entry | InvalidFile | FileNotFoundError) -> None:
        if not isinstance(found, Entry):
            self._seen[name] = found
            return
        self._see(name, found.facts, found.columns)
        if self._cache is not None:
            self._cache.add(self._listed[name], found.facts, found.columns)

    def _footer(self, store: Store, stored: StoredObject) -> Entry:
        try:
            with store.open_listed(stored) as source:
                if self._space.file_format == "arrow":
                    end = end_of(source)
                    return Entry(end.facts, self._kept(end.schema, lambda: end.schema))
                footer = pq.read_metadata(source)
                facts, written = read_facts(footer), (footer.metadata or {}).get(b"ARROW:schema", b"")
                return Entry(facts, self._kept(written, footer.schema.to_arrow_schema))
        except (InvalidFile, FileNotFoundError, TransientError):
            raise
        except UNREADABLE as error:
            if is_systems(error):
                raise not_given(repr(self._store.location(stored.name)), error) from error
            raise InvalidFile(f"its footer cannot be read ({first_line(error)})") from error

    def _kept(self, written: bytes | pa.Schema, columns: Callable[[], pa.Schema]) -> bytes:
        kept = self._written.get(written)
        if kept is None:
            kept = self._written[written] = columns().remove_metadata().serialize().to_pybytes()
        return kept

    def _see(self, name: str, facts: FileFacts, columns: bytes) -> None:
        try:
            schema = self._checked(columns)
            if facts.space != self._space.name:
                raise InvalidFile(f"it holds vectors of the space {facts.space!r}; expected {self._space.name!r}")
            if self.name(facts.partition_key) != name:
                raise InvalidFile(f"it is the file of partition {facts.partition_key!r}, under another name")
        except InvalidFile as error:
            self._seen[name] = error
        else:
            self._seen[name] = LoadableFile(self._listed[name], facts, schema)

    def _checked(self, columns: bytes) -> pa.Schema:
        schema = self._columns.get(columns)
        if schema is None:
            schema = pa.ipc.read_schema(pa.BufferReader(columns))
            check_schema(schema, dimension=self._space.dimension, dtype=self._space.dtype)
            self._columns[columns] = schema
        return schema


def replaced(location: str, key: str) -> TransientError:
    """What whoever opened embeddings is told of a file that is no longer the one that was listed."""
    return TransientError(
        f"partition {key!r}: {location!r} was replaced or removed after the embeddings were opened. Open them again.",
        key,
    )
