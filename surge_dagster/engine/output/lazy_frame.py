"""A polars LazyFrame over embedding files, read through pyarrow so that checksums are checked.

Files are read one after the other, a batch at a time, so a query that reduces what it reads needs the memory of its
result and of a batch. Columns that a query does not need are not read, nor are the files that a filter on the partition
alone rules out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import polars as pl
import pyarrow as pa
from polars.io.plugins import register_io_source

from surge_dagster.engine.errors import DataError
from surge_dagster.engine.files.facts import InvalidFile
from surge_dagster.engine.files.formats import PublishedFile, format_of, open_output_file
from surge_dagster.engine.output.freshness import replaced
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.unreadable import UNREADABLE, first_line, is_systems, not_given

_BATCH_ROWS = 16_384


def scan(store: Store, files: Sequence[PublishedFile], schema: pa.Schema) -> pl.LazyFrame:
    """The rows of `files`, in their order.

    Args:
        schema: of the rows: partition, id, perhaps text, embedding.
    """
    types = pl.DataFrame(pl.from_arrow(schema.empty_table())).schema

    def read(
        columns: list[str] | None, predicate: pl.Expr | None, limit: int | None, batch_rows: int | None
    ) -> Iterator[pl.DataFrame]:
        # Without any column a frame would not say how many rows it has.
        names = schema.names if columns is None else columns or schema.names[:1]
        wanted = pa.schema([schema.field(name) for name in names])
        rows = min(_BATCH_ROWS, batch_rows or _BATCH_ROWS, limit or _BATCH_ROWS)
        batches = _batches(store, _remaining(files, predicate if limit is None else None), wanted, rows)
        for table in _tables(batches, rows):
            frame = pl.DataFrame(pl.from_arrow(table))
            if limit is not None:  # rows are counted before they are filtered
                frame = frame.head(limit)
                limit -= frame.height
            frame = frame if predicate is None else frame.filter(predicate)
            yield frame if columns is None else frame.select(columns)
            if limit == 0:
                return

    return register_io_source(read, schema=types, explain_name="surge-dagster embeddings")


def _tables(batches: Iterable[pa.RecordBatch], rows: int) -> Iterator[pa.Table]:
    """Batches put together to `rows` or more: thousands of small partitions shall not be thousands of frames."""
    held: list[pa.RecordBatch] = []
    for batch in batches:
        held.append(batch)
        if sum(map(len, held)) >= rows:
            yield pa.Table.from_batches(held)
            held = []
    if held:
        yield pa.Table.from_batches(held)


def _remaining(files: Sequence[PublishedFile], predicate: pl.Expr | None) -> Iterator[PublishedFile]:
    """The files that a predicate on the partition leaves; all of them when it looks at other columns too."""
    if predicate is None or set(predicate.meta.root_names()) != {"partition"}:
        yield from files
        return
    keys = pl.DataFrame({"partition": [file.facts.partition_key for file in files]}, {"partition": pl.String})
    kept = set(keys.filter(predicate)["partition"])
    yield from (file for file in files if file.facts.partition_key in kept)


def _batches(store: Store, files: Iterable[PublishedFile], wanted: pa.Schema, rows: int) -> Iterator[pa.RecordBatch]:
    for file in files:
        key, location = file.facts.partition_key, store.location(file.stored.name)
        try:
            with (
                store.open(file.stored.name, file.stored) as source,
                open_output_file(source, format_of(file.stored.name) or "parquet", mapped=True) as reader,
            ):
                if reader.facts != file.facts:  # a store may give one tag to two contents
                    raise replaced(location, key)
                columns = [name for name in reader.columns.names if name in wanted.names]
                for batch in reader.read(columns=columns or ["id"], batch_rows=rows):
                    yield _complete(batch, key, wanted)
        except FileNotFoundError as error:
            raise replaced(location, key) from error
        except (InvalidFile, *UNREADABLE) as error:
            if is_systems(error):
                raise not_given(repr(location), error, key) from error
            raise DataError(
                key, f"{location!r} is damaged: {first_line(error)}", "Remove it and embed the partition again."
            ) from error


def _complete(batch: pa.RecordBatch, key: str, wanted: pa.Schema) -> pa.RecordBatch:
    """A batch with the columns that its file does not have: the partition, and null for texts."""
    columns = []
    for field in wanted:
        if field.name in batch.schema.names:
            columns.append(batch.column(field.name))
        elif field.name == "partition":
            columns.append(pa.repeat(pa.scalar(key, field.type), len(batch)))
        else:
            columns.append(pa.nulls(len(batch), field.type))
    return pa.RecordBatch.from_arrays(columns, schema=wanted)
