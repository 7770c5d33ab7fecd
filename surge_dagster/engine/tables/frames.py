"""Frames as partitions: polars, pyarrow, pandas, Hugging Face datasets, Delta tables.

A mapping of keys to frames has one partition for each frame, which a function may open when it is
read. One frame is divided by the values of its columns, and its rows are grouped on the disk of the
cache. The version of a partition is the digest of its rows, as in a table of files, and finding it
reads every row once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Unpack

import pyarrow as pa

from surge_dagster.engine.errors import ConfigError, DataError, SurgeError, TransientError
from surge_dagster.engine.sources.batching import (
    BATCH_ROWS,
    column_problem,
    names_with_fields,
    outer_columns,
    select,
    small,
    without_rows,
)
from surge_dagster.engine.sources.casting import canonical_type, plain_column
from surge_dagster.engine.sources.checked_rows import checked_rows
from surge_dagster.engine.sources.partition import Partition, RowBatch, row_in_words
from surge_dagster.engine.sources.selection import ColumnSettings, Selection, column_names, selected
from surge_dagster.engine.support.printable import first_line
from surge_dagster.engine.tables.delta_dataset import delta_dataset
from surge_dagster.engine.tables.grouping import Block, Gathered, GroupedRows, grouped_partitions
from surge_dagster.engine.tables.table import key_strings, keys_of

# See `_TAKES`; also any other object with `__arrow_c_stream__` that can be read again.
Frame = Any
_Open = Callable[[], Iterator[pa.RecordBatch]]
_TAKES = (
    "a polars, pyarrow or pandas frame, a Hugging Face dataset, a Delta table, or a function that "
    "opens one"
)


class FrameCatalog:
    """Frames by key as a `Source`.

    Args:
        frames: by partition key; a function is called whenever its partition is read.
        versions: source versions by key. Without them a listing reads all rows for digests.
        current_version: returns the version that a key has now; None if the key was removed.
        url: names the frames in messages.
        columns: as in the settings, `id="sku", text="{title}"`.
    """

    def __init__(
        self,
        frames: Mapping[str, Frame | Callable[[], Frame]],
        selection: Selection | None = None,
        *,
        versions: Mapping[str, str] | None = None,
        current_version: Callable[[str], str | None] | None = None,
        url: str = "frames",
        **columns: Unpack[ColumnSettings],
    ) -> None:
        self.url = url
        self.selection = selected(selection, columns)
        for key in frames:
            if not (isinstance(key, str) and key):
                raise ConfigError(
                    f"{url}: the key of a partition must be a non-empty string, not {key!r}."
                )
        self._frames = frames
        self._versions = versions
        self._current_version = current_version

    def __iter__(self) -> Iterator[Partition]:
        suffix = self.selection.version_suffix
        for key, frame in self._frames.items():
            batches = partial(_batches, key, frame, self.selection.columns)
            read = partial(_read, key, batches, self.selection)
            if self._versions is None:
                yield _listed(key, batches, read, self.selection)
                continue
            version = self._versions[key] + suffix
            current: Callable[[], str | None] = partial(str, version)
            if self._current_version is not None:
                current = partial(_current, self._current_version, key, suffix)
            yield Partition(key, version, read, current, id_bytes=self.selection.id_bytes)


class FrameTable:
    """One frame, divided by the values of some of its columns, as a `Source`.

    For example `FrameTable(frame, "category", id="sku", text="{title}")`. Partitions come in the
    order of their encoded keys, and the rows of each in the frame's order. The grouped rows take
    room on the disk until the last partition is gone.
    """

    def __init__(
        self,
        frame: Frame,
        partition_by: str | Sequence[str],
        selection: Selection | None = None,
        *,
        url: str = "frame",
        **columns: Unpack[ColumnSettings],
    ) -> None:
        self.url = url
        self.selection = selected(selection, columns)
        self._partition_by = column_names(partition_by)
        self._rows = GroupedRows(frame_blocks(url, frame, self._partition_by, self.selection))

    def __iter__(self) -> Iterator[Partition]:
        rows = self._rows
        groups = list(rows.groups.values())
        yield from grouped_partitions(
            groups, lambda: rows, self.selection, self._partition_by, str, row_in_words
        )


def frame_blocks(
    url: str, frame: Frame, partition_by: Sequence[str], selection: Selection
) -> Iterator[Block]:
    """Yield all rows with their keys, of the selected columns only."""
    columns = list(dict.fromkeys((*partition_by, *selection.columns)))
    first_row = 0
    try:
        for batch in _batches(url, frame, columns, "id, text, columns and partition_by"):
            named = [(name, key_strings(url, name, batch.column(name))) for name in partition_by]
            keys, places = keys_of(named)
            yield Block(first_row, batch.select(selection.columns), keys, places)
            first_row += len(batch)
    except DataError as error:
        raise ConfigError(f"{url}: {error.reason}. {error.remedy}") from error


def _read(key: str, batches: _Open, selection: Selection) -> Iterator[RowBatch]:
    return checked_rows(selection, key, batches())


def _listed(
    key: str, batches: _Open, read: Callable[[], Iterator[RowBatch]], selection: Selection
) -> Partition:
    """Return a partition whose version is the digest of its rows; reading it raises why there is
    none."""
    gathered = Gathered(key)
    try:
        for batch in batches():
            gathered.add(batch)
    except (DataError, TransientError):
        version = f"refused{selection.version_suffix}"
        return Partition(key, version, read, partial(str, version))
    group = gathered.group()
    version = group.digest + selection.version_suffix
    return Partition(
        key,
        version,
        read,
        partial(str, version),
        rows=group.rows,
        text_bytes=group.value_bytes,
        id_bytes=selection.id_bytes,
    )


def _current(look: Callable[[str], str | None], key: str, suffix: str) -> str | None:
    version = look(key)
    return None if version is None else version + suffix


def _batches(
    key: str,
    frame: Frame | Callable[[], Frame],
    columns: Sequence[str],
    settings: str = "id, text and columns",
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a frame in its order, of these columns only, a few megabytes at a time."""
    try:
        yield from _batches_of(key, frame, columns, settings)
    except (SurgeError, MemoryError):
        raise
    except OSError as error:
        reason = f"its frame could not be read ({first_line(error)})"
        message = f"partition {key!r}: {reason}. Open it again, then run again."
        raise TransientError(message, key) from error
    except Exception as error:  # whatever a library or the user's function raises
        raise DataError(
            key,
            f"its frame could not be computed ({type(error).__name__}: {first_line(error)})",
            "Correct the function or the expressions that make it, then run again.",
        ) from error


def _batches_of(
    key: str, frame: Frame | Callable[[], Frame], columns: Sequence[str], settings: str
) -> Iterator[pa.RecordBatch]:
    opened: Any = frame
    if not _is_frame(frame) and callable(frame):
        opened = frame()
    if hasattr(opened, "to_pyarrow_dataset"):
        opened = delta_dataset(key, opened)
    schema = _schema(key, opened)
    problem = column_problem(names_with_fields(schema), columns, settings)
    if problem is not None:
        reason, remedy = problem
        raise DataError(key, f"the {_kind(opened)} {reason}", remedy)
    outer = outer_columns(schema.names, columns)
    is_empty = True
    for batch in _open(opened, outer):
        for piece in _pieces(select(batch, columns)):
            yield piece
            is_empty = False
    if is_empty:
        none = without_rows(schema, columns)
        arrays = [_canonical(plain_column(column)) for column in none.columns]
        yield pa.RecordBatch.from_arrays(arrays, list(columns))


def _is_frame(frame: Any) -> bool:
    ways = ["__arrow_c_stream__", "collect_batches", "to_batches", "with_format"]
    ways.append("to_pyarrow_dataset")
    # A DatasetDict has such a way too.
    return not isinstance(frame, dict) and any(hasattr(frame, way) for way in ways)


def _schema(key: str, frame: Any) -> pa.Schema:
    """Return the columns of a frame, without reading rows."""
    problem = ""
    if isinstance(frame, pa.RecordBatchReader):
        problem = "which can be read only once"
    elif not _is_frame(frame):
        problem = "which is not a frame"
    if problem:
        raise DataError(key, f"its rows are a {_kind(frame)}, {problem}", f"Give {_TAKES}.")

    if hasattr(frame, "collect_schema"):  # polars
        return pa.RecordBatchReader.from_stream(frame.collect_schema().to_frame()).schema
    if hasattr(frame, "with_format"):  # Hugging Face
        if frame.features is not None:
            return frame.features.arrow_schema
        # A stream may not know its columns before it is read.
        first = next(frame.with_format("arrow").iter(batch_size=BATCH_ROWS), pa.table({}))
        return first.schema
    if isinstance(getattr(frame, "schema", None), pa.Schema):
        return frame.schema
    return pa.RecordBatchReader.from_stream(frame).schema


def _open(frame: Any, columns: list[str]) -> Iterator[pa.RecordBatch]:
    if hasattr(frame, "collect_batches"):  # polars, lazy
        frames = frame.select(columns).collect_batches(
            chunk_size=BATCH_ROWS, maintain_order=True, lazy=True
        )
        return (batch for each in frames for batch in pa.RecordBatchReader.from_stream(each))
    if hasattr(frame, "with_format"):  # Hugging Face
        if (getattr(frame, "format", None) or {}).get("type") == "custom":
            raise ValueError("it has a transform, which Arrow rows do not get: use map() instead")
        tables = frame.select_columns(columns).with_format("arrow").iter(BATCH_ROWS)
        return (batch for table in tables for batch in table.to_batches())
    if not hasattr(frame, "__arrow_c_stream__"):  # a dataset of pyarrow
        return frame.to_batches(
            columns=columns, batch_size=BATCH_ROWS, batch_readahead=1, fragment_readahead=1
        )
    if hasattr(frame, "collect_schema"):
        frame = frame.select(columns)
    return iter(pa.RecordBatchReader.from_stream(frame))


def _kind(frame: Any) -> str:
    return f"{type(frame).__module__.partition('.')[0]} {type(frame).__name__}"


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield a batch in pieces of a few megabytes, in types that do not depend on the library."""
    for rows in small(batch):
        columns = [_canonical(column) for column in rows.columns]
        yield pa.RecordBatch.from_arrays(columns, rows.schema.names)


def _canonical(column: pa.Array) -> pa.Array:
    return column.cast(canonical_type(column.type))
