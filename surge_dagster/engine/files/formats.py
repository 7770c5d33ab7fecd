"""Open output files, read what a file states about itself, and say what is wrong with it.

A file is open for reading only after its columns and facts were compared with its space and place.
What is wrong then, or while its rows are read, is one of three errors: `InvalidFile`,
`FileNotFoundError` if it was removed or replaced, or `TransientError` if the system did not give
it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import pyarrow as pa
import pyarrow.parquet as pq

from surge_dagster.engine.errors import DataError, StoreUnavailable, TransientError
from surge_dagster.engine.files.facts import FileFacts, Flaw, InvalidFile, explained
from surge_dagster.engine.files.parquet import OutputFile, read_facts
from surge_dagster.engine.files.rows import check_schema
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.store.store import Store, StoredObject
from surge_dagster.engine.support.keys import decode_key, encode_key

SUFFIX = ".parquet"
END_BYTES = 8 * 1024


@dataclass(frozen=True, slots=True)
class PublishedFile:
    """A valid output file: where it lies, and what it states about itself."""

    stored: StoredObject
    facts: FileFacts
    columns: pa.Schema


def file_name(space: str, key: str) -> str:
    """Return the name of a partition's output file within the store."""
    return f"{space}/{encode_key(key)}{SUFFIX}"


def read_shape(source: pa.NativeFile) -> tuple[pa.Schema, int]:
    """Return the columns and the number of rows of a file, whatever its metadata promise; damage
    raises as in `UNREADABLE`."""
    footer = pq.read_metadata(source)
    groups = (footer.row_group(group).num_rows for group in range(footer.num_row_groups))
    # what readers give, whatever the file as a whole counts
    return footer.schema.to_arrow_schema(), sum(groups)


def read_published_file(store: Store, name: str) -> PublishedFile:
    """Return what a file states about itself now, from one read of its end if that is enough;
    raises as `explained`."""
    with explained(store.location(name)):
        end = store.read_end(name, END_BYTES)
        try:
            footer = pq.read_metadata(pa.BufferReader(end.content))
        except pa.ArrowInvalid:  # it is longer, or damaged
            with store.open(name, end.stored) as source:
                footer = pq.read_metadata(source)
        columns = footer.schema.to_arrow_schema().remove_metadata()
        return PublishedFile(end.stored, read_facts(footer, columns), _shared(columns))


@lru_cache(maxsize=64)
def _shared(columns: pa.Schema) -> pa.Schema:
    """Return one object for all files with these columns: a listing keeps the columns of each
    file."""
    return columns


Unusable = InvalidFile | FileNotFoundError | TransientError


@contextlib.contextmanager
def open_published(
    store: Store, space: Space, name: str, listed: PublishedFile | None = None
) -> Iterator[OutputFile]:
    """Open a file of a space for reading; raises the three errors above, also while its rows are
    read.

    Args:
        listed: the only version of the file that is opened.
    """
    location = store.location(name)
    with contextlib.ExitStack() as opened:
        with explained(location):
            source = opened.enter_context(store.open(name, listed and listed.stored))
            reader = OutputFile(source, location=location)
            require_own(space, name, reader.facts, reader.columns)
        yield reader


@contextlib.contextmanager
def open_listed(store: Store, space: Space, file: PublishedFile) -> Iterator[OutputFile]:
    """Open a file for reading as it was listed. An error while it is read becomes one of the
    partition: `DataError` if the file is damaged, else `TransientError`."""
    name = file.stored.name
    try:
        with open_published(store, space, name, file) as reader:
            yield reader
    except StoreUnavailable:
        raise
    except (InvalidFile, FileNotFoundError, TransientError) as error:
        if isinstance(error, TransientError) and error.key is not None:
            raise
        raise error_of_partition(store, space, name, error, file.facts.partition_key) from error


def usable_file(
    store: Store, space: Space, name: str, file: PublishedFile | Unusable
) -> PublishedFile:
    """Return a listed file of the space, under its own name; raises as `open_listed`."""
    try:
        if not isinstance(file, PublishedFile):
            raise file
        with explained(store.location(name)):
            require_own(space, name, file.facts, file.columns)
    except (InvalidFile, FileNotFoundError, TransientError) as error:
        raise error_of_partition(store, space, name, error) from error
    return file


def require_own(space: Space, name: str, facts: FileFacts, columns: pa.Schema) -> None:
    """Raise `InvalidFile` for a file of another space or partition than its name says, or with
    other columns."""
    if facts.space != space.name:
        raise InvalidFile(
            f"it holds vectors of the space {facts.space!r}; expected {space.name!r}", "space"
        )
    if file_name(space.name, facts.partition_key) != name:
        raise InvalidFile(
            f"it is the file of partition {facts.partition_key!r}, under another name", "place"
        )
    if facts.dimension != space.dimension:
        raise InvalidFile(
            f"it states that its vectors have dimension {facts.dimension}; expected "
            f"{space.dimension}",
            "dimension",
        )
    check_schema(columns, dimension=space.dimension, dtype=space.dtype)


def error_of_partition(
    store: Store, space: Space, name: str, error: Unusable, key: str | None = None
) -> DataError | TransientError:
    """Return the error of a partition whose file cannot be used; without `key`, it is read from the
    name as far as possible."""
    if key is None:
        key = _key_in_name(space, name)
    if isinstance(error, FileNotFoundError):
        return TransientError(
            f"partition {key!r}: {store.location(name)!r} was replaced or removed after the "
            "embeddings were opened. Open them again.",
            key,
        )
    if isinstance(error, TransientError):
        return TransientError(f"partition {key!r}: {error}", key)
    return DataError(
        key, str(error), f"{remedy_of(space, error.flaw)} Or choose partitions without it."
    )


def remedy_of(space: Space, flaw: Flaw = "damaged") -> str:
    """Return what to do about a file of the space that is not valid, or does not hold the rows of
    its source."""
    if space.derived:
        return "Remove the file and derive the space again (`surge-dagster derive`)."
    if flaw == "space":
        return "Move it away and run again."
    return (
        "In Dagster, launch the catalog's job embed_partitions with this key and force: true; "
        "without Dagster, remove the file and run again."
    )


def _key_in_name(space: Space, name: str) -> str:
    encoded = name.removeprefix(f"{space.name}/").removesuffix(SUFFIX)
    try:
        return decode_key(encoded) or encoded
    except ValueError:
        return encoded
