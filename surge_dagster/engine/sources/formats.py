"""The formats of source files. A format is one reader function, by the endings of its files, which
may be upper case.

A reader yields record batches of a few megabytes, whatever the file expands to, and at least one
batch, which may be empty: it carries the types. What it cannot read it refuses with
`FileRead.refused`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from surge_dagster.engine.errors import SurgeError, TransientError
from surge_dagster.engine.sources.arrow_files import read_arrow
from surge_dagster.engine.sources.csv_files import read_csv
from surge_dagster.engine.sources.file_read import CODECS, FileRead, SourceFile
from surge_dagster.engine.sources.json_files import read_json
from surge_dagster.engine.sources.parquet_files import read_parquet
from surge_dagster.engine.support.printable import first_line
from surge_dagster.engine.support.unreadable import UNREADABLE, is_systems, not_given

PARQUET_ENDINGS = (".parquet", ".pq")


def _packed(*endings: str) -> list[str]:
    """Return the endings of text files, then those with the endings of codecs."""
    return [ending + codec for codec in ("", *CODECS) for ending in endings]


# Each format with its endings, the usual one first.
_FORMATS = (
    (read_parquet, PARQUET_ENDINGS),
    (read_arrow, (".arrow", ".arrows", ".feather", ".ipc")),
    (read_csv, _packed(".csv", ".tsv")),
    (read_json, _packed(".jsonl", ".ndjson", ".json")),
)
READERS = {ending: read for read, endings in _FORMATS for ending in endings}
_ENDINGS = tuple(READERS)
_USUAL = ", ".join(endings[0] for _, endings in _FORMATS)
ENDINGS_IN_WORDS = f"{_USUAL} (text files also with {' or '.join(CODECS)})"


def is_source_file(name: str) -> bool:
    """Return whether a file of this name has a known format."""
    return name.lower().endswith(_ENDINGS)


def ending_of(name: str) -> str:
    """Return the ending that names the format of a file, as it is written; "" if it has none."""
    for ending in READERS:
        if name.lower().endswith(ending):
            return name[-len(ending) :]
    return ""


def batches(
    file: SourceFile,
    columns: Sequence[str],
    *,
    key: str | None = None,
    encoding: str = "utf-8",
    escape: str | None = None,
    rows: tuple[int, int] | None = None,
    sets_aside: bool = False,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file in its order; see `FileRead` for the arguments.

    Raises:
        DataError: the file cannot be read; without a key it is a `ConfigError`.
        TransientError: its storage does not return it, or it was replaced since it was listed.
    """
    request = FileRead(file, list(columns), key, encoding, escape, rows, sets_aside)
    if file.refusal:
        raise request.refused(file.refusal, "Replace it by a regular file, or remove it.")
    read = READERS.get(ending_of(file.relative).lower())
    if read is None:
        remedy = f"Give it an ending that names its format: {ENDINGS_IN_WORDS}."
        raise request.refused("is of an unknown format", remedy)
    try:
        yield from read(request)
    except SurgeError:
        raise
    except FileNotFoundError as error:
        message = f"the file {file.shown} was replaced or removed while it was read. Run again."
        raise TransientError(message) from error
    except (*UNREADABLE, ValueError) as error:
        if is_systems(error):
            raise not_given(file.shown, error, key) from error
        reason = f"cannot be read ({first_line(error)})"
        raise request.refused(reason, "Write the file again, then run again.") from error
