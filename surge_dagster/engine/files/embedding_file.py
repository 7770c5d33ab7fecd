"""The output file, format 1: one Parquet file per partition with id, text and embedding, and its facts in the footer.

Embeddings go from the result matrix to pyarrow's writer without becoming Python objects: a contiguous slice becomes a
fixed-size list by reference, stored plain (vectors do not compress) and without statistics. Texts are compressed with
zstd, except in files that are too small to gain from it. Page checksums are on, because an unnoticed bit flip in a
vector is a wrong vector. Page checksums do not cover the facts in the footer; these have a digest of their own.

Parquet stores repetition and definition levels of a list, and pyarrow builds them for a whole row group. A row group
has at most 1 MiB of embeddings, which bounds the memory that writing takes: 4 MiB are neither written nor read faster
and take three times the memory.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from surge_dagster import __version__
from surge_dagster.engine.store.store import Upload
from surge_dagster.engine.support.columns import value_offsets
from surge_dagster.engine.support.unreadable import UNREADABLE, first_line, is_systems

FORMAT = "1"
WRITER = f"surge-dagster {__version__}"
MAX_ROW_GROUP_ROWS = 65_536
STRING_COPIES = 3
WRITE_BATCH_ROWS = 1024
PAGE_BYTES = 256 * 1024
_ROW_GROUP_BYTES = 1024 * 1024
_PIECE_BYTES = 64 * 1024
READ_BYTES = 1024 * 1024
_MOST_READ_ROWS = 1024
# Texts of fewer bytes are not compressed: it would not save a block of a disk, and takes a third of the time that
# writing a file of ten texts takes.
LEAST_COMPRESSED_BYTES = 4096
_COMPRESSED = {"id": "zstd", "text": "zstd", "embedding.list.item": "none"}
# Files with less content are put together in memory and written with one system call.
_HELD_WHOLE_BYTES = 64 * 1024
_DTYPES = {np.dtype("float32"): pa.float32(), np.dtype("float16"): pa.float16()}

_FORMAT_ENTRY = b"surge.format"
_DIGEST_ENTRY = b"surge.metadata_digest"


class InvalidFile(Exception):
    """A file in the output is not a complete, valid embedding file; the text says what is wrong with it."""


class Facts(Protocol):
    """What a Parquet file says of itself in its footer: a dataclass of strings and whole numbers."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def rows(self) -> int: ...

    def to_metadata(self) -> dict[bytes, bytes]: ...


AnyFacts = TypeVar("AnyFacts", bound=Facts)


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What an output file says of itself in its `surge.*` footer metadata.

    Attributes:
        precision: arithmetic the vectors were made in, such as "fp32".
        source_version: the source's token when the partition was read.
        content_digest: over the canonical (id, text) rows.
        desired_version: hash of content digest and space; Dagster's data version of the partition.
        truncated: texts of which the model saw only the first tokens.
    """

    partition_key: str
    space: str
    model: str
    precision: str
    source_version: str
    content_digest: str
    desired_version: str
    rows: int
    dimension: int
    truncated: int
    writer: str = WRITER

    def to_metadata(self) -> dict[bytes, bytes]:
        """The footer metadata, with the digest that guards it."""
        return guarded_metadata(self, FORMAT)


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


def desired_version(content: str, space: str) -> str:
    """Hash of a content digest (or, until that is known, a source version) and a space name, 32 hex digits."""
    return hashlib.sha256(f"surge.desired.1\0{content}\0{space}".encode()).hexdigest()[:32]


def read_facts(footer: pq.FileMetaData) -> FileFacts:
    """The facts in a footer.

    Raises:
        InvalidFile: the footer was not written by this format, or was changed since.
    """
    return read_guarded(footer, FileFacts, FORMAT)


def guarded_metadata(facts: Facts, file_format: str, others: Mapping[bytes, bytes] | None = None) -> dict[bytes, bytes]:
    """Facts as `surge.*` entries, with `others` among them, and the digest that guards them all."""
    entries = {_FORMAT_ENTRY: file_format.encode()}
    for name, key in _entry_keys(type(facts)):
        entries[key] = str(getattr(facts, name)).encode("utf-8", "surrogatepass")
    entries.update(others or {})
    entries[_DIGEST_ENTRY] = _metadata_digest(entries)
    return entries


def read_guarded(footer: pq.FileMetaData, kind: type[AnyFacts], file_format: str) -> AnyFacts:
    """The facts of one format in a footer.

    Raises:
        InvalidFile: the footer was not written by this format, or was changed since.
    """
    entries = {key: value for key, value in (footer.metadata or {}).items() if key.startswith(b"surge.")}
    facts = facts_of(entries, kind, file_format)
    if footer.num_rows != facts.rows:
        raise InvalidFile(f"its metadata promise {facts.rows:,} rows and it has {footer.num_rows:,}")
    return facts


def facts_of(entries: Mapping[bytes, bytes], kind: type[AnyFacts], file_format: str) -> AnyFacts:
    """The facts in a footer's `surge.*` entries, once their digest is right.

    Raises:
        InvalidFile: they were not written by this format, or were changed since.
    """
    written_as = entries.get(_FORMAT_ENTRY)
    if written_as != file_format.encode():
        found = None if written_as is None else written_as.decode("utf-8", "replace")
        raise InvalidFile(f"its metadata name the format {found!r}; expected {file_format!r}")
    if entries.get(_DIGEST_ENTRY) != _metadata_digest(entries):
        raise InvalidFile("its metadata do not match their own digest: the footer was changed after it was written")
    try:
        return kind(*[read(entries[key]) for key, read in _readers(kind)])
    except (KeyError, ValueError) as error:
        raise InvalidFile(f"its metadata are incomplete ({error})") from error


def entry_names(kind: type[Facts]) -> tuple[bytes, ...]:
    """Names of all entries that facts of this kind have in a footer."""
    return (_FORMAT_ENTRY, *(key for key, _ in _readers(kind)), _DIGEST_ENTRY)


@cache  # a run reads a footer per partition before it begins
def _readers(kind: type[Facts]) -> list[tuple[bytes, Callable[[bytes], Any]]]:
    return [(f"surge.{f.name}".encode(), int if f.type == "int" else _text) for f in fields(kind)]


@cache  # and writes one
def _entry_keys(kind: type[Facts]) -> list[tuple[str, bytes]]:
    return [(f.name, f"surge.{f.name}".encode()) for f in fields(kind)]


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


@lru_cache(maxsize=64)
def schema(id_type: pa.DataType, dimension: int, dtype: str, *, include_text: bool) -> pa.Schema:
    """The columns of format 1."""
    columns = [pa.field("id", id_type, nullable=False)]
    if include_text:
        columns.append(pa.field("text", pa.large_string(), nullable=False))
    columns.append(
        pa.field(
            "embedding", pa.list_(pa.field("item", _DTYPES[np.dtype(dtype)], nullable=False), dimension), nullable=False
        )
    )
    return pa.schema(columns)


def check_schema(found: pa.Schema, *, dimension: int, dtype: str) -> None:
    """Refuse a file whose columns are not those of format 1.

    Raises:
        InvalidFile: a column is missing, superfluous or of another type.
    """
    id_type = found.field("id").type if "id" in found.names else None
    if id_type not in (pa.string(), pa.int64(), pa.binary()):
        raise InvalidFile(f"its id column has type {id_type}; expected string, int64 or binary")
    expected = schema(id_type, dimension, dtype, include_text="text" in found.names)
    if _flat(found) != _flat(expected):
        raise InvalidFile(f"its columns are {_flat(found)}; expected {_flat(expected)}")


def piece_bytes(rows: int, dimension: int, itemsize: int, widest_text_bytes: int) -> int:
    """Upper estimate of the memory that writing `rows` rows takes beside the rows themselves, in bytes.

    Columns are written one after the other. Embeddings need repetition and definition levels, four bytes per value of
    a row group, in buffers that grow by copying; float16, a fixed-size binary to Parquet, needs a pointer per value
    too. Strings are collected by `WRITE_BATCH_ROWS` and pages of 256 KiB: plain, compressed and on the way.

    Args:
        widest_text_bytes: what `page_window_bytes` gives for the ids or the texts, whichever is more.
    """
    values = min(rows, row_group_rows(dimension, itemsize)) * dimension
    embeddings = values * levels_bytes(itemsize) + min(2 * rows * dimension * itemsize, 2 * PAGE_BYTES)
    return _PIECE_BYTES + max(embeddings, STRING_COPIES * widest_text_bytes)


def levels_bytes(itemsize: int) -> int:
    """Memory that writing one value of an embedding takes, in bytes."""
    return 8 if itemsize == 4 else 16


def page_window_bytes(total: int, longest: int) -> int:
    """Most bytes of strings that are collected at once, of `total` bytes of which the longest string has `longest`."""
    return min(total, PAGE_BYTES + WRITE_BATCH_ROWS * longest)


def page_bytes(footer: pq.FileMetaData, widest_row: int) -> int:
    """Upper estimate of the memory that a reader of a file takes for its pages of ids and texts, in bytes.

    A reader holds a page of each column, as it was stored and as it was before that, however few rows it is asked for.

    Args:
        widest_row: most bytes of id and text that a row has.
    """
    window = PAGE_BYTES + WRITE_BATCH_ROWS * widest_row
    most = 0
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        chunks = [group.column(place) for place in range(group.num_columns)]
        strings = [chunk for chunk in chunks if chunk.path_in_schema in ("id", "text")]
        pages = [(chunk.total_uncompressed_size, chunk.total_compressed_size) for chunk in strings]
        most = max(most, sum(min(plain, window) + min(stored, window) for plain, stored in pages))
    return most


def rows_at_a_time(widest_row: int, dimension: int, itemsize: int) -> int:
    """How many rows to read at a time, so that they are about `READ_BYTES`."""
    return max(1, min(_MOST_READ_ROWS, READ_BYTES // (widest_row + dimension * itemsize)))


def row_group_rows(dimension: int, itemsize: int) -> int:
    """Rows of a full row group: at most 65,536, and at most 1 MiB of embeddings."""
    return max(1, min(MAX_ROW_GROUP_ROWS, _ROW_GROUP_BYTES // (dimension * itemsize)))


def embedding_table(
    columns: pa.Schema, ids: pa.Array | pa.ChunkedArray, texts: pa.Array | None, matrix: np.ndarray
) -> pa.Table:
    """Rows as a table; `matrix` has shape [rows, dimension], is contiguous and is referred to, not copied."""
    values = pa.Array.from_buffers(_arrow_type(matrix), matrix.size, [None, pa.py_buffer(matrix)])
    embeddings = pa.FixedSizeListArray.from_arrays(values, type=columns.field("embedding").type)
    arrays = [ids, embeddings] if texts is None else [ids, texts, embeddings]
    return pa.Table.from_arrays(arrays, schema=columns)


class EmbeddingFileWriter:
    """Writes one partition, in one piece or in several, as row groups.

    Args:
        sink: an open Arrow output stream or file-like object; the caller closes it.
        id_type: string, int64 or binary.
        dimension, dtype: of the vectors.
        include_text: whether the file has a text column.
        compress: whether ids and texts are compressed.
    """

    def __init__(
        self,
        sink: pa.NativeFile,
        id_type: pa.DataType,
        dimension: int,
        dtype: str,
        *,
        include_text: bool,
        compress: bool = True,
    ) -> None:
        self.schema = schema(id_type, dimension, dtype, include_text=include_text)
        self.row_group_rows = row_group_rows(dimension, np.dtype(dtype).itemsize)
        self._writer = pq.ParquetWriter(
            sink,
            self.schema,
            version="2.6",
            use_dictionary=False,
            write_statistics=False,
            compression=_COMPRESSED if compress else "none",  # pyright: ignore[reportArgumentType]
            write_page_checksum=True,
            write_batch_size=WRITE_BATCH_ROWS,
            data_page_size=PAGE_BYTES,
            use_compliant_nested_type=False,  # the list's values are called "item", as Arrow calls them
        )
        self.rows = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self._writer.is_open:
            # The file is thrown away; that its footer could not be written either is of no interest.
            with contextlib.suppress(OSError, pa.ArrowException):
                self._writer.close()

    def append(self, ids: pa.Array | pa.ChunkedArray, texts: pa.Array | None, matrix: np.ndarray) -> None:
        """Write rows; `matrix` has shape [rows, dimension], is contiguous and is referred to, not copied."""
        self.append_table(embedding_table(self.schema, ids, texts, matrix))

    def append_table(self, table: pa.Table) -> None:
        """Write rows that have the file's schema already."""
        if table.num_rows:
            self._writer.write_table(table, row_group_size=self.row_group_rows)
        self.rows += table.num_rows

    def close(self, facts: Facts) -> None:
        """Write the footer, with the facts that are known only now."""
        self._writer.add_key_value_metadata(facts.to_metadata())
        self._writer.close()


def write_parquet_file(upload: Upload, rows: FileRows, facts: FileFacts) -> None:
    """Write a whole output file."""
    texts, matrix = rows.texts, rows.matrix
    text_bytes = 0 if texts is None else _string_bytes(texts)
    content_bytes = matrix.nbytes + text_bytes + sum(part.nbytes for part in rows.ids)
    is_small = content_bytes <= _HELD_WHOLE_BYTES
    sink: Any = pa.BufferOutputStream() if is_small else upload.sink
    with EmbeddingFileWriter(
        sink,
        rows.id_type,
        matrix.shape[1],
        str(matrix.dtype),
        include_text=texts is not None,
        compress=texts is None or text_bytes >= LEAST_COMPRESSED_BYTES,
    ) as writer:
        writer.append(pa.chunked_array(list(rows.ids), type=rows.id_type), texts, matrix)
        writer.close(facts)
    if is_small:
        upload.write(sink.getvalue().to_pybytes())


def read_rows(
    reader: pq.ParquetFile,
    *,
    columns: list[str] | None = None,
    batch_rows: int = 4096,
    row_groups: list[int] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Stream the rows of an output file, checking page checksums if the reader was opened to do so.

    Raises:
        InvalidFile: a page is damaged.
        OSError: the system did not give it.
    """
    try:
        yield from reader.iter_batches(batch_rows, row_groups=row_groups, columns=columns, use_threads=False)
    except UNREADABLE as error:
        if is_systems(error):
            raise
        raise InvalidFile(f"its pages cannot be read ({first_line(error)})") from error


def matrix_of(batch: pa.RecordBatch) -> np.ndarray:
    """The embeddings of a batch as a [rows, dimension] matrix, without a copy."""
    column = batch.column("embedding")
    return column.flatten().to_numpy(zero_copy_only=True).reshape(len(column), -1) if len(column) else np.empty((0, 0))


def _arrow_type(matrix: np.ndarray) -> pa.DataType:
    return _DTYPES[matrix.dtype]


def _string_bytes(column: pa.Array) -> int:
    offsets = value_offsets(column)
    return int(offsets[-1]) - int(offsets[0])


def _flat(found: pa.Schema) -> str:
    return ", ".join(f"{column.name}: {column.type}{'' if column.nullable else ' not null'}" for column in found)


def _metadata_digest(entries: Mapping[bytes, bytes]) -> bytes:
    guarded = [part for key in sorted(entries) if key != _DIGEST_ENTRY for part in (key, b"\0", entries[key], b"\n")]
    return _digest_of(b"".join(guarded))


def _digest_of(guarded: bytes) -> bytes:
    return hashlib.sha256(guarded).hexdigest()[:32].encode()
