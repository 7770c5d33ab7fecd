"""The formats of source files. A format is one reader function and one line in `FORMATS`.

A reader yields record batches of a few megabytes, whatever the file expands to, and at least one
batch, which may be empty: it carries the types. What it cannot read it refuses with
`FileRead.refused`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from surge_dagster.engine.errors import SurgeError, TransientError
from surge_dagster.engine.sources.arrow_files import read_arrow
from surge_dagster.engine.sources.csv_files import read_csv
from surge_dagster.engine.sources.file_read import FileRead
from surge_dagster.engine.sources.json_files import read_json
from surge_dagster.engine.sources.listing import SourceFile
from surge_dagster.engine.sources.parquet_files import read_parquet
from surge_dagster.engine.support.unreadable import UNREADABLE, first_line, is_systems, not_given


@dataclass(frozen=True, slots=True)
class Format:
    """One format.

    Attributes:
        endings: lower case; the file's name may have any case.
        compressed: whether `.gz` or `.zst` may follow the ending.
    """

    endings: tuple[str, ...]
    read: Callable[[FileRead], Iterator[pa.RecordBatch]]
    compressed: bool = False

    @property
    def all_endings(self) -> tuple[str, ...]:
        packed = ("", ".gz", ".zst") if self.compressed else ("",)
        return tuple(ending + each for ending in self.endings for each in packed)


PARQUET = Format((".parquet", ".pq"), read_parquet)
FORMATS = (
    PARQUET,
    Format((".arrow", ".arrows", ".feather", ".ipc"), read_arrow),
    Format((".csv", ".tsv"), read_csv, compressed=True),
    Format((".jsonl", ".ndjson", ".json"), read_json, compressed=True),
)
_COMPRESSED = [each.endings[0] for each in FORMATS if each.compressed]
ENDINGS_IN_WORDS = (
    f"{', '.join(each.endings[0] for each in FORMATS)} ({' and '.join(_COMPRESSED)} also with .gz "
    "or .zst)"
)
_BY_ENDING = {ending: each for each in FORMATS for ending in each.all_endings}
_ENDINGS = tuple(_BY_ENDING)


def is_source_file(name: str) -> bool:
    """Return whether a file of this name has a known format."""
    return name.lower().endswith(_ENDINGS)


def ending_of(name: str) -> str:
    """Return the ending that names the format of a file, as it is written; "" if it has none."""
    lower = name.lower()
    for ending in _ENDINGS:
        if lower.endswith(ending):
            return name[-len(ending) :]
    return ""


def format_of(name: str) -> Format | None:
    """Return the format of a file, None if its name has no known ending."""
    return _BY_ENDING.get(ending_of(name).lower())


def batches(
    file: SourceFile,
    columns: Sequence[str],
    *,
    key: str | None = None,
    encoding: str = "utf-8",
    rows: tuple[int, int] | None = None,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file in its order; see `FileRead` for the arguments.

    Raises:
        DataError: the file cannot be read; without a key it is a `ConfigError`.
        TransientError: its storage does not return it, or it was replaced since it was listed.
    """
    request = FileRead(file, list(columns), key, encoding, rows)
    if file.refusal:
        raise request.refused(file.refusal, "Replace it by a regular file, or remove it.")
    kind = format_of(file.relative)
    if kind is None:
        remedy = f"Give it an ending that names its format: {ENDINGS_IN_WORDS}."
        raise request.refused("is of an unknown format", remedy)
    try:
        yield from kind.read(request)
    except SurgeError:
        raise
    except FileNotFoundError as error:
        message = f"the file {file.shown} was removed while it was read. Run again."
        raise TransientError(message) from error
    except (*UNREADABLE, ValueError) as error:
        if is_systems(error):
            raise not_given(file.shown, error, key) from error
        reason = f"cannot be read ({first_line(error)})"
        raise request.refused(reason, "Write the file again, then run again.") from error
