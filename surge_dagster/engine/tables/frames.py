"""Frames as partitions: polars, pyarrow, pandas, Hugging Face datasets, Delta tables, whatever
gives Arrow batches.

A mapping of keys to frames has one partition for each, which a function may open when it is read;
one frame is divided by the values of its columns. In a frame that lies in memory a partition is a
list of row numbers, eight bytes each; the rows of a lazy one are grouped on the disk. The version
of a partition is the digest of its rows, as in a table of files, so that a frame that was made anew
makes stale only what differs; finding it reads every row once.
"""

from __future__ import annotations

import hashlib
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import pyarrow as pa

from surge_dagster.engine.errors import ConfigError, DataError, SurgeError, TransientError
from surge_dagster.engine.sources.nested import names_with_fields, outer_columns, select
from surge_dagster.engine.sources.partition import Partition, Place, RowBatch, row_in_words
from surge_dagster.engine.sources.rows import canonical_type, small, without_dictionary
from surge_dagster.engine.sources.selection import Selection
from surge_dagster.engine.support import disk_cache
from surge_dagster.engine.support.unreadable import first_line
from surge_dagster.engine.tables.column_settings import ColumnSettings, column_names, selected
from surge_dagster.engine.tables.grouping import (
    Block,
    Gathered,
    Group,
    codes_of_rows,
    grouped,
    open_groups,
    rows_of,
)
from surge_dagster.engine.tables.table_rows import NO_KEY, NO_KEY_NAME, keys_of, without_key

# A polars or pandas DataFrame or LazyFrame, a pyarrow Table or Dataset, a Hugging Face dataset, a
# Delta table, or any other object with `__arrow_c_stream__` that can be read again.
Frame = Any
_Open = Callable[[], Iterator[pa.RecordBatch]]
_BATCH_ROWS = 8192
_TAKES = "a polars, pyarrow or pandas frame, a Hugging Face dataset, a Delta table, or a function that opens one"


class FrameCatalog:
    """Frames by key as a `Source`.

    Args:
        frames: by partition key; a function is called each time when its partition is read.
        versions: source versions by key. Without, the digest of each frame's rows, for which a
            listing reads all.
        current_version: looks the version of a key up again; None where the key is no longer there.
        url: the frames in messages.
        columns: what is taken of their columns, as in the settings: `id="sku", text="{title}"`.
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
        self.url, self.selection = url, selected(selection, columns)
        if wrong := [key for key in frames if not (isinstance(key, str) and key)]:
            raise ConfigError(
                f"{url}: the key of a partition is a string that is not empty, not {wrong[0]!r}."
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
                yield _listed(key, batches, read, suffix)
                continue
            version, look = self._versions[key] + suffix, self._current_version
            yield Partition(
                key,
                version,
                read,
                partial(_current, look, key, suffix) if look else partial(str, version),
            )


class FrameTable:
    """One frame, divided by the values of some of its columns, as a `Source`; `url` names it in
    messages.

    What is taken of its columns is said as in the settings: `FrameTable(frame, "category",
    id="sku", text="{title}")`. Partitions come in the order of their keys, and the rows of each in
    the frame's order. A folder of the cache that holds the rows of a lazy frame is removed with the
    last of its partitions.
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
        self.url, self.selection = url, selected(selection, columns)
        self._partition_by = column_names(partition_by)
        try:
            # Of a Hugging Face dataset the rows may lie in a mapped file.
            lies_in_memory = hasattr(frame, "__arrow_c_stream__")
            self._partitions = self._in_memory(frame) if lies_in_memory else self._on_disk(frame)
        except DataError as error:
            raise ConfigError(f"{url}: {error.reason}. {error.remedy}") from error
        except OSError as error:
            raise ConfigError(
                f"{url}: its rows cannot be grouped on the disk ({first_line(error)})."
            ) from error

    def __iter__(self) -> Iterator[Partition]:
        return iter(self._partitions)

    def _in_memory(self, frame: Frame) -> list[Partition]:
        blocks, codes = (
            [block for block in self._blocks(frame) if len(block.places)],
            dict[str, int](),
        )
        if not blocks:
            return []
        rows = pa.Table.from_batches([block.rows for block in blocks])
        of_rows = np.concatenate([codes_of_rows(block, codes) for block in blocks])
        groups = np.split(np.argsort(of_rows, kind="stable"), np.cumsum(np.bincount(of_rows))[:-1])
        keys = sorted(zip(codes, groups, strict=True), key=lambda each: each[0].encode())
        taken = [(key, partial(_taken, rows, group), group.item) for key, group in keys]
        return [
            self._partition(key, _digested(key, batches), batches, row_of)
            for key, batches, row_of in taken
        ]

    def _on_disk(self, frame: Frame) -> list[Partition]:
        place = disk_cache.place("frames/rows")
        disk_cache.make_folder(place.parent)
        folder = tempfile.TemporaryDirectory(dir=place.parent)
        groups = sorted(
            grouped(self._blocks(frame), Path(folder.name, "rows")),
            key=lambda group: group.key.encode(),
        )
        parts = [(group, partial(_stored, folder, group)) for group in groups]
        return [
            self._partition(each.key, each, partial(of, 0), partial(_row_of, partial(of, 1)))
            for each, of in parts
        ]

    def _partition(
        self, key: str, group: Group, batches: _Open, row_of: Callable[[int], int]
    ) -> Partition:
        version = group.digest + self.selection.version_suffix
        name, read = (
            key,
            partial(_read, key, batches, self.selection, lambda row: row_in_words(row_of(row))),
        )
        if key == NO_KEY:
            name, read = NO_KEY_NAME, partial(self._refuse, group)
        return Partition(name, version, read, partial(str, version), group.rows, group.value_bytes)

    def _refuse(self, group: Group) -> Iterator[RowBatch]:
        raise without_key(NO_KEY_NAME, group.rows, self._partition_by)

    def _blocks(self, frame: Frame) -> Iterator[Block]:
        """All rows with their keys; what is kept of them is what is selected."""
        columns, first_row = list(dict.fromkeys((*self._partition_by, *self.selection.columns))), 0
        for batch in _batches(self.url, frame, columns, "id, text, columns and partition_by"):
            labels = [
                (name, _labels(self.url, name, batch.column(name))) for name in self._partition_by
            ]
            yield Block(first_row, batch.select(self.selection.columns), *keys_of(labels))
            first_row += len(batch)


def _labels(url: str, name: str, column: pa.Array) -> pa.Array:
    try:
        return column.cast(pa.string())
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
        raise ConfigError(
            f"{url}: the column {name!r} has type {column.type}; the values of partition_by must be strings, numbers, "
            "booleans or dates. Cast it, or name another column."
        ) from error


def _taken(table: pa.Table, rows: np.ndarray) -> Iterator[pa.RecordBatch]:
    for start in range(0, len(rows), _BATCH_ROWS):
        place = rows[start : start + _BATCH_ROWS]
        together = int(place[-1]) - int(place[0]) == len(place) - 1
        taken = table.slice(int(place[0]), len(place)) if together else table.take(pa.array(place))
        for batch in taken.combine_chunks().to_batches():
            yield from _pieces(batch)


def _stored(folder: tempfile.TemporaryDirectory[str], group: Group, part: int) -> Iterator[Any]:
    """The columns of the batches of a group (part 0), or the rows of the frame that they were (part
    1)."""
    # The folder lives as long as one of its partitions.
    with open_groups(Path(folder.name, "rows"), group.file) as reader:
        for place in range(group.first_batch, group.first_batch + group.batches):
            yield rows_of(reader.get_batch(place))[part]


def _row_of(rows: Callable[[], Iterator[pa.Array]], row: int) -> int:
    return next(itertools.islice(itertools.chain.from_iterable(rows()), row, None)).as_py()


def _read(
    key: str, batches: _Open, selection: Selection, place: Place = row_in_words
) -> Iterator[RowBatch]:
    return selection.rows(key, batches(), place=place)


def _digested(key: str, batches: _Open) -> Group:
    gathered = Gathered(key, 0)
    for batch in batches():
        gathered.add(batch)
    return gathered.group()


def _listed(
    key: str, batches: _Open, read: Callable[[], Iterator[RowBatch]], suffix: str
) -> Partition:
    """A partition whose version is the digest of its rows, or of why they cannot be read, which
    reading says again."""
    try:
        group = _digested(key, batches)
    except (DataError, TransientError) as error:
        reason = hashlib.sha256(str(error).encode("utf-8", "surrogatepass")).hexdigest()
        return Partition(key, f"refused-{reason[:24]}{suffix}", read, lambda: None)
    version = group.digest + suffix
    return Partition(key, version, read, partial(str, version), group.rows, group.value_bytes)


def _current(look: Callable[[str], str | None], key: str, suffix: str) -> str | None:
    return None if (version := look(key)) is None else version + suffix


def _batches(
    key: str,
    frame: Frame | Callable[[], Frame],
    columns: Sequence[str],
    settings: str = "id, text and columns",
) -> Iterator[pa.RecordBatch]:
    """The rows of a frame in its order, these columns alone, in pieces of a few megabytes;
    `settings` name them."""
    try:
        yield from _batches_of(key, frame, columns, settings)
    except (SurgeError, MemoryError):
        raise
    except OSError as error:
        raise TransientError(
            f"partition {key!r}: its frame could not be read ({first_line(error)}). Open it anew, then run again.",
            key,
        ) from error
    except Exception as error:  # whatever a library or the user's function raises
        raise DataError(
            key,
            f"its frame could not be computed ({type(error).__name__}: {first_line(error)})",
            "Correct the function or the expressions that make it, then run again.",
        ) from error


def _batches_of(
    key: str, frame: Frame | Callable[[], Frame], columns: Sequence[str], settings: str
) -> Iterator[pa.RecordBatch]:
    given: Any = frame() if not _is_frame(frame) and callable(frame) else frame
    # A Delta table's other reader gives rows in any order.
    frame = given.to_pyarrow_dataset() if hasattr(given, "to_pyarrow_dataset") else given
    schema = _schema(key, frame)
    names, outer = names_with_fields(schema), outer_columns(schema.names, columns)
    for name in columns:
        if (count := names.count(name)) != 1:
            problem = f"{'two columns' if count else 'no column'} {name!r}; its columns are "
            remedy = (
                "Rename one of them."
                if count
                else f"Name the right ones with the settings {settings}."
            )
            raise DataError(
                key, f"the {_kind(frame)} has {problem}{', '.join(map(repr, names))}", remedy
            )
    empty = True
    for batch in _open(frame, outer):
        for piece in _pieces(select(batch, columns)):
            yield piece
            empty = False
    if empty:
        none = pa.RecordBatch.from_arrays(
            [pa.array([], schema.field(name).type) for name in outer], outer
        )
        arrays = [
            _canonical(without_dictionary(column)) for column in select(none, columns).columns
        ]
        yield pa.RecordBatch.from_arrays(arrays, list(columns))


def _is_frame(frame: Any) -> bool:
    ways = (
        "__arrow_c_stream__",
        "collect_batches",
        "to_batches",
        "with_format",
        "to_pyarrow_dataset",
    )
    # a DatasetDict has such a way
    return not isinstance(frame, dict) and any(hasattr(frame, way) for way in ways)


def _schema(key: str, frame: Any) -> pa.Schema:
    """The columns of a frame, without reading rows."""
    if not _is_frame(frame) or isinstance(frame, pa.RecordBatchReader):
        once = (
            "which can be read only once"
            if isinstance(frame, pa.RecordBatchReader)
            else "which is no frame"
        )
        raise DataError(key, f"its rows are a {_kind(frame)}, {once}", f"Give {_TAKES}.")
    if hasattr(frame, "collect_schema"):  # polars
        frame = frame.collect_schema().to_frame()
    elif hasattr(
        frame, "with_format"
    ):  # Hugging Face; a stream may not know its columns before it is read
        return (frame.features or frame._resolve_features().features).arrow_schema
    elif isinstance(getattr(frame, "schema", None), pa.Schema):
        return frame.schema
    return pa.RecordBatchReader.from_stream(frame).schema


def _open(frame: Any, columns: list[str]) -> Iterator[pa.RecordBatch]:
    if hasattr(frame, "collect_batches"):  # polars, lazy
        frames = frame.select(columns).collect_batches(
            chunk_size=_BATCH_ROWS, maintain_order=True, lazy=True
        )
        return (batch for each in frames for batch in pa.RecordBatchReader.from_stream(each))
    if hasattr(frame, "with_format"):  # Hugging Face
        if (getattr(frame, "format", None) or {}).get("type") == "custom":
            raise ValueError(
                "it has a transform, which is not applied to rows in Arrow's format: use map() instead"
            )
        tables = frame.select_columns(columns).with_format("arrow").iter(_BATCH_ROWS)
        return (batch for table in tables for batch in table.to_batches())
    if not hasattr(frame, "__arrow_c_stream__"):  # a dataset of pyarrow
        return frame.to_batches(
            columns=columns, batch_size=_BATCH_ROWS, batch_readahead=1, fragment_readahead=1
        )
    selected = frame.select(columns) if hasattr(frame, "collect_schema") else frame
    return iter(pa.RecordBatchReader.from_stream(selected))


def _kind(frame: Any) -> str:
    return f"{type(frame).__module__.partition('.')[0]} {type(frame).__name__}"


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """A batch in pieces of a few megabytes, whose types do not depend on who made the frame."""
    for rows in small(batch):
        yield pa.RecordBatch.from_arrays(
            [_canonical(column) for column in rows.columns], rows.schema.names
        )


def _canonical(column: pa.Array) -> pa.Array:
    kind = canonical_type(column.type)
    return column if column.type == kind else column.cast(kind)
