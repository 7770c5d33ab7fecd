"""What lies in the output already, told from the files alone: no transaction log, nothing that can disagree with them.

One listing says which files exist; the footer of each says from which source version it was made. What was read is kept
for as long as the process lives, by name, size and tag, so that looking again costs one listing; what a bucket answered
is kept on disk too (`footer_cache.py`).

A file that is there and cannot be read for now is neither fresh nor missing: it is named, and left alone.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from surge_dagster.engine.errors import StoreUnavailable, TransientError
from surge_dagster.engine.files import arrow_footer
from surge_dagster.engine.files.embedding_file import FileFacts, InvalidFile, read_facts
from surge_dagster.engine.files.file_formats import SUFFIXES, file_name, format_of
from surge_dagster.engine.files.footer_end import END_BYTES, TRAILER_BYTES, facts_in_footer, footer_bytes
from surge_dagster.engine.model.spec import FileFormat
from surge_dagster.engine.output.footer_cache import FooterCache
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.concurrent_reads import read_at_once
from surge_dagster.engine.store.store import ObjectEnd, Store, StoredObject
from surge_dagster.engine.support.unreadable import UNREADABLE, first_line

Status = Literal["fresh", "stale", "missing", "foreign"]
_LOOK_AHEAD = (32, 1024)


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """A valid embedding file and where it lies."""

    stored: StoredObject
    facts: FileFacts


Found = PublishedFile | str  # or what is wrong with it

_known: dict[tuple[str, str], dict[str, tuple[StoredObject, Found]]] = {}  # by output and space, then by name


def read_published_file(store: Store, name: str) -> PublishedFile:
    """One file as it is now, from one read of its end where that is enough.

    Raises:
        InvalidFile: it is not a complete embedding file.
        FileNotFoundError: there is none.
        TransientError: there is one that cannot be read now.
    """
    if format_of(name) == "arrow":
        end = _arrow_end(store, name)
        return PublishedFile(end.stored, arrow_footer.read_end(end.content, end.stored.size).facts)
    end = store.read_end(name, END_BYTES)
    length = footer_bytes(end.content, end.stored.size)
    if length + TRAILER_BYTES <= len(end.content):
        facts = facts_in_footer(end.content[-TRAILER_BYTES - length : -TRAILER_BYTES])
        if facts is not None:
            return PublishedFile(end.stored, facts)
        whole = end
    else:
        whole = _more_of_end(store, end, length + TRAILER_BYTES)
    try:
        footer = pq.read_metadata(pa.BufferReader(whole.content))
    except UNREADABLE as error:
        raise InvalidFile(f"its footer cannot be read ({first_line(error)})") from error
    return PublishedFile(whole.stored, read_facts(footer))


def _arrow_end(store: Store, name: str) -> ObjectEnd:
    end = store.read_end(name, END_BYTES)
    needed = arrow_footer.end_bytes(end.content, end.stored.size)
    if needed > len(end.content):
        end = _more_of_end(store, end, needed)
    return replace(end, content=end.content[-needed:])


def _more_of_end(store: Store, end: ObjectEnd, size: int) -> ObjectEnd:
    whole = store.read_end(end.stored.name, size)
    if whole.stored != end.stored:
        raise TransientError(f"{store.location(end.stored.name)!r} was replaced while it was read. Run again.")
    return whole


def _read(store: Store, name: str) -> PublishedFile | Exception:
    """The file, or why it cannot be had; a store that is down is no answer."""
    try:
        return read_published_file(store, name)
    except StoreUnavailable:
        raise
    except (InvalidFile, FileNotFoundError, TransientError) as error:
        return error


class OutputState:
    """The files of one space, as they were when this was made or last refreshed.

    Args:
        store: the output.
        space: name of the space; its folder need not exist.
        file_format: of the space's files; others are not looked at.
    """

    def __init__(self, store: Store, space: str, file_format: FileFormat = "parquet") -> None:
        self.store = store
        self.space = space
        self._format: FileFormat = file_format
        self._remembered = {} if store.identity is None else _known.setdefault((store.identity, space), {})
        self._cache: FooterCache | None = None
        self.refresh()

    def refresh(self) -> None:
        """List the space's folder again."""
        self._seen_ns = time.time_ns()
        suffix = SUFFIXES[self._format]
        remembered = self._remembered
        listed: dict[str, StoredObject] = {}
        found: dict[str, Found] = {}
        for stored in self.store.list(self.space):
            name = stored.name
            if not name.endswith(suffix):
                continue
            known = remembered.get(name)
            if known is not None and known[0] == stored:
                stored, found[name] = known
            listed[name] = stored
        self._listed, self._found = listed, found
        self._unreadable: dict[str, TransientError] = {}
        for name in list(remembered):  # a copy: other threads look too
            if name not in found:
                remembered.pop(name, None)

    def names(self) -> list[str]:
        """Names of all files listed, valid or not, sorted."""
        return sorted(self._listed)

    def look_at(self, keys: Iterable[str]) -> None:
        """Read the files of these partitions, on a bucket: many at a time, and only those that are not known.

        What cannot be read is told when it is asked for.

        Raises:
            StoreUnavailable: the store does not answer at all.
        """
        if self.store.is_remote:
            with self._cached():
                self._look_at(keys)

    def looked_at(self, partitions: Iterable[Partition]) -> Iterator[Partition]:
        """The partitions as they come, once the files of up to a thousand have been looked at (see `look_at`)."""
        if not self.store.is_remote:
            yield from partitions
            return
        source, size = iter(partitions), _LOOK_AHEAD[0]
        with self._cached() as cache:
            while chunk := list(itertools.islice(source, size)):
                self._look_at(partition.key for partition in chunk)
                if cache is not None and cache.has_grown:
                    cache.save(self._listed)
                yield from chunk
                size = min(2 * size, _LOOK_AHEAD[1])

    def file(self, key: str) -> PublishedFile | None:
        """The valid file in the partition's place: its own, or one of another space (`foreign`); else None.

        Raises:
            TransientError: there is one that cannot be read now.
        """
        if not self._listed:  # as when a catalog is embedded for the first time
            return None
        name = file_name(self.space, key, self._format)
        found = self._found.get(name)
        if found is None:
            if self._is_unread(name):
                self._see(name, _read(self.store, name))
            if name in self._unreadable:
                raise self._named(key, self._unreadable[name])
            found = self._found.get(name)
        if not isinstance(found, PublishedFile):
            return None
        facts = found.facts
        return found if facts.partition_key == key or facts.space != self.space else None

    def refuse(self, file: PublishedFile, reason: str) -> None:
        """Take a file that was read in full, and is not what it says, for none: it is `missing` here.

        It is not remembered: a disk may have failed once, and whoever looks again reads the file again.
        """
        self._found[file.stored.name] = reason

    def facts(self, key: str) -> FileFacts | None:
        """What the partition's file says of itself; None when there is no valid one of this space.

        Raises:
            TransientError: there is one that cannot be read now.
        """
        found = self.file(key)
        return found.facts if found and found.facts.space == self.space else None

    def status(self, partition: Partition) -> Status:
        """Whether a partition needs work: `fresh` alone does not, and `foreign` needs a person.

        Raises:
            TransientError: it has a file that cannot be read now, so nobody can tell.
        """
        return self.status_of(partition, self.file(partition.key))

    def status_of(self, partition: Partition, found: PublishedFile | None) -> Status:
        """The same, where the valid file in the partition's place is known already."""
        if found is None:
            return "missing"
        if found.facts.space != self.space:
            return "foreign"
        return "fresh" if found.facts.source_version == partition.source_version else "stale"

    @contextlib.contextmanager
    def _cached(self) -> Iterator[FooterCache | None]:
        """Holds what is kept on disk, and keeps there what is read meanwhile; None where nothing may be remembered."""
        cache = self._cache = None if self.store.identity is None else FooterCache(self.store.identity, self.space)
        try:
            yield cache
        finally:
            self._cache = None  # as large as all footers together
            if cache is not None:
                cache.save(self._listed)

    def _look_at(self, keys: Iterable[str]) -> None:
        unread = []
        for key in keys:
            with contextlib.suppress(ValueError):  # no partition can be called that, as whoever reads it will say
                name = file_name(self.space, key, self._format)
                if not self._is_unread(name):
                    continue
                stored = self._listed[name]
                facts = self._cache.facts(stored) if self._cache is not None else None
                if facts is None:
                    unread.append(name)
                else:
                    self._keep(stored, PublishedFile(stored, facts))
        read_at_once(self.store, unread, _read, self._see)

    def _is_unread(self, name: str) -> bool:
        return name in self._listed and name not in self._found and name not in self._unreadable

    def _see(self, name: str, answer: PublishedFile | Exception) -> None:
        match answer:
            case TransientError():
                self._unreadable[name] = answer
            case Exception():
                self._keep(self._listed[name], str(answer))
            case _:  # it may have been replaced since it was listed
                self._keep(answer.stored, answer)
                if self._cache is not None:
                    self._cache.add(answer.stored, answer.facts)

    def _keep(self, stored: StoredObject, found: Found) -> None:
        self._found[stored.name] = found
        if self.store.is_settled(stored, self._seen_ns):
            self._remembered[stored.name] = (stored, found)

    def _named(self, key: str, error: TransientError) -> TransientError:
        return TransientError(
            f"partition {key!r}: whether its file is up to date cannot be told, so it was left alone. {error}", key
        )
