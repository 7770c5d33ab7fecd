"""The check of one output file: its facts, and its rows side by side with those of its source partition."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import numpy as np
import pyarrow as pa

from surge_dagster.engine.errors import DataError, TransientError
from surge_dagster.engine.files.facts import FileFacts, InvalidFile, desired_version
from surge_dagster.engine.files.formats import OutputFile, file_name, open_output_file
from surge_dagster.engine.files.rows import check_schema, matrix_of
from surge_dagster.engine.files.validation import invalid_row
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.reencoding import LOWEST_COSINE, SampledRows
from surge_dagster.engine.sources.content import ContentDigest, IdSet, refuse_repeated_id
from surge_dagster.engine.sources.partition import Partition, RowBatch
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.unreadable import UNREADABLE, first_line, is_systems, not_given

Kind = Literal[
    "missing",
    "damaged",
    "space",
    "stale",
    "rows",
    "ids",
    "texts",
    "dimension",
    "finite",
    "length",
    "vectors",
    "source",
    "unread",
    "refused",
    "orphan",
]
_RUN_AGAIN = "Run again."
_REMOVE = "Remove it and run again."
REMOVE_FILE = "Remove the file and run again."


class Fault(Exception):
    """Ends the check of a file.

    Args:
        kind: what is at fault.
        finding: what was expected and what was found.
        remedy: what to do.
    """

    def __init__(self, kind: Kind, finding: str, remedy: str) -> None:
        super().__init__(f"{finding} {remedy}")
        self.kind: Kind = kind
        self.finding = finding
        self.remedy = remedy


def finding_of(error: DataError) -> str:
    """The text of an error without its remedy."""
    return str(error).removesuffix(error.remedy).rstrip()


@contextlib.contextmanager
def opened(store: Store, space: Space, name: str, key: str | None = None) -> Iterator[OutputFile]:
    """A file of the space whose facts are right; errors of reading it become faults.

    Args:
        key: its partition, where the source has one.

    Raises:
        FileNotFoundError: there is none.
        TransientError: it cannot be read now.
    """
    location = store.location(name)
    try:
        with store.open(name) as file, open_output_file(file, space.file_format) as reader:
            _require_facts(reader, space, key, name)
            yield reader
    except FileNotFoundError:
        raise
    except (InvalidFile, *UNREADABLE) as error:
        if is_systems(error):
            raise not_given(repr(location), error) from error
        raise Fault("damaged", f"{location!r}: {first_line(error)}.", _REMOVE) from error


def _require_facts(reader: OutputFile, space: Space, key: str | None, name: str) -> None:
    facts = reader.facts
    if facts.space != space.name:
        raise Fault(
            "space", f"{name!r} holds vectors of the space {facts.space!r}; expected {space.name!r}.", "Move it away."
        )
    if file_name(space.name, facts.partition_key, space.file_format) != name or key not in (None, facts.partition_key):
        raise Fault("ids", f"{name!r} is the file of partition {facts.partition_key!r}.", "Move it away and run again.")
    if facts.dimension != space.dimension:
        raise Fault(
            "dimension",
            f"{name!r} states that its vectors have dimension {facts.dimension}; expected {space.dimension}.",
            _REMOVE,
        )
    if facts.precision not in LOWEST_COSINE:
        raise InvalidFile(f"its metadata name an unknown precision {facts.precision!r}")
    if facts.desired_version != desired_version(facts.content_digest, facts.space):
        raise InvalidFile("its desired version does not follow from its content digest and space")
    check_schema(reader.columns, dimension=space.dimension, dtype=space.dtype)


def compare_with_source(partition: Partition, store: Store, space: Space, samples: SampledRows | None) -> FileFacts:
    """The facts of a partition's file, if the file holds exactly the rows of its source.

    Args:
        samples: gets the rows that are to be encoded again.

    Raises:
        Fault: the file is missing, stale, damaged or different.
        DataError: the rows of the source are invalid.
        TransientError: the source or the file cannot be read now.
    """
    name = file_name(space.name, partition.key, space.file_format)
    location = store.location(name)
    try:
        with opened(store, space, name, partition.key) as reader:
            facts = reader.facts
            if facts.source_version != partition.source_version:
                _require_as_listed(partition)
                raise Fault(
                    "stale",
                    f"{location!r} was made from source version {facts.source_version!r}; the source has "
                    f"{partition.source_version!r} now.",
                    _RUN_AGAIN,
                )
            _compare_rows(partition, reader, space, samples)
            return facts
    except FileNotFoundError:
        _require_readable(partition)
        raise Fault("missing", f"there is no file {location!r}.", _RUN_AGAIN) from None


def _require_as_listed(partition: Partition) -> None:
    if partition.current_source_version() != partition.source_version:
        raise TransientError(f"partition {partition.key!r}: its source changed after it was listed.", partition.key)


def _require_readable(partition: Partition) -> None:
    """Read a partition without a file: if its data are invalid, it must not have one."""
    ids = IdSet()
    try:
        for batch in partition.read():
            ids.add(batch.ids)
        refuse_repeated_id(partition, ids.repeated())
    except DataError as error:
        finding = f"it has no file, because its data are refused: {finding_of(error)}"
        raise Fault("refused", finding, error.remedy) from error


def _compare_rows(partition: Partition, file: OutputFile, space: Space, samples: SampledRows | None) -> None:
    facts, digest, ids = file.facts, ContentDigest(), IdSet()
    row = 0

    def from_source() -> Iterator[RowBatch]:
        for batch in partition.read():
            digest.update(batch)
            ids.add(batch.ids)
            yield batch

    for expected, stored in _aligned(from_source(), file.read()):
        if expected is None or stored is None:
            more = "more" if stored is None else "fewer"
            raise Fault("rows", f"the file has {facts.rows:,} rows and the source {more}.", REMOVE_FILE)
        _require_equal("ids", "id", row, stored.column("id"), expected.ids)
        if "text" in stored.schema.names:
            _require_equal("texts", "text", row, stored.column("text"), expected.texts)
        matrix = matrix_of(stored)
        invalid = invalid_row(matrix, normalized=space.normalize)
        if invalid is not None:
            kind = "finite" if not np.isfinite(matrix[invalid[0]]).all() else "length"
            raise Fault(kind, f"row {row + invalid[0]}: {invalid[1]}.", REMOVE_FILE)
        if samples is not None:
            samples.add(facts, row, expected.texts, matrix)
        row += len(expected)
    if row != facts.rows:
        raise Fault("rows", f"{row:,} rows could be read of the {facts.rows:,} that the file states.", REMOVE_FILE)
    if digest.hexdigest() != facts.content_digest:
        raise Fault("texts", "its content digest is not that of the source's rows.", REMOVE_FILE)
    refuse_repeated_id(partition, ids.repeated())


def _require_equal(kind: Kind, what: str, first_row: int, found: pa.Array, expected: pa.Array) -> None:
    if found.equals(expected):
        return
    for row, (one, other) in enumerate(zip(found.to_pylist(), expected.to_pylist(), strict=True), first_row):
        if one != other:
            finding = f"row {row}: the file has the {what} {_short(one)} and the source {_short(other)}."
            raise Fault(kind, finding, REMOVE_FILE)
    raise Fault(kind, f"the {what} column has type {found.type}; the source's has {expected.type}.", REMOVE_FILE)


def _aligned(
    source: Iterator[RowBatch], file: Iterator[pa.RecordBatch]
) -> Iterator[tuple[RowBatch | None, pa.RecordBatch | None]]:
    """Both streams cut into batches of equal length; the last pair has None for a stream that ended early."""
    source, file = (batch for batch in source if len(batch)), (batch for batch in file if batch.num_rows)
    ours, theirs = next(source, None), next(file, None)
    while ours is not None and theirs is not None:
        rows = min(len(ours), theirs.num_rows)
        yield RowBatch(ours.ids[:rows], ours.texts[:rows]), theirs.slice(0, rows)
        ours = RowBatch(ours.ids[rows:], ours.texts[rows:]) if rows < len(ours) else next(source, None)
        theirs = theirs.slice(rows) if rows < theirs.num_rows else next(file, None)
    if ours is not None or theirs is not None:
        yield ours, theirs


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
