"""Change files: which rows differ between two versions of a partition's file.

    .changes/<space>/rows/<Unix seconds>-<version before>-<version after>-<ids>.parquet

A change file has the ids of the rows that were added, changed or deleted. The rows themselves are
in the partition's own file. A change file is written before the file that it leads to; a run that
dies between the two leaves one that nobody follows.

Versions are random (`FileFacts.rows_version`), so that names are enough to follow a partition's
history. If a change file is missing or damaged, a reader gives the whole partition.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from surge_dagster.engine.errors import Cancelled, SurgeError
from surge_dagster.engine.feed.confirmations import CHANGES, has_consumers
from surge_dagster.engine.feed.row_comparison import RowChanges, RowComparison
from surge_dagster.engine.files.facts import FileFacts, InvalidFile, explained
from surge_dagster.engine.files.parquet import OutputFile
from surge_dagster.engine.store.store import Store

log = logging.getLogger(__name__)

DEFAULT_KEEP_DAYS = 7.0
# Ids that a reader keeps in memory. If more rows changed, no file is written, and consumers get the
# whole partition.
MOST_IDS = 1_000_000
_NAME = re.compile(r"(\d{1,12})-([0-9a-f]{32})-([0-9a-f]{32})-(\d{1,7})\.parquet")
_DAY_SECONDS = 24 * 60 * 60


@dataclass(frozen=True, slots=True)
class ChangeFile:
    name: str
    before: str
    after: str
    ids: int
    written_at: int  # Unix seconds


class ChangeFeed:
    """Writes the change files of one run, as its observer, and removes old ones.

    Args:
        always: write them even if no consumer is registered in the output.
        keep_days: how long they are kept.
    """

    def __init__(self, *, always: bool = False, keep_days: float = DEFAULT_KEEP_DAYS) -> None:
        self._always = always
        self._keep_days = keep_days
        self._output: tuple[Store, str] | None = None
        self._include_text = True

    def begin(self, store: Store, space: str, *, include_text: bool) -> bool:
        """Begin to watch a run; return whether a consumer wants its changes."""
        store.sweep(f"{CHANGES}/{space}")
        self._output = store, space
        self._include_text = include_text
        return self._always or has_consumers(store, space)

    def follow(self, old_file: OutputFile, reserve: Callable[[int], bool]) -> RowComparison:
        return RowComparison(old_file, reserve, include_text=self._include_text)

    def publishing(self, facts: FileFacts, rows: RowChanges, ids: Sequence[pa.Array]) -> None:
        """Write how a partition differs from the file that it is about to replace."""
        assert self._output is not None
        store, space = self._output
        columns = [*ids, rows.deleted]
        count = sum(map(len, columns))
        if count > MOST_IDS:
            return
        table = pa.table({"id": pa.chunked_array(columns, rows.deleted.type)})
        versions = f"{rows.previous_rows_version}-{facts.rows_version}"
        _write(store, f"{_folder(space)}/{int(time.time())}-{versions}-{count}.parquet", table)

    def end(self) -> None:
        """Remove the change files that are too old.

        They do no harm: if they cannot be removed, the next run tries again.
        """
        assert self._output is not None
        store, space = self._output
        oldest = time.time() - self._keep_days * _DAY_SECONDS
        try:
            for file in ChangeFiles(store, space):
                if file.written_at < oldest:
                    store.delete(file.name)
        except (SurgeError, OSError, Cancelled) as error:
            log.warning("old change files of %s could not be removed: %s", space, error)


class ChangeFiles:
    """The change files of a space, as one listing shows them."""

    def __init__(self, store: Store, space: str) -> None:
        self._store = store
        self._by_after: dict[str, ChangeFile] = {}
        folder = _folder(space)
        for stored in store.list(folder):
            match = _NAME.fullmatch(stored.name.removeprefix(f"{folder}/"))
            if match is not None:
                written_at, before, after, ids = match.groups()
                self._by_after[after] = ChangeFile(
                    stored.name, before, after, int(ids), int(written_at)
                )

    def __iter__(self) -> Iterator[ChangeFile]:
        return iter(self._by_after.values())

    def chain(self, before: str, after: str) -> list[ChangeFile] | None:
        """Return the files that lead from one version of a partition's rows to a later one.

        They are in order; None if one is missing.
        """
        chain: list[ChangeFile] = []
        while after != before:
            last = self._by_after.get(after)
            if last is None or len(chain) > len(self._by_after):
                return None
            chain.append(last)
            after = last.before
        return chain[::-1]

    def read(self, file: ChangeFile) -> pa.ChunkedArray:
        """Return the ids of a change file."""
        with self._store.open(file.name) as source, explained(self._store.location(file.name)):
            reader = pq.ParquetFile(source, page_checksum_verification=True)
            ids = reader.read(use_threads=False).column(0)
        # Pages have checksums, and the footer that counts the rows has none.
        if len(ids) != file.ids:
            raise InvalidFile(f"it has {len(ids):,} ids; expected {file.ids:,}")
        return ids


def _write(store: Store, name: str, table: pa.Table) -> None:
    """Write a small Parquet file whose pages have checksums."""
    with store.create(name) as upload:
        pq.write_table(
            table,
            upload.sink,
            compression="zstd",
            write_statistics=False,
            store_schema=False,
            write_page_checksum=True,
        )
        upload.publish(lambda: None)


def _folder(space: str) -> str:
    return f"{CHANGES}/{space}/rows"
