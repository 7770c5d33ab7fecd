"""Batches of a few megabytes, of rows of any length, and the selection of their columns.

`doc.title` is the field `title` of the struct `doc`, unless a column has that name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import pyarrow as pa

from surge_dagster.engine.sources.casting import plain_column
from surge_dagster.engine.support.values import value_lengths

BATCH_BYTES = 2 * 1024 * 1024
BATCH_ROWS = 8192


def small(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield a batch without dictionaries, in pieces of at most 8,192 rows and two megabytes."""
    is_large = len(batch) > 1 and (
        len(batch) > BATCH_ROWS or sum(map(_decoded_bytes, batch.columns)) > BATCH_BYTES
    )
    if is_large:
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
    if len(pending) == 1:
        yield pending[0]
    elif pending:
        yield pa.concat_batches(pending)


def names_with_fields(fields: Iterable[pa.Field]) -> list[str]:
    """Return the names of columns, then those of the fields inside of them."""
    names: list[str] = []
    inner: dict[str, None] = {}
    for field in fields:
        names.append(field.name)
        if pa.types.is_struct(field.type):
            for name in names_with_fields(field.type.fields):
                inner[f"{field.name}.{name}"] = None
    return [*names, *(name for name in inner if name not in names)]


def column_problem(
    names: Sequence[str], columns: Sequence[str], settings: str
) -> tuple[str, str] | None:
    """Return what is wrong, as the end of a sentence, and the remedy, if these names do not have
    each wanted column exactly once."""
    for name in columns:
        if name not in names:
            known = ", ".join(map(repr, names))
            reason = f"has no column {name!r}; its columns are {known}"
            return reason, f"Name the right ones with the settings {settings}."
        if names.count(name) > 1:
            return f"has two columns {name!r}", "Rename one of them."
    return None


def outer_columns(names: Sequence[str], columns: Sequence[str]) -> list[str]:
    """Return which of these names are wanted columns, or may have them inside."""
    fields = tuple(column for column in columns if column not in names)

    def is_needed(name: str) -> bool:
        return name in columns or any(field.startswith(f"{name}.") for field in fields)

    return [name for name in names if is_needed(name)]


def select(batch: pa.RecordBatch, columns: Sequence[str]) -> pa.RecordBatch:
    """Return a batch of only these columns, in this order, each as a column of its own."""
    arrays = dict(zip(batch.schema.names, batch.columns, strict=True))
    return pa.RecordBatch.from_arrays([_inside(arrays, name) for name in columns], list(columns))


def without_rows(schema: pa.Schema, columns: Sequence[str]) -> pa.RecordBatch:
    """Return a batch of these columns of a file or frame that has no rows."""
    outer = outer_columns(schema.names, columns)
    arrays = [pa.nulls(0, schema.field(name).type) for name in outer]
    return select(pa.RecordBatch.from_arrays(arrays, outer), columns)


def _inside(arrays: Mapping[str, pa.Array], name: str) -> pa.Array | None:
    if name in arrays:
        return arrays[name]
    for outer, column in arrays.items():
        if name.startswith(f"{outer}.") and isinstance(column, pa.StructArray):
            fields = zip(
                (field.name for field in column.type.fields), column.flatten(), strict=True
            )
            if (found := _inside(dict(fields), name[len(outer) + 1 :])) is not None:
                return found
    return None
