"""Frames as partitions: polars, pyarrow, pandas, Hugging Face datasets, Delta tables, whatever gives Arrow batches.

A mapping of keys to frames has one partition for each, which a function may open when it is read; one frame is divided
by the values of its columns. A frame that lies in memory is not copied: a partition of it is a list of row numbers,
eight bytes each. The version of a partition is the digest of its rows, so that a frame that was made anew makes stale
only what differs; finding it reads every row once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from surge_dagster.engine.errors import ConfigError, DataError
from surge_dagster.engine.sources.content import ContentDigest
from surge_dagster.engine.sources.partition import Partition, RowBatch
from surge_dagster.engine.sources.selection import Selection
from surge_dagster.engine.support.keys import joined_key

# A polars or pandas DataFrame or LazyFrame, a pyarrow Table or Dataset, a Hugging Face dataset, a Delta table, or any
# other object with `__arrow_c_stream__` that can be read again.
Frame = Any

_BATCH_ROWS = 8192
_BATCH_BYTES = 2 * 1024 * 1024
_TAKES = "a polars, pyarrow or pandas frame, a Hugging Face dataset, a Delta table, or a function that opens one"


class FrameCatalog:
    """Frames by key as a `Source`.

    Args:
        frames: by partition key; a function is called each time when its partition is read.
        selection: the columns that become ids and texts.
        versions: source versions by key. Without, the digest of each frame's rows, for which a listing reads all.
        current_version: looks the version of a key up again; None where the key is no longer there.
        url: the frames for people, in messages.
    """

    def __init__(
        self,
        frames: Mapping[str, Frame | Callable[[], Frame]],
        selection: Selection | None = None,
        *,
        versions: Mapping[str, str] | None = None,
        current_version: Callable[[str], str | None] | None = None,
        url: str = "frames",
    ) -> None:
        self.url = url
        self.selection = selection or Selection()
        self._frames = frames
        self._versions = versions
        self._current_version = current_version

    def __iter__(self) -> Iterator[Partition]:
        """Yield a partition for each frame, in the order of the mapping."""
        suffix = self.selection.version_suffix
        for key, frame in self._frames.items():
            read = partial(_read, key, frame, self.selection)
            if self._versions is None:
                yield _digested(key, read, suffix)
                continue
            version, look = self._versions[key] + suffix, self._current_version
            yield Partition(key, version, read, partial(_current, look, key, suffix) if look else partial(str, version))


class FrameTable:
    """One frame, divided by the values of some of its columns, as a `Source`.

    Partitions come in the order of their keys, and the rows of each in the frame's order.

    Args:
        frame: lies in memory; a lazy one is read into it, the needed columns alone.
        partition_by: the columns that give the key of a row.
        selection: the columns that become ids and texts.
        url: the frame for people, in messages.

    Raises:
        ConfigError: a column is missing, or a row has no key.
    """

    def __init__(
        self, frame: Frame, partition_by: Sequence[str], selection: Selection | None = None, *, url: str = "frame"
    ) -> None:
        self.url = url
        self.selection = selection or Selection()
        columns = list(dict.fromkeys((*partition_by, *self.selection.columns)))
        try:
            read = list(_batches(url, frame, columns))
        except DataError as error:
            raise ConfigError(f"{url}: {error.reason}. {error.remedy}") from error
        self._table = pa.Table.from_batches(read).unify_dictionaries()
        self._keys, self._groups = _grouped(url, self._table, partition_by)

    def __iter__(self) -> Iterator[Partition]:
        for key, rows in zip(self._keys, self._groups, strict=True):
            yield _digested(key, partial(self._read, key, rows), self.selection.version_suffix)

    def _read(self, key: str, rows: np.ndarray) -> Iterator[RowBatch]:
        wanted = self._table.select(self.selection.columns)
        for start in range(0, len(rows), _BATCH_ROWS):
            place = rows[start : start + _BATCH_ROWS]
            together = int(place[-1]) - int(place[0]) == len(place) - 1
            taken = wanted.slice(int(place[0]), len(place)) if together else wanted.take(pa.array(place))
            first_row = start
            for batch in taken.combine_chunks().to_batches():
                for piece in _pieces(batch):
                    yield from self.selection.row_batches(key, piece, first_row)
                    first_row += len(piece)


def _grouped(url: str, table: pa.Table, partition_by: Sequence[str]) -> tuple[list[str], list[np.ndarray]]:
    """The keys in order, and for each the numbers of its rows, ascending."""
    labels: dict[str, pa.Array] = {}
    codes, examples = np.zeros(len(table), np.int64), np.empty(0, np.int64)
    for name in partition_by:
        labels[name] = _labels(url, name, table.column(name))
        encoded = labels[name].dictionary_encode()
        codes = codes * max(1, len(encoded.dictionary)) + encoded.indices.to_numpy(zero_copy_only=False)
        # Numbered anew each time: of a thousand values in each column few pairs occur.
        _, examples, codes = np.unique(codes, return_index=True, return_inverse=True)
    keys = [joined_key({name: column[row].as_py() for name, column in labels.items()}) for row in examples.tolist()]
    groups = np.split(np.argsort(codes, kind="stable"), np.cumsum(np.bincount(codes))[:-1]) if keys else []
    order = sorted(range(len(keys)), key=lambda number: keys[number].encode())
    return [keys[number] for number in order], [groups[number] for number in order]


def _labels(url: str, name: str, column: pa.ChunkedArray) -> pa.Array:
    """The values of a key column as strings."""
    try:
        labels = pc.cast(column, pa.string())
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
        raise ConfigError(
            f"{url}: the column {name!r} has type {column.type}; the values of partition_by must be strings, numbers, "
            "booleans or dates. Cast it, or name another column."
        ) from error
    if labels.null_count:
        row = int(np.argmax(labels.is_null().to_numpy()))
        raise ConfigError(
            f"{url}: row {row} has no {name!r}, which gives its partition; so have {labels.null_count:,} rows in all. "
            "Fill it, or drop the rows."
        )
    return labels.combine_chunks()


def _digested(key: str, read: Callable[[], Iterator[RowBatch]], suffix: str) -> Partition:
    """A partition whose version is the digest of its rows, or of what is wrong with them."""
    digest, rows, size = ContentDigest(), 0, 0
    try:
        for batch in read():
            digest.update(batch)
            rows, size = rows + len(batch) + batch.skipped, size + len(batch.text_values)
        version = digest.hexdigest() + suffix
    except DataError as error:  # raised again where the partition is read
        refused = hashlib.sha256(f"{digest.hexdigest()} {error}".encode("utf-8", "surrogatepass"))
        return Partition(key, f"refused-{refused.hexdigest()[:24]}{suffix}", read, lambda: None)
    return Partition(key, version, read, partial(str, version), rows, size)


def _current(look: Callable[[str], str | None], key: str, suffix: str) -> str | None:
    version = look(key)
    return None if version is None else version + suffix


def _read(key: str, frame: Frame | Callable[[], Frame], selection: Selection) -> Iterator[RowBatch]:
    first_row = 0
    for batch in _batches(key, frame, selection.columns):
        yield from selection.row_batches(key, batch, first_row)
        first_row += len(batch)


def _batches(key: str, frame: Frame | Callable[[], Frame], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of a frame in its order, these columns alone, in pieces of a few megabytes.

    Raises:
        DataError: a column is missing or there twice, or it is no frame.
    """
    given: Any = frame() if not _is_frame(frame) and callable(frame) else frame
    # A Delta table's other reader gives rows in any order.
    frame = given.to_pyarrow_dataset() if hasattr(given, "to_pyarrow_dataset") else given
    schema, columns = _schema(key, frame), list(columns)
    for name in columns:
        if (count := schema.names.count(name)) != 1:
            raise DataError(
                key,
                f"the {_kind(frame)} has {'two columns' if count else 'no column'} {name!r}; its columns are "
                + ", ".join(map(repr, schema.names)),
                "Rename one of them."
                if count
                else "Name the right columns with the settings id, text or partition_by.",
            )
    empty = True
    for batch in _open(frame, columns):
        for piece in _pieces(batch.select(columns)):
            yield piece
            empty = False
    if empty:
        yield pa.RecordBatch.from_pylist([], schema=pa.schema([schema.field(name) for name in columns]))


def _is_frame(frame: Any) -> bool:
    ways = ("__arrow_c_stream__", "collect_batches", "to_batches", "with_format", "to_pyarrow_dataset")
    return any(hasattr(frame, way) for way in ways)


def _schema(key: str, frame: Any) -> pa.Schema:
    """The columns of a frame, without reading rows."""
    if not _is_frame(frame) or isinstance(frame, pa.RecordBatchReader):
        once = "which can be read only once" if isinstance(frame, pa.RecordBatchReader) else "which is no frame"
        raise DataError(key, f"its rows are a {_kind(frame)}, {once}", f"Give {_TAKES}.")
    if hasattr(frame, "collect_schema"):  # polars
        frame = frame.collect_schema().to_frame()
    elif hasattr(frame, "with_format"):  # Hugging Face; a stream may not know its columns before it is read
        return (frame.features or frame._resolve_features().features).arrow_schema
    elif isinstance(getattr(frame, "schema", None), pa.Schema):
        return frame.schema
    return pa.RecordBatchReader.from_stream(frame).schema


def _open(frame: Any, columns: list[str]) -> Iterator[pa.RecordBatch]:
    if hasattr(frame, "collect_batches"):  # polars, lazy
        frames = frame.select(columns).collect_batches(chunk_size=_BATCH_ROWS, maintain_order=True, lazy=True)
        return (batch for each in frames for batch in pa.RecordBatchReader.from_stream(each))
    if hasattr(frame, "with_format"):  # Hugging Face
        tables = frame.select_columns(columns).with_format("arrow").iter(_BATCH_ROWS)
        return (batch for table in tables for batch in table.to_batches())
    if not hasattr(frame, "__arrow_c_stream__"):  # a dataset of pyarrow
        return frame.to_batches(columns=columns, batch_size=_BATCH_ROWS, batch_readahead=1, fragment_readahead=1)
    selected = frame.select(columns) if hasattr(frame, "collect_schema") else frame
    return iter(pa.RecordBatchReader.from_stream(selected))


def _kind(frame: Any) -> str:
    return f"{type(frame).__module__.partition('.')[0]} {type(frame).__name__}"


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """A batch in pieces of a few megabytes, without string views: a piece of those would count as all their bytes."""
    for start in range(0, len(batch), _BATCH_ROWS):
        rows = batch.slice(start, _BATCH_ROWS)
        columns = [_without_view(column) for column in rows.columns]
        yield from _halves(pa.RecordBatch.from_arrays(columns, rows.schema.names))


def _without_view(column: pa.Array) -> pa.Array:
    if pa.types.is_string_view(column.type):
        return column.cast(pa.large_string())
    return column.cast(pa.large_binary()) if pa.types.is_binary_view(column.type) else column


def _halves(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    if len(batch) < 2 or batch.nbytes <= _BATCH_BYTES:
        yield batch
        return
    middle = len(batch) // 2
    yield from _halves(batch.slice(0, middle))
    yield from _halves(batch.slice(middle))
