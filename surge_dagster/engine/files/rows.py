"""The rows of an output file, in whichever format: their columns, and tables that refer to a matrix without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pyarrow as pa

from surge_dagster.engine.files.facts import InvalidFile

MAX_ROW_GROUP_ROWS = 65_536
READ_BYTES = 1024 * 1024
_ROW_GROUP_BYTES = 1024 * 1024
_MOST_READ_ROWS = 1024
_DTYPES = {np.dtype("float32"): pa.float32(), np.dtype("float16"): pa.float16()}


@dataclass(frozen=True, slots=True)
class FileRows:
    """All rows of one output file.

    Attributes:
        ids: in one piece or in several.
        id_type: string, int64 or binary.
        texts: None leaves the column out.
        matrix: [rows, dimension], contiguous.
    """

    ids: Sequence[pa.Array]
    id_type: pa.DataType
    texts: pa.Array | None
    matrix: np.ndarray


@lru_cache(maxsize=64)
def schema(id_type: pa.DataType, dimension: int, dtype: str, *, include_text: bool) -> pa.Schema:
    """The columns of an output file."""
    columns = [pa.field("id", id_type, nullable=False)]
    if include_text:
        columns.append(pa.field("text", pa.large_string(), nullable=False))
    item = pa.field("item", _DTYPES[np.dtype(dtype)], nullable=False)
    columns.append(pa.field("embedding", pa.list_(item, dimension), nullable=False))
    return pa.schema(columns)


def check_schema(found: pa.Schema, *, dimension: int, dtype: str | None = None) -> None:
    """Refuse a file with other columns.

    Args:
        dtype: of the vectors; None allows every type that files may have.

    Raises:
        InvalidFile: a column is missing, superfluous or of another type.
    """
    id_type = found.field("id").type if "id" in found.names else None
    if id_type not in (pa.string(), pa.int64(), pa.binary()):
        raise InvalidFile(f"its id column has type {id_type}; expected string, int64 or binary")
    include_text, allowed = "text" in found.names, [str(known) for known in _DTYPES] if dtype is None else [dtype]
    expected = [_in_words(schema(id_type, dimension, one, include_text=include_text)) for one in allowed]
    if _in_words(found) not in expected:
        raise InvalidFile(f"its columns are {_in_words(found)}; expected {' or '.join(expected)}")


def row_group_rows(dimension: int, itemsize: int) -> int:
    """Rows of a full row group: at most 65,536, and at most 1 MiB of embeddings."""
    return max(1, min(MAX_ROW_GROUP_ROWS, _ROW_GROUP_BYTES // (dimension * itemsize)))


def row_group_rows_of(columns: pa.Schema) -> int:
    """`row_group_rows` of a file with these columns."""
    vectors = columns.field("embedding").type
    return row_group_rows(vectors.list_size, vectors.value_type.bit_width // 8)


def rows_at_a_time(widest_row: int, dimension: int, itemsize: int) -> int:
    """How many rows to read at a time, so that they are about `READ_BYTES`."""
    return max(1, min(_MOST_READ_ROWS, READ_BYTES // (widest_row + dimension * itemsize)))


def embedding_table(
    columns: pa.Schema, ids: pa.Array | pa.ChunkedArray, texts: pa.Array | None, matrix: np.ndarray
) -> pa.Table:
    """Rows as a table; `matrix` has shape [rows, dimension], is contiguous and is referred to, not copied."""
    values = pa.Array.from_buffers(_DTYPES[matrix.dtype], matrix.size, [None, pa.py_buffer(matrix)])
    embeddings = pa.FixedSizeListArray.from_arrays(values, type=columns.field("embedding").type)
    arrays = [ids, embeddings] if texts is None else [ids, texts, embeddings]
    return pa.Table.from_arrays(arrays, schema=columns)


def matrix_of(batch: pa.RecordBatch) -> np.ndarray:
    """The embeddings of a batch as a [rows, dimension] matrix, without a copy."""
    column = batch.column("embedding")
    return column.flatten().to_numpy(zero_copy_only=True).reshape(len(column), -1) if len(column) else np.empty((0, 0))


def _in_words(found: pa.Schema) -> str:
    return ", ".join(f"{column.name}: {column.type}{'' if column.nullable else ' not null'}" for column in found)
