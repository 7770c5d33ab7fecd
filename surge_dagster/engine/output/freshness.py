"""Which files an output has and which of them are fresh, decided only from the files: there is no
transaction log.

One listing says which files exist, and the end of each file says what it holds. What was read is
remembered (`FooterMemory`), so that looking again costs one listing.

A file that exists and cannot be read now is neither fresh nor missing: it is reported and not
changed.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from surge_dagster.engine.errors import StoreUnavailable, TransientError
from surge_dagster.engine.files.facts import FileFacts, InvalidFile, explained
from surge_dagster.engine.files.formats import (
    SUFFIX,
    PublishedFile,
    file_name,
    read_published_file,
)
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.store import Store, StoredObject
from surge_dagster.engine.support.collector import without_collector
from surge_dagster.engine.support.footer_memory import FooterMemory

Status = Literal["fresh", "retry", "stale", "missing", "foreign", "unread"]
Found = PublishedFile | InvalidFile | FileNotFoundError
_LOOK_AHEAD = 256  # files of a bucket that are read before the first of them is used


@dataclass(frozen=True, slots=True)
class Freshness:
    """Whether a partition needs work.

    Attributes:
        status: "fresh" needs no work; "retry": its file lists rows that the next run tries again,
            and is fresh otherwise; "stale": its file was made from another version of the
            source; "missing": it has no valid file; "foreign": a file of another space is in its
            place, and an operator has to move it; "unread": its file cannot be read now.
        file: the valid file in the partition's place: its own, or a foreign one.
        error: why a file cannot be read now.
        invalid: what is wrong with a file in the partition's place that is not valid.
    """

    status: Status
    file: PublishedFile | None = None
    error: TransientError | None = None
    invalid: InvalidFile | None = None


def status_of(
    facts: FileFacts, space: str, key: str, source_version: str, rows_version: str | None = None
) -> Status:
    """Return the status of a partition with a valid file in its place; the versions are the present
    ones."""
    if facts.space != space:
        return "foreign"
    if facts.partition_key != key:  # the hashes of two long keys are equal, or the file was copied
        return "missing"
    if facts.source_version != source_version or rows_version not in (None, facts.rows_version):
        return "stale"
    has_retries = rows_version is None and facts.transient_rows > 0
    return "retry" if has_retries else "fresh"


class OutputState:
    """The files of one space, whose folder need not exist, as they were when this was made or last
    refreshed."""

    def __init__(self, store: Store, space: str) -> None:
        self.store = store
        self.space = space
        self._memory: FooterMemory[Found] = FooterMemory(f"output\0{store.identity}\0{space}")
        self.refresh()

    @without_collector()
    def refresh(self) -> None:
        """List the space's folder again."""
        self._seen_ns = time.time_ns()
        self._listed: dict[str, StoredObject] = {}
        for stored in self.store.list(self.space):
            if stored.name.endswith(SUFFIX):
                self._listed[stored.name] = stored
        self._memory.forget_others(self._listed)
        tags = {name: (stored.size, stored.etag) for name, stored in self._listed.items()}
        self._known: dict[str, Found | TransientError] = {**self._memory.known(tags)}

    def look_at(self, keys: Iterable[str]) -> None:
        """Read the files of these partitions that are not known yet, many of a bucket's
        concurrently."""
        self._read_all(self._names(keys))

    def looked_at(self, partitions: Iterable[Partition]) -> Iterator[Partition]:
        """Yield the partitions as they come, once the files of some of them were read
        (see `look_at`)."""
        source = iter(partitions)
        while some := list(itertools.islice(source, _LOOK_AHEAD)):
            self.look_at(partition.key for partition in some)
            yield from some

    def names(self) -> list[str]:
        """Return the names of the listed files, sorted."""
        return sorted(self._listed)

    def files(self, keys: Iterable[str] | None = None) -> dict[str, Found | TransientError]:
        """Return the listed files of these partitions, or all of them sorted by name: valid ones,
        or what is wrong with them.

        A file that was replaced after the listing is a `FileNotFoundError`, so that these files are
        one state of the output.
        """
        if keys is None:
            return self._found(sorted(self._listed))
        return self._found([name for name in self._names(keys) if name in self._listed])

    def other_files(self, keys: Iterable[str]) -> dict[str, Found | TransientError]:
        """Return the listed files of all other partitions, as `files` does."""
        return self._found(sorted(self._listed.keys() - set(self._names(keys))))

    def _found(self, names: Sequence[str]) -> dict[str, Found | TransientError]:
        self._read_all(names)
        files: dict[str, Found | TransientError] = {}
        for name in names:
            file = files[name] = self._known[name]
            if isinstance(file, PublishedFile) and file.stored != self._listed[name]:
                files[name] = FileNotFoundError(
                    f"{self.store.location(name)!r} was replaced after it was listed"
                )
        return files

    def is_as_listed(self, name: str) -> bool:
        """Return whether what was listed under a name, a file or none, is there now; False for a
        file that cannot be read."""
        listed = self._listed.get(name)
        if isinstance(self._known.get(name), TransientError):
            return False
        try:
            with explained(self.store.location(name)), self.store.open(name, listed):
                return listed is not None
        except FileNotFoundError:
            return listed is None

    def freshness(self, partition: Partition) -> Freshness:
        """Return whether a partition needs work; raises only if the store does not answer."""
        return self._freshness(partition.key, partition.source_version)

    def derived_freshness(self, parent: PublishedFile) -> Freshness:
        """Return whether the file derived from this one names its rows and its source version."""
        facts = parent.facts
        return self._freshness(facts.partition_key, facts.source_version, facts.rows_version)

    def refuse(self, file: PublishedFile, reason: str) -> None:
        """Treat a file as invalid that was read in full and does not hold what it states, until it
        is replaced."""
        stored = file.stored
        refused = InvalidFile(reason)
        self._known[stored.name] = refused
        self._memory.remember(stored.name, (stored.size, stored.etag), refused)

    def _freshness(
        self, key: str, source_version: str, rows_version: str | None = None
    ) -> Freshness:
        if not self._listed:  # as when a catalog is embedded for the first time
            return Freshness("missing")
        try:
            name = file_name(self.space, key)
        except ValueError:  # such a key has no file; the reader refuses it
            return Freshness("missing")
        if self._is_unread(name):
            self._keep(name, _read(self.store, name))
        file = self._known.get(name)
        if isinstance(file, TransientError):
            reason = (
                f"partition {key!r}: it is unknown whether its file is up to date, so it was left "
                f"alone. {file}"
            )
            return Freshness("unread", error=TransientError(reason, key))
        if isinstance(file, InvalidFile):
            return Freshness("missing", invalid=file)
        if not isinstance(file, PublishedFile):
            return Freshness("missing")
        status = status_of(file.facts, self.space, key, source_version, rows_version)
        if status == "missing":
            return Freshness("missing")
        return Freshness(status, file)

    def _names(self, keys: Iterable[str]) -> list[str]:
        names: list[str] = []
        for key in keys:
            with contextlib.suppress(ValueError):  # the reader refuses such a key
                names.append(file_name(self.space, key))
        return names

    @without_collector()
    def _read_all(self, names: Iterable[str]) -> None:
        unread = [name for name in names if self._is_unread(name)]
        for name, answer in zip(unread, self.store.reads_ahead(unread, _read), strict=True):
            self._keep(name, answer)

    def _is_unread(self, name: str) -> bool:
        return name in self._listed and name not in self._known

    def _keep(self, name: str, answer: Found | TransientError) -> None:
        self._known[name] = answer
        if isinstance(answer, TransientError):
            return
        # A file may have been replaced since it was listed.
        stored = answer.stored if isinstance(answer, PublishedFile) else self._listed[name]
        if self.store.is_settled(stored, self._seen_ns):
            self._memory.remember(name, (stored.size, stored.etag), answer)


def _read(store: Store, name: str) -> Found | TransientError:
    """Return the file, or why it cannot be used; raises only `StoreUnavailable`."""
    try:
        return read_published_file(store, name)
    except StoreUnavailable:
        raise
    except (InvalidFile, FileNotFoundError, TransientError) as error:
        error.__cause__ = None  # it may be kept for long, and frames with it
        error.__context__ = None
        return error.with_traceback(None)
