"""The check of one output file: its metadata, and its rows compared with those of its source.

The first fault ends the check, and it is the one that explains most: vectors of another dimension,
then another number of rows, then the first row that differs. Dimension and rows are those of the
file's columns, because another program may have written it. Other faults are "damaged".
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa

from surge_dagster.engine.errors import DataError, TransientError
from surge_dagster.engine.files.facts import FileFacts, InvalidFile
from surge_dagster.engine.files.formats import file_name, open_published, read_shape, remedy_of
from surge_dagster.engine.files.parquet import OutputFile
from surge_dagster.engine.files.rows import OWN_COLUMNS, embedding_type, invalid_row, matrix_of
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.ended_workers import ended_workers_in
from surge_dagster.engine.output.freshness import status_of
from surge_dagster.engine.output.rejected import rejected_from
from surge_dagster.engine.sources.casting import is_blank
from surge_dagster.engine.sources.partition import (
    ContentDigest,
    IdSet,
    Partition,
    RowBatch,
    read_rows,
    refuse_repeated_id,
)
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.cosines import LOWEST_COSINE
from surge_dagster.engine.support.text_hash import text_hashes
from surge_dagster.engine.support.unreadable import UNREADABLE
from surge_dagster.engine.support.values import same_values
from surge_dagster.engine.verify.reencoding import DerivedRows, SampledRows

Samples = SampledRows | DerivedRows
_FileKind = Literal[
    "missing",
    "refused",
    "damaged",
    "space",
    "stale",
    "rows",
    "dimension",
    "source",
    "unread",
    "orphan",
    "unused",
]
Kind = _FileKind | Literal["ids", "texts", "columns", "finite", "length", "vectors"]


@dataclass(eq=False)
class Fault(Exception):
    """Ends the check of a file; see `Violation`. Without a remedy, the file must be made again."""

    kind: Kind
    finding: str
    remedy: str | None = None


def compare_with_source(
    partition: Partition, store: Store, space: Space, samples: Samples | None
) -> FileFacts:
    """Return the facts of a partition's file if it has exactly the rows of its source.

    `samples` gets the rows to encode again.

    Raises:
        Fault: the file is missing or differs.
        DataError: rows of the source are invalid.
    """
    name = file_name(space.name, partition.key)
    location = store.location(name)
    try:
        with opened(store, space, name, partition) as reader:
            facts = reader.facts
            _require_fresh(partition, facts, space, location)
            # without the rows that its file lacks because they ended workers
            partition = ended_workers_in(rejected_from(store, space, facts)).without(partition)
            try:
                _compare_rows(partition, reader, space, samples)
            except Fault as fault:
                is_of_row = fault.kind in ("ids", "texts", "columns")
                if is_of_row and (different := _different_rows(partition, facts.rows)):
                    raise Fault("rows", f"{different} {fault.finding}", fault.remedy) from fault
                raise
            return facts
    except FileNotFoundError:
        _refuse_invalid(partition)
        raise Fault("missing", f"there is no file {location!r}.", _run_again(space)) from None


def _require_fresh(partition: Partition, facts: FileFacts, space: Space, location: str) -> None:
    if status_of(facts, space.name, partition.key, partition.source_version) != "stale":
        return
    if partition.current_source_version() != partition.source_version:
        changed = f"partition {partition.key!r}: its source changed after it was listed."
        raise TransientError(changed, partition.key)
    finding = (
        f"{location!r} was made from source version {facts.source_version!r}; the source has "
        f"{partition.source_version!r} now."
    )
    raise Fault("stale", finding, _run_again(space))


def _run_again(space: Space) -> str:
    if space.derived:
        return "Run again, then derive the space again (`surge-dagster derive`)."
    return "Run again."


@contextlib.contextmanager
def opened(
    store: Store, space: Space, name: str, partition: Partition | None = None
) -> Iterator[OutputFile]:
    """Open a file of the space and check its facts; damage is a `Fault`.

    Args:
        partition: of the source; None if the source does not have it.
    """
    try:
        with open_published(store, space, name) as reader:
            facts = reader.facts
            location = reader.location
            # Long keys may share a name.
            if partition is not None and facts.partition_key != partition.key:
                reason = f"it is the file of partition {facts.partition_key!r}"
                raise InvalidFile(reason, "place", location)
            if facts.precision not in LOWEST_COSINE:
                reason = f"its metadata name an unknown precision {facts.precision!r}"
                raise InvalidFile(reason, location=location)
            yield reader
    except InvalidFile as error:
        raise _fault_of(error, store, space, name, partition) from error


def _fault_of(
    error: InvalidFile, store: Store, space: Space, name: str, partition: Partition | None
) -> Fault:
    """Return the fault of an invalid file: a wrong dimension or number of rows, else the error."""
    location = store.location(name)
    remedy = remedy_of(space, error.flaw)
    kind = "ids" if error.flaw == "place" else error.flaw
    fault = Fault(kind, f"{error}.", remedy)
    if error.flaw not in ("damaged", "rows"):
        return fault
    try:
        with store.open(name) as file:
            columns, rows = read_shape(file)
    except (TransientError, *UNREADABLE):
        return fault
    if "embedding" not in columns.names:
        return fault
    vectors = columns.field("embedding").type
    expected = embedding_type(space.dimension, space.dtype)
    if pa.types.is_fixed_size_list(expected) and pa.types.is_fixed_size_list(vectors):
        is_different = vectors.list_size != space.dimension
    else:
        is_different = vectors != expected
    if is_different:
        finding = (
            f"{location!r}: its embedding column has type {vectors}; expected {space.dimension} "
            "numbers per row."
        )
        return Fault("dimension", finding, remedy)
    different = partition and _different_rows(partition, rows)
    if different:
        fault = Fault("rows", different, remedy)
    return fault


def _different_rows(partition: Partition, rows: int) -> str | None:
    """Return the finding that a file has more or fewer rows than its source, None if equal."""
    if rows == partition.rows:
        return None
    try:
        # What the source announces includes rows that are skipped.
        expected = sum(len(batch) for batch in partition.read())
    except (DataError, TransientError):
        return None
    if rows == expected:
        return None
    return f"the file has {rows:,} rows and the source {expected:,}."


def _invalid_row(
    matrix: np.ndarray, texts: pa.LargeStringArray, space: Space
) -> tuple[int, str] | None:
    return invalid_row(
        matrix,
        normalized=space.normalize,
        may_be_zero=lambda row: bool(is_blank(texts[row : row + 1])[0]),
    )


def _refuse_invalid(partition: Partition) -> None:
    """Raise the fault of a partition without a file because its data are invalid."""
    ids = IdSet()
    try:
        for batch in partition.read():
            ids.add(batch.ids)
        refuse_repeated_id(partition, ids.repeated())
    except DataError as error:
        finding = f"it has no file, because its data are refused: {error.finding}"
        raise Fault("refused", finding, error.remedy) from error


def _compare_rows(
    partition: Partition, file: OutputFile, space: Space, samples: Samples | None
) -> None:
    facts = file.facts
    digest = ContentDigest()
    ids = IdSet()
    row = 0

    def from_source() -> Iterator[RowBatch]:
        for batch in read_rows(partition):
            digest.update(batch)
            ids.add(batch.ids)
            yield batch

    for expected, stored in _aligned(from_source(), file.read()):
        if expected is None or stored is None:
            more = "more" if stored is None else "fewer"
            raise Fault("rows", f"the file has {facts.rows:,} rows and the source {more}.")
        _require_equal("ids", "id", row, stored, expected.ids)
        if "text" in stored.schema.names:
            _require_equal("texts", "text", row, stored, expected.texts)
        _require_equal("texts", "text_hash", row, stored, text_hashes(expected.texts))
        _require_carried(row, stored, expected.carried)
        matrix = matrix_of(stored)
        invalid = _invalid_row(matrix, expected.texts, space)
        if invalid is not None:
            kind = "finite" if not np.isfinite(matrix[invalid[0]]).all() else "length"
            raise Fault(kind, f"row {row + invalid[0]}: {invalid[1]}.")
        if samples is not None:
            samples.add(facts, row, expected.texts, matrix)
        row += len(expected)
    if row != facts.rows:
        raise Fault(
            "rows", f"{row:,} rows could be read of the {facts.rows:,} that the file states."
        )
    if digest.hexdigest() != facts.content_digest:
        raise Fault("texts", "its content digest is not that of the source's rows.")
    refuse_repeated_id(partition, ids.repeated())


def _require_carried(
    first_row: int, stored: pa.RecordBatch, expected: pa.RecordBatch | None
) -> None:
    names = expected.schema.names if expected is not None else []
    stored_names = [name for name in stored.schema.names if name not in OWN_COLUMNS]
    if stored_names != names:
        raise Fault(
            "columns", f"the file carries the columns {stored_names}; the source's are {names}."
        )
    for name in names:
        _require_equal("columns", name, first_row, stored, expected.column(name))  # pyright: ignore


def _require_equal(
    kind: Kind, name: str, first_row: int, batch: pa.RecordBatch, expected: pa.Array
) -> None:
    stored = batch.column(name)
    if stored.type != expected.type:
        finding = f"the {name} column has type {stored.type}; the source's has {expected.type}."
        raise Fault(kind, finding)
    is_same = same_values(stored, expected)
    if not is_same.all():
        row = int(np.argmin(is_same))
        both = f"{_shown(stored, row)} and the source {_shown(expected, row)}"
        raise Fault(kind, f"row {first_row + row}: the file has the {name} {both}.")


def _aligned(
    source: Iterator[RowBatch], file: Iterator[pa.RecordBatch]
) -> Iterator[tuple[RowBatch | None, pa.RecordBatch | None]]:
    """Yield both streams in batches of equal length; the last pair has None if one ended early."""
    source = filter(len, source)
    file = filter(len, file)
    ours = next(source, None)
    theirs = next(file, None)
    while ours and theirs:
        rows = min(len(ours), len(theirs))
        yield ours.rows(0, rows), theirs.slice(0, rows)
        ours = ours.rows(rows, len(ours)) or next(source, None)
        theirs = theirs.slice(rows) or next(file, None)
    if ours or theirs:
        yield ours, theirs


def _shown(column: pa.Array, row: int) -> str:
    try:
        text = repr(column[row].as_py())
    except (OverflowError, ValueError):  # a time that Python does not have
        text = column.slice(row, 1).to_string(skip_new_lines=True).strip("[]")
    return text if len(text) <= 60 else f"{text[:57]}…"
