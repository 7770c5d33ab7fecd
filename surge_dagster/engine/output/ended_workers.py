"""Rows whose texts ended workers, which are left out of what is read.

A worker that dies is replaced, and its portion is encoded again. If that ends workers again, it is
cut smaller until one text is found (`encoder/quarantine.py`). The publisher then knows which row of
which partition it is (`run/publication.py`). With `bad_rows: refuse` the partition fails and names
the row. With `set_aside` it is read again at the end of the run without that row
(`run/read_again.py`), which is listed with the others that were set aside (`rejected.py`): as
transient if the machine killed the worker, and the next run tries it again; otherwise as invalid,
and runs and `verify` leave it out until the source changes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from surge_dagster.engine.sources.bad_rows import id_text
from surge_dagster.engine.sources.partition import Partition, RejectedRow, RowBatch


@dataclass(frozen=True, slots=True)
class EndedWorkers:
    """Rows whose texts ended workers, and which are left out of what is read.

    Attributes:
        rows: by their ids as lists have them.
    """

    rows: Mapping[str, RejectedRow]

    def split(self, batch: RowBatch, first_row: int = 0) -> tuple[RowBatch, list[RejectedRow]]:
        """Return a batch without these rows, and the rows with their present places.

        Args:
            first_row: how many rows of the source come before the batch.
        """
        if not self.rows:
            return batch, []
        ids = [id_text(value) for value in batch.ids.to_pylist()]
        left_out = [place for place, value in enumerate(ids) if value in self.rows]
        if not left_out:
            return batch, []

        numbers = batch.row_numbers(first_row)
        rows: list[RejectedRow] = []
        for place in left_out:
            known = self.rows[ids[place]]
            shown = batch.place(place) if batch.place is not None else known.place
            rows.append(replace(known, row=int(numbers[place]), place=shown))
        return _without(batch, left_out), rows

    def without(self, partition: Partition) -> Partition:
        """Return a partition as it reads without these rows."""
        if not self.rows:
            return partition

        def read() -> Iterator[RowBatch]:
            for batch in partition.read():
                yield self.split(batch)[0]

        return replace(partition, read=read, rows=None, read_range=None)


NONE_ENDED_WORKERS = EndedWorkers({})


def ended_workers_in(listed: pa.Table) -> EndedWorkers:
    """Return the rows of a partition's list whose texts ended workers."""
    rows = listed.filter(listed.column("ended_worker")).to_pylist()
    return EndedWorkers({row["id"]: RejectedRow(**row) for row in rows})


def _without(batch: RowBatch, left_out: Collection[int]) -> RowBatch:
    kept = np.setdiff1d(np.arange(len(batch)), list(left_out))
    rows = pa.array(kept)
    place = batch.place
    carried = batch.carried
    return RowBatch(
        batch.ids.take(rows),
        batch.texts.take(rows),  # pyright: ignore[reportArgumentType]
        batch.skipped,
        None if carried is None else carried.take(rows),
        None if place is None else lambda row: place(int(kept[row])),
        rejected=batch.rejected,
        numbers=None if batch.numbers is None else batch.numbers[kept],
    )
