"""Which files an output has and which of them are fresh, decided from the files alone: there is no transaction log.

One listing says which files exist, and the end of each file says what it holds. What was read is remembered for as long
as the process lives, by name, size and tag, so that looking again costs one listing; what was read from a bucket is
kept on the local disk too (`footer_cache.py`).

A file that exists and cannot be read now is neither fresh nor missing: it is reported and not changed.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator
from typing import Literal

from surge_dagster.engine.errors import StoreUnavailable, TransientError
from surge_dagster.engine.files.facts import InvalidFile
from surge_dagster.engine.files.formats import SUFFIXES, PublishedFile, file_name, read_published_file
from surge_dagster.engine.model.spec import FileFormat
from surge_dagster.engine.output.footer_cache import FooterCache
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.concurrent_reads import CONCURRENT_READS, read_concurrently
from surge_dagster.engine.store.store import Store, StoredObject

Status = Literal["fresh", "stale", "missing", "foreign"]
Found = PublishedFile | InvalidFile | FileNotFoundError
_LOOK_AHEAD = (32, 1024)

_known: dict[tuple[str, str], dict[str, tuple[StoredObject, Found]]] = {}  # by output and space, then by name


class OutputState:
    """The files of one space, as they were when this was made or last refreshed.

    Args:
        store: the output.
        space: name of the space; its folder need not exist.
        file_format: of the space's files; others are ignored.
    """

    def __init__(self, store: Store, space: str, file_format: FileFormat = "parquet") -> None:
        self.store = store
        self.space = space
        self._format: FileFormat = file_format
        self._remembered = _known.setdefault((store.identity, space), {})
        self._cache: FooterCache | None = None
        self.refresh()

    def refresh(self) -> None:
        """List the space's folder again."""
        self._seen_ns = time.time_ns()
        suffix = SUFFIXES[self._format]
        self._listed = {stored.name: stored for stored in self.store.list(self.space) if stored.name.endswith(suffix)}
        self._found: dict[str, Found] = {}
        self._unreadable: dict[str, TransientError] = {}
        for name, known in list(self._remembered.items()):  # a copy: other threads change it
            if self._listed.get(name) == known[0]:
                self._found[name] = known[1]
            else:
                self._remembered.pop(name, None)

    def look_at(self, keys: Iterable[str]) -> None:
        """Read the files of these partitions from a bucket, many concurrently, and only those that are not known yet.

        A file that cannot be read raises when it is requested.

        Raises:
            StoreUnavailable: the store does not answer at all.
        """
        if self.store.is_remote:
            with self._cached():
                self._read_all(self._names(keys))

    def looked_at(self, partitions: Iterable[Partition]) -> Iterator[Partition]:
        """The partitions as they come, once the files of up to a thousand of them were read (see `look_at`)."""
        if not self.store.is_remote:
            yield from partitions
            return
        source, size = iter(partitions), _LOOK_AHEAD[0]
        with self._cached():
            while chunk := list(itertools.islice(source, size)):
                self._read_all(self._names(partition.key for partition in chunk))
                yield from chunk
                size = min(2 * size, _LOOK_AHEAD[1])

    def files(self, keys: Iterable[str] | None = None) -> dict[str, Found]:
        """The listed files of these partitions, or all of them sorted by name: valid ones, or what is wrong with them.

        A file that was replaced after the listing is a `FileNotFoundError`, so that these files are one state of the
        output.

        Raises:
            TransientError: one cannot be read now.
        """
        found = self.each_file(keys)
        for file in found.values():
            if isinstance(file, TransientError):
                raise file
        return {name: file for name, file in found.items() if not isinstance(file, TransientError)}

    def each_file(self, keys: Iterable[str] | None = None) -> dict[str, Found | TransientError]:
        """The same, with the error in the place of each file that cannot be read now.

        Raises:
            StoreUnavailable: the store does not answer at all.
        """
        names = sorted(self._listed) if keys is None else [name for name in self._names(keys) if name in self._listed]
        unread = [name for name in names if name not in self._found]
        # Loading the cache takes longer than reading a few files.
        with self._cached() if self.store.is_remote and len(unread) > CONCURRENT_READS else contextlib.nullcontext():
            self._read_all(names)
        found: dict[str, Found | TransientError] = {}
        for name in names:
            file = found[name] = self._unreadable.get(name) or self._found[name]
            if isinstance(file, PublishedFile) and file.stored != self._listed[name]:
                found[name] = FileNotFoundError(f"{self.store.location(name)!r} was replaced after it was listed")
        return found

    def file(self, key: str) -> PublishedFile | None:
        """The valid file in the partition's place: its own, or one of another space (`foreign`); else None.

        Raises:
            TransientError: there is one that cannot be read now.
        """
        if not self._listed:  # as when a catalog is embedded for the first time
            return None
        name = file_name(self.space, key, self._format)
        if self._is_unread(name):
            self._keep(name, _read(self.store, name))
        if name in self._unreadable:
            reason = f"it is unknown whether its file is up to date, so it was left alone. {self._unreadable[name]}"
            raise TransientError(f"partition {key!r}: {reason}", key)
        found = self._found.get(name)
        if not isinstance(found, PublishedFile):
            return None
        facts = found.facts
        return found if facts.partition_key == key or facts.space != self.space else None

    def refuse(self, file: PublishedFile, reason: str) -> None:
        """Treat a file as invalid that was read in full and does not hold what it states: it is `missing` here.

        That is not remembered: a disk may fail once, and the next state reads the file again.
        """
        self._found[file.stored.name] = InvalidFile(reason)

    def status(self, partition: Partition) -> Status:
        """Whether a partition needs work: `fresh` does not, and `foreign` needs an operator.

        Raises:
            TransientError: it has a file that cannot be read now.
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
    def _cached(self) -> Iterator[FooterCache]:
        """Loads the cache on disk, and saves to it what is read meanwhile."""
        cache = self._cache = FooterCache(self.store.identity, self.space)
        try:
            yield cache
        finally:
            self._cache = None  # as large as all footers together
            cache.save(self._listed)

    def _names(self, keys: Iterable[str]) -> list[str]:
        names = []
        for key in keys:
            with contextlib.suppress(ValueError):  # the reader refuses such a key
                names.append(file_name(self.space, key, self._format))
        return names

    def _read_all(self, names: Iterable[str]) -> None:
        """Read the files that are listed and not known yet."""
        unread = []
        for name in names:
            if self._is_unread(name):
                known = self._cache.file(self._listed[name]) if self._cache is not None else None
                if known is None:
                    unread.append(name)
                else:
                    self._remember(name, known.stored, known)
        if self.store.is_remote:
            read_concurrently(self.store, unread, _read, self._keep)
        else:
            for name in unread:
                self._keep(name, _read(self.store, name))

    def _is_unread(self, name: str) -> bool:
        return name in self._listed and name not in self._found and name not in self._unreadable

    def _keep(self, name: str, answer: Found | TransientError) -> None:
        if isinstance(answer, TransientError):
            self._unreadable[name] = answer
        elif isinstance(answer, PublishedFile):  # it may have been replaced since it was listed
            self._remember(name, answer.stored, answer)
            if self._cache is not None:
                self._cache.add(answer)
        else:
            self._remember(name, self._listed[name], answer)

    def _remember(self, name: str, stored: StoredObject, found: Found) -> None:
        self._found[name] = found
        if self.store.is_settled(stored, self._seen_ns):
            self._remembered[name] = (stored, found)


def _read(store: Store, name: str) -> Found | TransientError:
    """The file, or why it cannot be used; a store that is down raises."""
    try:
        return read_published_file(store, name)
    except StoreUnavailable:
        raise
    except (InvalidFile, FileNotFoundError, TransientError) as error:
        error.__cause__ = error.__context__ = None  # it may be kept for long, and frames with it
        return error.with_traceback(None)
