"""What lies in the output already, told from the files alone: no transaction log, nothing that can disagree with them.

One listing says which files exist; the footer of each says from which source version it was made. Footers are kept by
name, size and etag for as long as the process lives, so that looking again costs one listing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pyarrow.parquet as pq

from surge_dagster.engine.catalog import Partition, encode_key
from surge_dagster.engine.output.embedding_file import FileFacts, InvalidFile, read_facts
from surge_dagster.engine.output.footer_end import END_BYTES, facts_at_end
from surge_dagster.engine.output.store import Store, StoredObject
from surge_dagster.engine.unreadable import UNREADABLE, first_line

Status = Literal["fresh", "stale", "missing", "foreign"]
SUFFIX = ".parquet"


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """A valid embedding file and where it lies."""

    stored: StoredObject
    facts: FileFacts


_known: dict[tuple[str, StoredObject], FileFacts | str] = {}


def file_name(space: str, key: str) -> str:
    """The name of a partition's output file within the store."""
    return f"{space}/{encode_key(key)}{SUFFIX}"


def read_file_facts(store: Store, name: str) -> FileFacts:
    """What one file says of itself, from one read of its end where that is enough.

    Raises:
        InvalidFile: it is not a complete embedding file.
        FileNotFoundError: there is none.
    """
    try:
        with store.open(name) as source:
            size = source.size()
            facts = facts_at_end(source.read_at(min(size, END_BYTES), max(0, size - END_BYTES)))
    except FileNotFoundError:
        raise
    except UNREADABLE as error:
        raise InvalidFile(f"its end cannot be read ({first_line(error)})") from error
    return read_facts(read_footer(store, name)) if facts is None else facts


def read_footer(store: Store, name: str) -> pq.FileMetaData:
    """Read one file's footer; whether it is that of an embedding file, `read_facts` tells.

    Raises:
        InvalidFile: it is not a complete Parquet file.
        FileNotFoundError: there is none.
    """
    try:
        with store.open(name) as source:
            return pq.read_metadata(source)
    except FileNotFoundError:
        raise
    except UNREADABLE as error:
        raise InvalidFile(f"its footer cannot be read ({first_line(error)})") from error


class OutputState:
    """The files of one space, as they were when this was made or last refreshed.

    Args:
        store: the output.
        space: name of the space; its folder need not exist.
    """

    def __init__(self, store: Store, space: str) -> None:
        self.store = store
        self.space = space
        self._listed: dict[str, StoredObject] = {}
        self.refresh()

    def refresh(self) -> None:
        """List the space's folder again."""
        self._listed = {stored.name: stored for stored in self.store.list(self.space) if stored.name.endswith(SUFFIX)}
        for url, stored in list(_known):  # a copy: other threads look at other outputs
            is_ours = url == self.store.url and stored.name.startswith(f"{self.space}/")
            if is_ours and self._listed.get(stored.name) != stored:
                _known.pop((url, stored), None)

    def names(self) -> list[str]:
        """Names of all files listed, valid or not, sorted."""
        return sorted(self._listed)

    def file(self, key: str) -> PublishedFile | None:
        """The valid file in the partition's place: its own, or one of another space (`foreign`); else None."""
        stored = self._listed.get(file_name(self.space, key))
        facts = self._facts(stored) if stored else None
        if stored is None or facts is None or (facts.space == self.space and facts.partition_key != key):
            return None
        return PublishedFile(stored, facts)

    def facts(self, key: str) -> FileFacts | None:
        """What the partition's file says of itself; None when there is no valid one of this space."""
        found = self.file(key)
        return found.facts if found and found.facts.space == self.space else None

    def status(self, partition: Partition) -> Status:
        """Whether a partition needs work: `fresh` alone does not, and `foreign` needs a person."""
        found = self.file(partition.key)
        if found is None:
            return "missing"
        if found.facts.space != self.space:
            return "foreign"
        return "fresh" if found.facts.source_version == partition.source_version else "stale"

    def _facts(self, stored: StoredObject) -> FileFacts | None:
        known = _known.get((self.store.url, stored))
        if known is None:
            try:
                known = read_file_facts(self.store, stored.name)
            except (InvalidFile, FileNotFoundError) as error:
                known = str(error)
            _known[(self.store.url, stored)] = known
        return known if isinstance(known, FileFacts) else None
