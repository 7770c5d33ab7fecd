"""A listed file, and what the reader of its format gets: the columns that are wanted, and how to
refuse it."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePath

import pyarrow as pa

from surge_dagster.engine.errors import ConfigError, DataError, SurgeError
from surge_dagster.engine.sources.bad_rows import REASON
from surge_dagster.engine.sources.batching import column_problem, without_rows
from surge_dagster.engine.store.store import StoredObject
from surge_dagster.engine.support.keys import printable
from surge_dagster.engine.support.printable import visible

BLOCK_BYTES = 2 * 1024 * 1024  # of text that is parsed at a time
CODECS = {".gz": "gzip", ".zst": "zstd"}
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file, as it was listed.

    Attributes:
        relative: not valid text if a name on the disk is not UTF-8.
        stored: what was listed in the source's store.
        token: changes when the content may have changed: the etag, or size and modification time.
        open: opens this version of the file; FileNotFoundError if it was removed or replaced.
        refusal: why it must not be opened, as the end of a sentence that begins with its name.
    """

    relative: str
    stored: StoredObject
    token: str
    open: Callable[[], pa.NativeFile]
    refusal: str | None = None

    @property
    def size(self) -> int:
        return self.stored.size

    @property
    def shown(self) -> str:
        return visible(printable(self.relative))


@dataclass(frozen=True, slots=True)
class FileRead:
    """One reading of a file.

    Attributes:
        columns: also fields inside of structs and objects, such as `doc.title`.
        key: partition of the whole file; None for a file of a table.
        encoding: of CSV files, as Python names it.
        escape: the character of CSV files before a quote in quotes, if they do not write it twice.
        rows: of a Parquet file, the first row and the row after the last; None reads all.
        sets_aside: whether a row of a text file that cannot be parsed is one of nulls, with a
            `REASON`, instead of refusing the file.
    """

    file: SourceFile
    columns: list[str]
    key: str | None = None
    encoding: str = "utf-8"
    escape: str | None = None
    rows: tuple[int, int] | None = None
    sets_aside: bool = False

    def refused(self, reason: str, remedy: str) -> SurgeError:
        """Return the error that refuses the file: of its partition, or of the whole table."""
        text = f"the file {self.file.shown} {reason}"
        if self.key is None:
            return ConfigError(f"{text}. {remedy}")
        return DataError(self.key, text, remedy)

    def require_columns(self, names: Sequence[str]) -> None:
        """Refuse a file that does not have each wanted column exactly once."""
        settings = "id, text and columns"
        if self.key is None:
            settings = "id, text, columns and partition_by"
        problem = column_problem(names, self.columns, settings)
        if problem is not None:
            raise self.refused(*problem)

    @property
    def parsed_columns(self) -> list[str]:
        """The columns of rows of a text file."""
        return [*self.columns, REASON] if self.sets_aside else self.columns

    def empty(self, schema: pa.Schema) -> pa.RecordBatch:
        """Return a batch without rows, which has the types of the wanted columns."""
        return without_rows(schema, self.columns)

    @contextmanager
    def decompressed(self) -> Iterator[io.BufferedReader]:
        """Open the file for reading its text as bytes."""
        codec = CODECS.get(PurePath(self.file.relative).suffix.lower())
        with self.file.open() as opened:
            stream = opened
            if codec is not None:
                stream = pa.CompressedInputStream(opened, codec)
            with stream:
                yield io.BufferedReader(stream, BLOCK_BYTES)  # pyright: ignore[reportArgumentType]

    def refuse_utf16(self, stream: io.BufferedReader, remedy: str) -> None:
        """Refuse a text file that begins with the mark of UTF-16, or as Latin text does in it."""
        head = stream.peek()[:1024]
        if head.startswith(_UTF16_MARKS) or 4 * head.count(0) > len(head):
            raise self.refused("is not UTF-8 text but UTF-16", remedy)
