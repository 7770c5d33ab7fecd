"""Rows of output files: columns, tables that refer to a matrix, and which vectors are valid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from surge_dagster.engine.files.facts import InvalidFile
from surge_dagster.engine.support.text_hash import TEXT_HASH, text_hashes

MAX_ROW_GROUP_ROWS = 65_536
READ_BYTES = 1024 * 1024
_ROW_GROUP_BYTES = 1024 * 1024
_MOST_READ_ROWS = 1024
OWN_COLUMNS = ("id", "text", "text_hash", "truncated", "embedding")
_DTYPES = {np.dtype("float32"): pa.float32(), np.dtype("float16"): pa.float16()}
_BITS = {"int8": 8, "binary": 1}  # of a value, if vectors are stored as bytes
# Rounding: a float32 vector of length 1 misses it slightly, and float16 rounds each component to 11
# bits.
_NORM_TOLERANCE = {np.dtype("float32"): 1e-3, np.dtype("float16"): 5e-3}
_CHECKED_ROWS = 1024


def table_of(
    columns: pa.Schema,
    ids: Sequence[pa.Array],
    texts: pa.Array,
    matrix: np.ndarray,
    carried: Sequence[pa.RecordBatch] = (),
    truncated: np.ndarray | None = None,
    hashes: pa.Array | None = None,
) -> pa.Table:
    """Return rows as a table of a file's columns; vectors are not copied.

    Args:
        matrix: [rows, dimension], contiguous.
        carried: further columns of the source.
        truncated: whether the model reads only a part of each text, bool [rows]; None: of no text.
        hashes: of the texts (`text_hashes`); None computes them.
    """
    if truncated is None:
        truncated = np.zeros(len(matrix), np.bool_)
    own: dict[str, Any] = {
        "id": pa.chunked_array(list(ids), columns.field("id").type),
        "text": texts,
        "text_hash": text_hashes(texts) if hashes is None else hashes,
        "truncated": pa.array(truncated),
        "embedding": embedding_array(columns, matrix),
    }
    arrays: list[Any] = []
    for field in columns:
        array = own.get(field.name)
        if array is None:
            array = pa.chunked_array([batch.column(field.name) for batch in carried], field.type)
        arrays.append(array)
    return pa.Table.from_arrays(arrays, schema=columns)


def embedding_type(dimension: int, dtype: str) -> pa.DataType:
    """Return the type of a column of vectors: a list of floats; int8 and binary as bytes, one per
    value or per eight bits.

    A list of int8 would take four bytes per value in Parquet, and twenty times the time.
    """
    if dtype in _BITS:
        return pa.binary(dimension * _BITS[dtype] // 8)
    return pa.list_(pa.field("item", _DTYPES[np.dtype(dtype)], nullable=False), dimension)


@lru_cache(maxsize=64)
def schema(
    id_type: pa.DataType,
    dimension: int,
    dtype: str,
    *,
    include_text: bool,
    carried: pa.Schema | None = None,
) -> pa.Schema:
    """Return the columns of an output file; `carried` are further columns of the source, which may
    be null."""
    columns = [pa.field("id", id_type, nullable=False)]
    if include_text:
        columns.append(pa.field("text", pa.large_string(), nullable=False))
    columns.append(pa.field("text_hash", TEXT_HASH, nullable=False))
    columns.append(pa.field("truncated", pa.bool_(), nullable=False))
    columns += carried or ()
    columns.append(pa.field("embedding", embedding_type(dimension, dtype), nullable=False))
    return pa.schema(columns)


def check_schema(columns: pa.Schema, *, dimension: int, dtype: str | None = None) -> None:
    """Raise `InvalidFile` for a file with other columns; `dtype` None allows every type that
    vectors may have."""
    require_dimension(columns, dimension)
    id_type = columns.field("id").type if "id" in columns.names else None
    if id_type not in (pa.string(), pa.int64(), pa.binary()):
        raise InvalidFile(f"its id column has type {id_type}; expected string, int64 or binary")
    allowed = [*map(str, _DTYPES), *_BITS] if dtype is None else [dtype]
    has_text = "text" in columns.names
    carried = carried_columns(columns)
    expected: list[str] = []
    for each in allowed:
        own = schema(id_type, dimension, each, include_text=has_text, carried=carried)
        expected.append(in_words(own))
    if in_words(columns) not in expected:
        raise InvalidFile(f"its columns are {in_words(columns)}; expected {' or '.join(expected)}")


def require_dimension(columns: pa.Schema, dimension: int) -> None:
    """Raise `InvalidFile` for a file whose column `embedding` cannot hold vectors of this
    dimension."""
    if "embedding" not in columns.names:
        raise InvalidFile("it has no column embedding")

    vectors = columns.field("embedding").type
    if pa.types.is_fixed_size_list(vectors):
        dimensions = [vectors.list_size]
    elif pa.types.is_fixed_size_binary(vectors):
        dimensions = [vectors.byte_width * 8 // bits for bits in _BITS.values()]
    else:
        dimensions = []

    if dimension not in dimensions:
        finding = f"its embedding column has type {vectors}; expected {dimension} numbers per row"
        raise InvalidFile(finding, "dimension")


def carried_columns(columns: pa.Schema) -> pa.Schema | None:
    """Return the columns of a file that were carried from the source; None if there are none."""
    further = [field for field in columns if field.name not in OWN_COLUMNS]
    carried = [pa.field(field.name, field.type) for field in further]
    if not carried:
        return None
    return pa.schema(carried)


def require_carried(stated: str, columns: pa.Schema) -> None:
    """Raise `InvalidFile` if a file does not carry the columns that its facts state."""
    carried = in_words(carried_columns(columns))
    if carried != stated:
        raise InvalidFile(
            f"its metadata promise the carried columns {stated!r}; it has {carried!r}"
        )


def in_words(columns: pa.Schema | None) -> str:
    """Return names and types of columns; "" for None."""
    words: list[str] = []
    for column in columns or ():
        suffix = "" if column.nullable else " not null"
        words.append(f"{column.name}: {column.type}{suffix}")
    return ", ".join(words)


def row_group_rows(dimension: int, itemsize: int) -> int:
    """Return the rows of a full row group: at most 65,536, and at most 1 MiB of embeddings."""
    return max(1, min(MAX_ROW_GROUP_ROWS, _ROW_GROUP_BYTES // (dimension * itemsize)))


def group_rows(columns: pa.Schema) -> int:
    """Return the rows of a full row group of a file with these columns."""
    return row_group_rows(vector_bytes(columns.field("embedding").type), 1)


def vector_bytes(vectors: pa.DataType) -> int:
    """Return the bytes of one vector in a column of this type."""
    if pa.types.is_fixed_size_binary(vectors):
        return vectors.byte_width
    return vectors.list_size * vectors.value_type.bit_width // 8


def rows_at_a_time(widest_row: int, dimension: int, itemsize: int) -> int:
    """Return how many rows to read at a time, so that they are about `READ_BYTES`."""
    return max(1, min(_MOST_READ_ROWS, READ_BYTES // (widest_row + dimension * itemsize)))


def embedding_array(columns: pa.Schema, matrix: np.ndarray) -> pa.Array:
    """Return a contiguous matrix as the column `embedding` of a file with these columns, without a
    copy."""
    kind = columns.field("embedding").type
    content = pa.py_buffer(matrix)
    if pa.types.is_fixed_size_binary(kind):
        return pa.Array.from_buffers(kind, len(matrix), [None, content])
    values = pa.Array.from_buffers(_DTYPES[matrix.dtype], matrix.size, [None, content])
    return pa.FixedSizeListArray.from_arrays(values, type=kind)


def matrix_of(batch: pa.RecordBatch) -> np.ndarray:
    """Return the embeddings of a batch as a [rows, dimension] matrix without a copy; bytes are
    [rows, bytes] of uint8."""
    column = batch.column("embedding")
    if pa.types.is_fixed_size_binary(column.type):
        width = column.type.byte_width
        values = np.frombuffer(
            column.buffers()[1], np.uint8, len(column) * width, column.offset * width
        )
        return values.reshape(-1, width)
    if not len(column):
        return np.empty((0, 0))
    return column.flatten().to_numpy(zero_copy_only=True).reshape(len(column), -1)


def invalid_row(
    matrix: np.ndarray,
    *,
    normalized: bool,
    may_be_zero: Callable[[int], bool] = lambda row: False,
) -> tuple[int, str] | None:
    """Return the first row of a [rows, dimension] matrix that cannot be an embedding, and why; None
    if all can.

    Args:
        normalized: whether every vector must have length 1.
        may_be_zero: whether a row may be all zeros: models without a token for a blank text give it
            such a vector.
    """
    for row in np.flatnonzero(~has_valid_length(matrix, normalized=normalized)).tolist():
        vector = matrix[row].astype(np.float32)
        if not np.isfinite(vector).all():
            return row, "its vector is not finite"
        # else its components are finite and only the square of its length is not
        is_blank = not vector.any() and may_be_zero(row)
        if normalized and not is_blank:
            length = float(np.linalg.norm(vector))
            return row, f"its vector has length {length:.4f}; expected 1"
    return None


def has_valid_length(matrix: np.ndarray, *, normalized: bool) -> np.ndarray:
    """Return which rows of a [rows, dimension] matrix have length 1 if they are normalized, or else
    a finite one, bool [rows]; the others may be embeddings only as `invalid_row` says."""
    if matrix.dtype.itemsize == 1:  # every byte is a valid int8 value, and every bit
        return np.ones(len(matrix), np.bool_)
    tolerance = _NORM_TOLERANCE[matrix.dtype]
    is_valid = np.empty(len(matrix), np.bool_)
    for start in range(0, len(matrix), _CHECKED_ROWS):
        part = matrix[start : start + _CHECKED_ROWS].astype(np.float32, copy=False)
        with np.errstate(over="ignore"):
            lengths = np.sqrt(np.vecdot(part, part))
        # The comparison fails if a component is NaN or infinite.
        valid = np.abs(lengths - 1) <= tolerance if normalized else np.isfinite(lengths)
        is_valid[start : start + _CHECKED_ROWS] = valid
    return is_valid
