"""Output files of a few rows, put together without pyarrow's writer: the same bytes in a tenth of the time.

Pyarrow takes half a millisecond to set up, fill and close a writer, however little is written. Where partitions have
ten rows that is most of what a run does after its encoding. A file of one row group with one uncompressed page for
each column has a simple form, so it is written here: three pages, each behind a header with its checksum, and a footer
(Parquet's format, https://parquet.apache.org/docs/file-format/, in Thrift's compact protocol).

Nothing here is trusted by itself. For each form (columns, dimension, type, number of rows) pyarrow first writes a file
of made-up rows, from which the parts that are the same in all such files are taken; then that file is put together
here as well. Unless both are equal, byte by byte, pyarrow writes the files of that form. So a pyarrow that writes
differently costs time and nothing else.
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from surge_dagster.engine.columns import value_bytes, value_offsets
from surge_dagster.engine.output.embedding_file import LEAST_COMPRESSED_BYTES, EmbeddingFileWriter, FileFacts
from surge_dagster.engine.output.store import Upload

log = logging.getLogger(__name__)

MAX_ROWS = 64
_MAX_VECTOR_BYTES = 128 * 1024  # a page is cut at 256 KiB
_MAX_ID_BYTES = 64 * 1024
_LONGEST_HEADER = 64
_ARROW_SCHEMA = b"ARROW:schema"
_MAGIC = b"PAR1"
# Parquet's names of the types: https://github.com/apache/parquet-format, enum Type
_INT64, _FLOAT, _BYTE_ARRAY, _FIXED_LENGTH = 2, 4, 6, 7


@dataclass(frozen=True, slots=True)
class _Form:
    """What files have in common that differ in their values alone."""

    id_type: pa.DataType
    dimension: int
    dtype: str
    include_text: bool
    rows: int


@dataclass(frozen=True, slots=True)
class _Template:
    """The parts of a form's files that are the same in all of them.

    Attributes:
        levels: of the embeddings' page, before its values.
        schema: the footer's beginning, up to the number of rows.
        end: the footer's end, with what pyarrow says of itself.
    """

    form: _Form
    levels: bytes
    schema: bytes
    end: bytes


_templates: dict[_Form, _Template | None] = {}
_lock = threading.Lock()


def write_file(
    upload: Upload,
    ids: Sequence[pa.Array],
    id_type: pa.DataType,
    texts: pa.Array | None,
    matrix: np.ndarray,
    facts: FileFacts,
) -> None:
    """Write a whole output file, in the way that is fastest for its size.

    Args:
        ids: in one piece or in several.
        texts: None leaves the column out.
        matrix: [rows, dimension], contiguous.
    """
    small = small_file(ids, id_type, texts, matrix, facts)
    if small is not None:
        upload.write(small)
        return
    compress = texts is None or _string_bytes(texts) >= LEAST_COMPRESSED_BYTES
    include_text, dtype = texts is not None, str(matrix.dtype)
    with EmbeddingFileWriter(
        upload.sink, id_type, matrix.shape[1], dtype, include_text=include_text, compress=compress
    ) as writer:
        writer.append(pa.chunked_array(list(ids), type=id_type), texts, matrix)
        writer.close(facts)


def small_file(
    ids: Sequence[pa.Array], id_type: pa.DataType, texts: pa.Array | None, matrix: np.ndarray, facts: FileFacts
) -> bytes | None:
    """A whole output file, equal to what `EmbeddingFileWriter` writes without compression.

    Args:
        ids: in one piece or in several.
        texts: None leaves the column out.
        matrix: [rows, dimension], contiguous.

    Returns:
        None for what is not small, and where pyarrow's own files are of another form: then that is to write it.
    """
    rows, dimension = matrix.shape
    if not 0 < rows <= MAX_ROWS or matrix.nbytes > _MAX_VECTOR_BYTES:
        return None
    template = _template(_Form(id_type, dimension, str(matrix.dtype), texts is not None, rows))
    if template is None:
        return None
    columns = [b"".join(plain_values(piece) for piece in ids)]
    if len(columns[0]) > _MAX_ID_BYTES:
        return None
    if texts is not None:
        if _string_bytes(texts) >= LEAST_COMPRESSED_BYTES:
            return None
        columns.append(plain_values(texts))
    return _assembled(template, columns, matrix, facts)


def _string_bytes(column: pa.Array) -> int:
    offsets = value_offsets(column)
    return int(offsets[-1]) - int(offsets[0])


def plain_values(column: pa.Array) -> bytes:
    """Values without nulls in Parquet's encoding PLAIN: 64-bit integers, or a length and bytes for each string."""
    if pa.types.is_int64(column.type):
        return column.to_numpy(zero_copy_only=True).tobytes()
    offsets = value_offsets(column)
    data = bytes(value_bytes(column, offsets))
    bounds = (offsets - offsets[0]).tolist()
    return b"".join([(stop - start).to_bytes(4, "little") + data[start:stop] for start, stop in pairwise(bounds)])


def _template(form: _Form) -> _Template | None:
    try:
        return _templates[form]
    except KeyError:
        pass
    with _lock:
        if form not in _templates:
            _templates[form] = _proven(form)
        return _templates[form]


def _proven(form: _Form) -> _Template | None:
    """The template of a form if files made from it are pyarrow's own, byte by byte."""
    ids, texts, matrix, facts = _sample(form)
    sink = pa.BufferOutputStream()
    with EmbeddingFileWriter(
        sink, form.id_type, form.dimension, form.dtype, include_text=form.include_text, compress=False
    ) as writer:
        writer.append(ids, texts, matrix)
        writer.close(facts)
    expected = sink.getvalue().to_pybytes()
    columns = [plain_values(column) for column in (ids, texts) if column is not None]
    template = _taken_from(expected, form, columns, matrix, facts)
    if template is not None and _assembled(template, columns, matrix, facts) == expected:
        return template
    log.warning(
        "files of %d rows are left to pyarrow %s, which takes longer: it writes them in a form that is not known here",
        form.rows,
        pa.__version__,
    )
    return None


def _sample(form: _Form) -> tuple[pa.Array, pa.Array | None, np.ndarray, FileFacts]:
    """Rows of a form, made up."""
    names = [f"row {row}" for row in range(form.rows)]
    ids = pa.array(range(form.rows) if pa.types.is_int64(form.id_type) else names, form.id_type)
    texts = pa.array(names[::-1], pa.large_string()) if form.include_text else None
    matrix = np.arange(form.rows * form.dimension).reshape(form.rows, -1).astype(form.dtype)
    facts = FileFacts("key", "space", "model", "fp32", "1", "digest", "version", form.rows, form.dimension, 0)
    return ids, texts, matrix, facts


def _taken_from(
    file: bytes, form: _Form, columns: list[bytes], matrix: np.ndarray, facts: FileFacts
) -> _Template | None:
    """What the files of a form share, out of one that pyarrow wrote from these columns."""
    metadata = pq.read_metadata(pa.BufferReader(file))
    written = metadata.row_group(0).column(len(columns))
    chunk = file[written.data_page_offset : written.data_page_offset + written.total_compressed_size]
    page = next((chunk[n:] for n in range(_LONGEST_HEADER) if _page_header(chunk[n:], matrix.size) == chunk[:n]), None)
    if page is None or not page.endswith(matrix.tobytes()):
        return None
    schema, writer = metadata.metadata[_ARROW_SCHEMA], metadata.created_by.encode()
    orders = _list_head(len(columns) + 1) + b"\x1c\x00\x00" * (len(columns) + 1)
    template = _Template(
        form,
        levels=page[: len(page) - matrix.nbytes],
        schema=b"",
        end=b"%b%b\x00\x18%b\x19%b\x00" % (_entry_key(_ARROW_SCHEMA), _string(schema), _string(writer), orders),
    )
    without_schema = _assembled(template, columns, matrix, facts)
    return replace(template, schema=_footer_of(file).removesuffix(_footer_of(without_schema)))


def _footer_of(file: bytes) -> bytes:
    return file[-8 - int.from_bytes(file[-8:-4], "little") : -8]


def _assembled(template: _Template, columns: list[bytes], matrix: np.ndarray, facts: FileFacts) -> bytes:
    """The whole file."""
    rows = template.form.rows
    parts, described = [_MAGIC], []
    place = len(_MAGIC)
    for index, page in enumerate([*columns, template.levels + matrix.tobytes()]):
        last = index == len(columns)
        header = _page_header(page, matrix.size if last else rows)
        size = len(header) + len(page)
        if last:
            described.append(_embedding_column(template.form, place, size))
        elif index == 0 and pa.types.is_int64(template.form.id_type):
            described.append(_column(b"\x18" + _string(b"id"), _INT64, rows, place, size))
        else:
            described.append(_string_column(b"text" if index else b"id", rows, place, size, len(page) - 4 * rows))
        parts += [header, page]
        place += size
    footer = _footer(template, described, place - len(_MAGIC), facts)
    return b"".join([*parts, footer, len(footer).to_bytes(4, "little"), _MAGIC])


# What follows is Thrift's compact protocol: a field is a byte with its distance from the field before it and its type
# (5 and 6 whole numbers, 8 bytes, 9 a list, 12 a struct), then its value; a list begins with its length and its type.


def _page_header(page: bytes, values: int) -> bytes:
    """PageHeader: a data page, both its sizes, its checksum, and (a struct) its values and their encodings."""
    size = _number(len(page))
    checksum = zlib.crc32(page)
    signed = checksum - (1 << 32) if checksum >> 31 else checksum
    parts = (size, size, _number(signed), _number(values))
    return b"\x15\x00\x15%b\x15%b\x15%b\x1c\x15%b\x15\x00\x15\x06\x15\x06\x1c\x00\x00\x00" % parts


def _column(path: bytes, kind: int, values: int, place: int, size: int, sizes: bytes = b"") -> bytes:
    """ColumnChunk and its ColumnMetaData: one plain page, uncompressed.

    Args:
        path: a list's content, with its head.
        place: of the page in the file, in bytes.
        sizes: SizeStatistics, where pyarrow writes them.
    """
    length = _number(size)
    kind_and_path = b"\x26\x00\x1c\x15%b\x19%%\x06\x00\x19%b" % (_number(kind), path)
    counts = b"\x15\x00\x16%b\x16%b\x16%b\x26%b" % (_number(values), length, length, _number(place))
    return b"".join((kind_and_path, counts, b"\x49\x1c\x15\x00\x15\x00\x15\x02\x00", sizes, b"\x00\x00"))


def _string_column(name: bytes, rows: int, place: int, size: int, string_bytes: int) -> bytes:
    path = b"\x18" + _string(name)
    return _column(path, _BYTE_ARRAY, rows, place, size, b"\x3c\x16" + _number(string_bytes) + b"\x19\x06\x19\x06\x00")


def _embedding_column(form: _Form, place: int, size: int) -> bytes:
    rows, values = form.rows, form.rows * form.dimension
    levels = b"\x3c\x29\x26%b%b\x19\x26\x00%b\x00" % (_number(rows), _number(values - rows), _number(values))
    kind = _FLOAT if form.dtype == "float32" else _FIXED_LENGTH
    return _column(_EMBEDDING_PATH, kind, values, place, size, levels)


def _footer(template: _Template, columns: list[bytes], size: int, facts: FileFacts) -> bytes:
    """FileMetaData: the schema, the one row group, the file's own metadata, who wrote it, the order of each column."""
    rows, length = _number(template.form.rows), _number(size)
    entries = facts.to_metadata()
    parts = [template.schema, b"\x16", rows, b"\x19\x1c\x19", _list_head(len(columns)), *columns]
    parts += (b"\x16", length, b"\x16", rows, b"\x26", _number(len(_MAGIC)), b"\x16", length, b"\x00\x19")
    parts.append(_list_head(len(entries) + 1))
    for key, value in entries.items():
        parts += (_entry_key(key), _length(len(value)), value, b"\x00")
    parts.append(template.end)
    return b"".join(parts)


@cache
def _entry_key(key: bytes) -> bytes:
    return b"\x18" + _string(key) + b"\x18"


@cache
def _list_head(structs: int) -> bytes:
    return bytes([structs << 4 | 12]) if structs < 15 else b"\xfc" + _length(structs)


def _string(value: bytes) -> bytes:
    return _length(len(value)) + value


@lru_cache(maxsize=16_384)  # most numbers come again in the next file
def _number(value: int) -> bytes:
    """A signed number: zigzag, then seven bits a byte."""
    return _length(value << 1 if value >= 0 else (-value << 1) - 1)


@lru_cache(maxsize=1024)
def _length(value: int) -> bytes:
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


_EMBEDDING_PATH = b"\x38" + _string(b"embedding") + _string(b"list") + _string(b"item")
