"""Partitions whose rows were grouped by their key, from files or from a frame."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pyarrow as pa

from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.sources.partition import Partition, RowBatch
from surge_dagster.engine.sources.selection import Selection
from surge_dagster.engine.tables.grouping import Group, GroupedRows
from surge_dagster.engine.tables.table import NO_KEY, without_key

_READ_BYTES = 8 * 1024 * 1024  # of reading a partition, in addition to its rows


def grouped_partition(
    group: Group,
    open_rows: Callable[[], GroupedRows],
    selection: Selection,
    partition_by: Sequence[str],
    current_version: Callable[[str], str | None],
    shown: Callable[[int], str],
) -> Partition:
    """Return the partition of one key; one without a key is refused when it is read.

    Args:
        current_version: returns the version that a partition of this version has now.
        shown: returns a row of the table for messages.
    """

    def refuse() -> Iterator[RowBatch]:
        raise without_key(group.key, group.rows, partition_by, shown(group.first_row))

    version = group.digest + selection.version_suffix
    return Partition(
        key=group.key,
        source_version=version,
        read=refuse if group.key == NO_KEY else partial(_read, group, open_rows, selection, shown),
        current_source_version=partial(current_version, version),
        rows=group.rows,
        text_bytes=group.value_bytes,
        page_bytes=_READ_BYTES,
    )


def _read(
    group: Group,
    open_rows: Callable[[], GroupedRows],
    selection: Selection,
    shown: Callable[[int], str],
) -> Iterator[RowBatch]:
    grouped = open_rows()
    if grouped.groups.get(group.key) != group:
        raise TransientError(
            f"partition {group.key!r}: its rows are not those that were listed. Run again.",
            group.key,
        )
    first_row = 0
    for columns, table_rows in grouped.read(group.key):
        place = partial(_place, shown, table_rows, first_row)
        yield from selection.rows(group.key, [columns], first_row, place)
        first_row += len(columns)


def _place(shown: Callable[[int], str], table_rows: pa.Array, first_row: int, row: int) -> str:
    return shown(table_rows[row - first_row].as_py())
