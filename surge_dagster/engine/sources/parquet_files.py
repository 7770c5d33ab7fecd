"""The Parquet files of one partition folder: what their footers declare, their version tokens, and their rows.

A process that lists the same catalog again and again, as a sensor does, would spend most of its time on footers that
have not changed. Footers are therefore kept by path, size, times and inode: a file that was written in place, replaced
by a rename or given its old modification time again differs in one of them.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from surge_dagster.engine.sources.endings import is_source_file
from surge_dagster.engine.sources.listing import NOT_REGULAR, local_names, refused_link
from surge_dagster.engine.sources.partition import KEY_METADATA, SOURCE_VERSION_METADATA
from surge_dagster.engine.sources.rows import without_dictionary
from surge_dagster.engine.sources.selection import Selection
from surge_dagster.engine.support.columns import value_lengths
from surge_dagster.engine.support.unreadable import UNREADABLE, is_systems, visible

_BATCH_BYTES = 2 * 1024 * 1024
_BATCH_ROWS = 8192
_READ_ROWS = 256  # per read of the file: half as fast as thousands
# What a read may decode where a few bytes stand for many: rows share a dictionary's entry, or the beginning of a text.
_DECODED_BYTES = 16 * 1024 * 1024
# What reading a row group takes of its uncompressed size: a page may hold all of it, compressed and uncompressed, and
# its long texts may come in one batch (measured: 3.0).
_COPIES = 3
_DICTIONARY_COPIES = 6  # pyarrow holds a column of a dictionary type as pages, builders and chunks (measured: 5.7)
_FEW_READ_ROWS = 64  # below it, looking at the dictionaries pays
_DICTIONARY_BYTES = 2 * 1024 * 1024  # compressed: larger ones take too long to look at
_VERSION_BYTES = 250  # a database index has room for little
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")  # some databases refuse NUL
_SETTLED_NS = 2_000_000_000  # longer than the grain of any disk's clock: a younger file may change unnoticed
_KNOWN_FOOTERS = 1 << 17
OTHER_FORMAT = "is of another format: of local folders named partition=… only files ending in .parquet are read"


@dataclass(frozen=True, slots=True)
class Footer:
    """Facts from a file's footer that a listing needs.

    Attributes:
        version, key: as the file declares them, None where it does not.
        rows: of the file.
        row_bytes: of all columns, uncompressed.
        group_bytes: memory that reading the largest row group may take.
    """

    version: str | None
    key: str | None
    rows: int
    row_bytes: int
    group_bytes: int


@dataclass(frozen=True, slots=True)
class PartitionFile:
    """One file of a partition, as a listing showed it.

    Attributes:
        relative: name relative to the partition's folder.
        path: full path; neither is valid text where a name on the disk is not UTF-8.
        token: the source version that the file declares, or its size and modification time.
        declared_key: the partition key that the file declares.
        rows: None where the footer cannot be read.
        text_bytes: estimated; the file's own size where the footer cannot be read.
        refusal: why it is never opened; it refuses its partition.
        page_bytes: memory that reading its largest row group may take.
    """

    relative: str
    path: str
    token: str
    declared_key: str | None
    rows: int | None
    text_bytes: int
    refusal: str | None = None
    page_bytes: int = 0

    @property
    def shown(self) -> str:
        """The name in messages."""
        return visible(self.relative)


def partition_files(root: str, folder: str) -> list[PartitionFile]:
    """The Parquet files below a partition's folder, in bytewise order of their relative names.

    Args:
        root: the catalog, which no link may leave.
        folder: name of the partition's folder.

    Raises:
        OSError: the system does not show them.
    """
    path = f"{root}/{folder}"
    # A Path for each folder costs more.
    if os.path.islink(path) and (refusal := refused_link(root, path)):  # noqa: PTH114
        return [_refused(folder, path, refusal)]
    found: list[PartitionFile] = []
    for name, refusal in local_names(root, path, _may_be_read):
        if isinstance(refusal, OSError):
            raise refusal
        full = f"{path}/{name}"
        if refusal is None and not _is_parquet(name):
            refusal = OTHER_FORMAT
        found.append(_refused(name, full, refusal) if refusal else _partition_file(name, full))
    return sorted(found, key=lambda file: os.fsencode(file.relative))


def source_version(tokens: Sequence[tuple[str, str]], suffix: str) -> str:
    """The source version of a partition.

    Args:
        tokens: the name and token of each of its files.
        suffix: of the selection.
    """
    if len(tokens) == 1:
        return tokens[0][1] + suffix
    lines = "".join(f"{relative}\0{token}\n" for relative, token in tokens)
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()[:32] + suffix


def read_columns(key: str, file: PartitionFile, selection: Selection) -> Iterator[pa.RecordBatch]:
    """The selected columns of a file as batches of about two megabytes; a file without rows gives one empty batch.

    Args:
        key: the partition, for messages.
        selection: the columns that are read.

    Raises:
        DataError: a column is missing or there twice.
        OSError, pa.ArrowException, UnicodeError: the file cannot be read.
    """
    with (
        pa.OSFile(file.path) as source,  # given a path, pyarrow looks for its file system first, which takes longer
        pq.ParquetFile(source, pre_buffer=False, buffer_size=1 << 20, page_checksum_verification=True) as reader,
    ):
        schema = reader.schema_arrow
        selection.require_columns(key, file.shown, schema.names)
        columns = selection.columns
        if reader.metadata.num_rows == 0:
            empty = [pa.array([], schema.field(name).type) for name in columns]
            yield pa.RecordBatch.from_arrays(empty, columns)
            return
        rows = rows_per_read(reader, partial(pa.OSFile, file.path), columns, selection.max_text_bytes)
        yield from _gathered(reader.iter_batches(rows, columns=columns, use_threads=False), columns)


def _is_parquet(name: str) -> bool:
    return name.endswith(".parquet")


def _may_be_read(name: str) -> bool:
    """Whether a file has rows of a source: of another format than Parquet it is refused, not left out silently."""
    return _is_parquet(name) or is_source_file(name)


def _refused(relative: str, path: str, refusal: str) -> PartitionFile:
    return PartitionFile(relative, path, "refused", None, None, 0, refusal)


def _partition_file(relative: str, path: str) -> PartitionFile:
    try:
        status = os.stat(path)  # noqa: PTH116, a Path for each file costs more than looking at it
        if not stat.S_ISREG(status.st_mode):  # opening a pipe may never return
            return _refused(relative, path, NOT_REGULAR)
        token = f"{status.st_size}-{status.st_mtime_ns}"
        try:
            footer = _footer_of(path, status)
        except UNREADABLE as error:
            if is_systems(error):
                raise
            return PartitionFile(relative, path, token, None, None, status.st_size)
    except (FileNotFoundError, NotADirectoryError):
        return PartitionFile(relative, path, "removed", None, None, 0)
    return PartitionFile(
        relative,
        path,
        footer.version or token,
        footer.key,
        footer.rows,
        footer.row_bytes,
        page_bytes=footer.group_bytes,
    )


def _footer_of(path: str, status: os.stat_result) -> Footer:
    changed_ns = max(status.st_mtime_ns, status.st_ctime_ns)
    read = _known_footer if time.time_ns() - changed_ns > _SETTLED_NS else _known_footer.__wrapped__
    return read(path, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)


@lru_cache(maxsize=_KNOWN_FOOTERS)
def _known_footer(path: str, size: int, mtime_ns: int, ctime_ns: int, inode: int) -> Footer:
    return _footer(path)


def _footer(path: str) -> Footer:
    with pa.OSFile(path) as file:  # given a path, pyarrow looks for its file system first, which takes longer
        return read_footer(file)


def read_footer(file: pa.NativeFile) -> Footer:
    """What the footer of an open file says.

    Raises:
        OSError, pa.ArrowException, UnicodeError: it cannot be read.
    """
    footer = pq.read_metadata(file)
    declared = footer.metadata or {}
    # Of all columns, as an estimate of the texts: see `unreadable` for why not of the text column alone.
    group_bytes = [footer.row_group(group).total_byte_size for group in range(footer.num_row_groups)]
    version, key = (
        declared[name].decode("utf-8", "replace") if name in declared else None
        for name in (SOURCE_VERSION_METADATA, KEY_METADATA)
    )
    copies = _DICTIONARY_COPIES if _has_dictionaries(declared.get(b"ARROW:schema", b"")) else _COPIES
    most = copies * max(group_bytes, default=0)
    return Footer(version and _recordable(version), key, footer.num_rows, sum(group_bytes), most)


@lru_cache(maxsize=64)  # the files of a catalog have few schemas
def _has_dictionaries(arrow_schema: bytes) -> bool:
    """Whether the Arrow schema in a footer has columns of a dictionary type, such as categoricals of pandas."""
    try:
        schema = pa.ipc.read_schema(pa.BufferReader(base64.b64decode(arrow_schema)))
    except (*UNREADABLE, ValueError):
        return False
    return any(pa.types.is_dictionary(field.type) for field in schema)


def _recordable(version: str) -> str:
    """A declared version as any database can keep it: one that is long or has control characters ends in a digest."""
    raw = version.encode()
    if len(raw) <= _VERSION_BYTES and not _CONTROL.search(version):
        return version
    return f"{_CONTROL.sub('?', version[:40])}~{hashlib.sha256(raw).hexdigest()[:32]}"


def rows_per_read(
    reader: pq.ParquetFile,
    open_again: Callable[[], pa.NativeFile],
    columns: list[str],
    longest_text: int,
    most: int = _READ_ROWS,
) -> int:
    """How many rows of an open file to read at once, so that what is decoded is bounded.

    Args:
        open_again: opens the same file once more.
        longest_text: bytes of a value that need not be read.
        most: rows of a read where every row is small.
    """
    groups = [reader.metadata.row_group(group) for group in range(reader.num_row_groups)]
    heaviest = max((group.total_byte_size / max(1, group.num_rows) for group in groups), default=1.0)
    # The mean deceives where rows share what is stored once; a text is still no longer than all that is stored.
    longest = max(1, min(longest_text, max((group.total_byte_size for group in groups), default=1)))
    if _DECODED_BYTES // longest < _FEW_READ_ROWS:
        with contextlib.suppress(*UNREADABLE):  # reading itself reports what cannot be read
            longest = _longest_shared(reader, open_again, columns) or longest
    texts = max(1, len(columns) - 1)  # beside the ids
    return max(1, min(most, int(_BATCH_BYTES / max(1.0, heaviest)), _DECODED_BYTES // (texts * longest)))


def _longest_shared(reader: pq.ParquetFile, open_again: Callable[[], pa.NativeFile], columns: list[str]) -> int | None:
    """Most bytes of a value in the dictionaries of these columns; None where other values may be stored once, too."""
    paths = [reader.metadata.schema.column(place).path for place in range(reader.metadata.num_columns)]
    longest = 1
    for group in range(reader.num_row_groups):
        first = next(reader.iter_batches(1, row_groups=[group], columns=columns, use_threads=False), None)
        for name in columns:  # their facts are safe to look at now that their pages were: see `unreadable`
            if name not in paths:
                return None
            column: Any = None if first is None else first.column(name)
            if isinstance(column, pa.DictionaryArray):
                values = column.dictionary
                longest = max(longest, int(value_lengths(values).max(initial=0)))
                continue
            chunk = reader.metadata.row_group(group).column(paths.index(name))
            if "DELTA_BYTE_ARRAY" in chunk.encodings:
                return None
            dictionary_bytes = chunk.data_page_offset - (chunk.dictionary_page_offset or chunk.data_page_offset)
            if dictionary_bytes > _DICTIONARY_BYTES:
                return None
    with open_again() as source, pq.ParquetFile(source, pre_buffer=False, read_dictionary=columns) as dictionaries:
        for group in range(reader.num_row_groups):
            for batch in dictionaries.iter_batches(1, row_groups=[group], columns=columns, use_threads=False):
                for column in batch.columns:
                    if isinstance(column, pa.DictionaryArray):
                        longest = max(longest, int(value_lengths(column.dictionary).max(initial=0)))
                break
    return longest


def _gathered(read: Iterator[pa.RecordBatch], columns: list[str]) -> Iterator[pa.RecordBatch]:
    """The columns without dictionaries, in batches that are large enough to be worth the later steps."""
    held: list[list[pa.Array]] = []
    rows = size = 0
    for raw in read:
        arrays = [without_dictionary(raw.column(name)) for name in columns]
        weight = sum(array.nbytes for array in arrays)
        if held and (rows + len(raw) > _BATCH_ROWS or size + weight > _BATCH_BYTES):
            yield _joined(held, columns)
            held, rows, size = [], 0, 0
        held.append(arrays)
        rows, size = rows + len(raw), size + weight
    if held:
        yield _joined(held, columns)


def _joined(held: list[list[pa.Array]], columns: list[str]) -> pa.RecordBatch:
    arrays = held[0] if len(held) == 1 else [pa.concat_arrays(pieces) for pieces in zip(*held, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, columns)
