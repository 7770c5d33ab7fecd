"""Batches of a few megabytes, of rows of any length."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pyarrow as pa

from surge_dagster.engine.sources.casting import plain_column
from surge_dagster.engine.support.values import value_lengths

BATCH_BYTES = 2 * 1024 * 1024
BATCH_ROWS = 8192


def small(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield a batch without dictionaries, in pieces of at most 8,192 rows and two megabytes."""
    is_large = len(batch) > BATCH_ROWS or sum(map(_decoded_bytes, batch.columns)) > BATCH_BYTES
    if is_large and len(batch) > 1:
        middle = len(batch) // 2
        yield from small(batch.slice(0, middle))
        yield from small(batch.slice(middle))
    elif len(batch):
        plain = [plain_column(column) for column in batch.columns]
        yield pa.RecordBatch.from_arrays(plain, batch.schema.names)


def _decoded_bytes(column: pa.Array) -> int:
    """Return the bytes of a column without its dictionary, whose values many rows may share."""
    if not isinstance(column, pa.DictionaryArray):
        return column.nbytes
    try:
        lengths = value_lengths(column.dictionary.cast(pa.large_binary()))
    except pa.ArrowNotImplementedError:  # neither strings nor bytes
        return column.indices.nbytes
    if not len(lengths):
        return 0
    # An index beyond the dictionary is found when the column is decoded.
    return int(lengths.take(column.indices.fill_null(0).to_numpy(), mode="clip").sum())


def together(
    batches: Iterable[pa.RecordBatch], most_bytes: int = BATCH_BYTES, most_rows: int = BATCH_ROWS
) -> Iterator[pa.RecordBatch]:
    """Join consecutive batches, up to these bytes and rows."""
    pending: list[pa.RecordBatch] = []
    size = 0
    rows = 0
    for batch in batches:
        size += batch.nbytes
        rows += len(batch)
        if pending and (size > most_bytes or rows > most_rows):
            yield pa.concat_batches(pending)
            pending = []
            size = batch.nbytes
            rows = len(batch)
        pending.append(batch)
    if pending:
        yield pa.concat_batches(pending)
