"""Verification of an output against its source: every file, every row, and on request every vector.

Every file of a space is read in full, checksums included, side by side with its source partition: the file must have
the same ids and texts in the same order, and a valid vector for each. Some rows, or all of them, are encoded again and
must give the stored vector (`reencoding.py`); those of a derived space are all computed again from its parent
(`derived_rows.py`). Each fault is a `Violation`; nothing is changed. Facts that other parts
of the program remember about files (`OutputState`) are not used, because the files themselves are to be verified.

A file has at most one violation, the one that explains most: vectors of another dimension, then another number of rows,
then the first row that differs. Both are judged by the columns and rows that the file really has, whatever its metadata
promise, because another program may have written it. Only what remains is `damaged`.

Reading everything takes hours, in which a disk or a store may fail to answer once. A file that could not be read then
is a violation too, because nothing was proven about it, and the other files are still read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import pyarrow as pa

from surge_dagster.engine.derived_rows import DerivedRows
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import DataError, StoreUnavailable, TransientError
from surge_dagster.engine.files.facts import FileFacts, InvalidFile, desired_version
from surge_dagster.engine.files.formats import SUFFIXES, file_name, format_of, open_output_file, read_shape
from surge_dagster.engine.files.rows import OutputFile, carried_columns, check_schema, embedding_type, matrix_of
from surge_dagster.engine.files.validation import invalid_row
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.staging import STAGING
from surge_dagster.engine.reencoding import SampledRows
from surge_dagster.engine.sources.content import ContentDigest, IdSet, refuse_repeated_id
from surge_dagster.engine.sources.partition import Partition, RowBatch, Source, read_rows
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.cosines import LOWEST_COSINE
from surge_dagster.engine.support.text_hash import text_hashes
from surge_dagster.engine.support.unreadable import UNREADABLE, first_line, is_systems, not_given
from surge_dagster.engine.support.values import value_streams

Kind = Literal[
    "missing",
    "damaged",
    "space",
    "stale",
    "rows",
    "ids",
    "texts",
    "columns",
    "dimension",
    "finite",
    "length",
    "vectors",
    "source",
    "unread",
    "refused",
    "orphan",
]
_NO_FILE: frozenset[Kind] = frozenset({"missing", "refused"})
_CHECK_AGAIN = "Nothing is known about it until it is checked again."
_RUN_AGAIN = "Run again."
_REMOVE = "Remove it and run again."
_REMOVE_FILE = "Remove the file and run again."
_Result = TypeVar("_Result")
_Rows = SampledRows | DerivedRows


@dataclass(frozen=True, slots=True)
class Violation:
    """One fault of an output.

    Attributes:
        key: the partition, or the file's name where its partition is unknown.
        kind: what is at fault; "unread" is a file or source that could not be read now, "refused" a partition with
            invalid data, which correctly has no file. One kind is only a warning: "orphan" (a valid file, or staged
            segments, whose partition was removed from the source; or staged segments beside a complete file).
        finding: what was expected, and what was found.
        remedy: what to do; "" where the finding says it, or the caller knows it.
    """

    key: str
    kind: Kind
    finding: str
    remedy: str = ""

    @property
    def reason(self) -> str:
        """Finding and remedy."""
        return f"{self.finding} {self.remedy}".rstrip()

    @property
    def is_warning(self) -> bool:
        return self.kind == "orphan"

    @property
    def has_no_file(self) -> bool:
        """Whether the fault is that a partition was not embedded, or could not be."""
        return self.kind in _NO_FILE


@dataclass(frozen=True, slots=True)
class Verified:
    """A partition that was checked.

    Attributes:
        rows, truncated: of its file if it is valid, else zero. `truncated` counts the texts of which the model read
            only the first tokens.
    """

    key: str
    rows: int
    truncated: int = 0


class _Fault(Exception):
    """Ends the check of a file; its arguments are those of a `Violation`, without the key."""

    def __init__(self, kind: Kind, finding: str, remedy: str) -> None:
        super().__init__(finding)
        self.kind: Kind = kind
        self.finding = finding
        self.remedy = remedy


def verify(
    source: Source,
    store: Store,
    space: Space,
    *,
    pool: EncoderPool | None = None,
    reencode: int | None = 3,
    seed: int = 0,
) -> Iterator[Violation | Verified]:
    """Check every partition of a source against its file, and every file of the space against the source.

    Args:
        source, store, space: what was embedded, and where to.
        pool: a pool of the same space, to encode rows again; None: no row is encoded again. A derived space needs none.
        reencode: rows of each partition to encode again, drawn with `seed`; None is all.

    Yields:
        Violations as they are found, and a `Verified` after each partition. Violations of vectors may come after it.

    Raises:
        StoreUnavailable: the store does not answer any more.
        ConfigError: the source or the output cannot be listed.
    """
    samples: _Rows | None = None
    if space.derived:
        samples = DerivedRows(store, space)
    elif pool is not None:
        samples = SampledRows(pool, space, reencode, seed)
    expected: set[str] = set()
    incomplete: set[str] = set()
    for partition in source:
        name = file_name(space.name, partition.key, space.file_format)
        expected.add(name)
        found = verify_partition(partition, store, space, samples)
        if isinstance(found, Violation):
            yield found
            found = Verified(partition.key, 0)
            incomplete.add(name)
        yield found
        if samples is not None:
            yield from _wrong_vectors(samples)
    names = _checked(space.name, lambda: _unexpected_names(store, space, expected, incomplete))
    if isinstance(names, Violation):
        yield names
        names = []
    for name in names:
        orphan = _checked(name, lambda name=name: _orphan(store, space, name))
        if orphan is not None:
            yield orphan
    if samples is not None:
        samples.compare()
        yield from _wrong_vectors(samples)


def verify_partition(
    partition: Partition, store: Store, space: Space, samples: _Rows | None = None
) -> Verified | Violation:
    """Check one partition against its file.

    Args:
        samples: gets the rows that are to be encoded again.

    Raises:
        StoreUnavailable: the store does not answer any more.
    """
    facts = _checked(partition.key, lambda: _compare_with_source(partition, store, space, samples))
    return facts if isinstance(facts, Violation) else Verified(partition.key, facts.rows, facts.truncated)


def _checked(key: str, check: Callable[[], _Result]) -> _Result | Violation:
    """The result of a check, or the violation that ended it."""
    try:
        return check()
    except _Fault as fault:
        return Violation(key, fault.kind, fault.finding, fault.remedy)
    except DataError as error:
        return Violation(key, "source", _finding_of(error), error.remedy)
    except StoreUnavailable:
        raise
    except TransientError as error:
        return Violation(key, "unread", str(error), _CHECK_AGAIN)


def _wrong_vectors(samples: _Rows) -> Iterator[Violation]:
    for key, finding in samples.wrong().items():
        yield Violation(key, "vectors", finding, _REMOVE_FILE)


def _finding_of(error: DataError) -> str:
    """The text of an error without its remedy."""
    return str(error).removesuffix(error.remedy).rstrip()


def _unexpected_names(store: Store, space: Space, expected: set[str], incomplete: set[str]) -> list[str]:
    """Output files without a source partition, and folders of staged segments that no run needs."""
    files = {stored.name for stored in store.list(space.name) if format_of(stored.name)}
    root = f"{STAGING}/{space.name}"
    staged = {stored.name.removeprefix(f"{root}/").partition("/")[0] for stored in store.list(root, deep=True)}
    suffix = SUFFIXES[space.file_format]
    orphans = [f"{root}/{folder}" for folder in staged if f"{space.name}/{folder}{suffix}" not in incomplete]
    return [*sorted(files - expected), *sorted(orphans)]


def _orphan(store: Store, space: Space, name: str) -> Violation | None:
    """A file without a source partition, read in full; None where it was removed after it was listed."""
    location = repr(store.location(name))
    if name.startswith(f"{STAGING}/"):
        finding = (
            f"{location} holds staged segments of a partition that has a complete file or was removed from the source."
        )
        return Violation(name, "orphan", finding, "The next run removes the former; remove the latter by hand.")
    if format_of(name) != space.file_format:
        finding = f"{location} is never read: the files of its space have the format {space.file_format!r}."
        return Violation(name, "orphan", finding, "Remove it.")
    try:
        with _opened(store, space, name) as reader:
            for _ in reader.read():
                pass
            key = reader.facts.partition_key
    except FileNotFoundError:
        return None
    except _Fault as fault:
        return Violation(name, fault.kind, f"{fault.finding} Its partition was removed from the source: remove it.")
    finding = f"{location} is valid, but its partition was removed from the source."
    return Violation(key, "orphan", finding, "Remove it if the partition does not come back.")


@contextlib.contextmanager
def _opened(store: Store, space: Space, name: str, partition: Partition | None = None) -> Iterator[OutputFile]:
    """A file of the space whose facts are right; errors of reading it become faults.

    Args:
        partition: its partition, where the source has one.

    Raises:
        FileNotFoundError: there is none.
        TransientError: it cannot be read now.
    """
    location = store.location(name)
    try:
        with store.open(name) as file, open_output_file(file, space.file_format) as reader:
            _require_facts(reader, space, None if partition is None else partition.key, name)
            yield reader
    except FileNotFoundError:
        raise
    except (InvalidFile, *UNREADABLE) as error:
        if is_systems(error):
            raise not_given(repr(location), error) from error
        raise _fault_of(error, store, space, name, partition) from error


def _fault_of(error: Exception, store: Store, space: Space, name: str, partition: Partition | None) -> _Fault:
    """The fault of a file that is not valid: what its columns and its number of rows show, else the error."""
    location = store.location(name)
    damaged = _Fault("damaged", f"{location!r}: {first_line(error)}.", _REMOVE)
    try:
        with store.open(name) as file:
            columns, rows = read_shape(file, space.file_format)
    except (InvalidFile, *UNREADABLE):
        return damaged
    if "embedding" not in columns.names:
        return damaged
    vectors, expected = columns.field("embedding").type, embedding_type(space.dimension, space.dtype)
    is_list = pa.types.is_fixed_size_list(expected) and pa.types.is_fixed_size_list(vectors)
    if vectors.list_size != space.dimension if is_list else vectors != expected:
        finding = f"{location!r}: its embedding column has type {vectors}; expected {space.dimension} numbers per row."
        return _Fault("dimension", finding, _REMOVE)
    different = None if partition is None else _different_rows(partition, rows)
    return damaged if different is None else _Fault("rows", different, _REMOVE_FILE)


def _different_rows(partition: Partition, rows: int) -> str | None:
    """The finding that a file with so many rows has more or fewer than its source, where the source can be read."""
    try:
        # What the source announces includes rows that are skipped.
        expected = rows if rows == partition.rows else sum(len(batch) for batch in partition.read())
    except (DataError, TransientError):
        return None
    return None if rows == expected else f"the file has {rows:,} rows and the source {expected:,}."


def _require_facts(reader: OutputFile, space: Space, key: str | None, name: str) -> None:
    facts = reader.facts
    if facts.space != space.name:
        raise _Fault(
            "space", f"{name!r} holds vectors of the space {facts.space!r}; expected {space.name!r}.", "Move it away."
        )
    if file_name(space.name, facts.partition_key, space.file_format) != name or key not in (None, facts.partition_key):
        raise _Fault(
            "ids", f"{name!r} is the file of partition {facts.partition_key!r}.", "Move it away and run again."
        )
    if facts.dimension != space.dimension:
        raise _Fault(
            "dimension",
            f"{name!r} states that its vectors have dimension {facts.dimension}; expected {space.dimension}.",
            _REMOVE,
        )
    if facts.precision not in LOWEST_COSINE:
        raise InvalidFile(f"its metadata name an unknown precision {facts.precision!r}")
    if facts.desired_version != desired_version(facts.content_digest, facts.space):
        raise InvalidFile("its desired version does not follow from its content digest and space")
    check_schema(reader.columns, dimension=space.dimension, dtype=space.dtype)


def _compare_with_source(partition: Partition, store: Store, space: Space, samples: _Rows | None) -> FileFacts:
    """The facts of a partition's file, if the file holds exactly the rows of its source.

    Args:
        samples: gets the rows that are to be encoded again.

    Raises:
        _Fault: the file is missing, stale, damaged or different.
        DataError: the rows of the source are invalid.
        TransientError: the source or the file cannot be read now.
    """
    name = file_name(space.name, partition.key, space.file_format)
    location = store.location(name)
    try:
        with _opened(store, space, name, partition) as reader:
            facts = reader.facts
            if facts.source_version != partition.source_version:
                _require_as_listed(partition)
                raise _Fault(
                    "stale",
                    f"{location!r} was made from source version {facts.source_version!r}; the source has "
                    f"{partition.source_version!r} now.",
                    _RUN_AGAIN,
                )
            try:
                _compare_rows(partition, reader, space, samples)
            except _Fault as fault:
                is_of_row = fault.kind in ("ids", "texts", "columns")
                different = _different_rows(partition, facts.rows) if is_of_row else None
                if different is None:
                    raise
                raise _Fault("rows", f"{different} {fault.finding}", fault.remedy) from fault
            return facts
    except FileNotFoundError:
        _require_readable(partition)
        raise _Fault("missing", f"there is no file {location!r}.", _RUN_AGAIN) from None


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
        finding = f"it has no file, because its data are refused: {_finding_of(error)}"
        raise _Fault("refused", finding, error.remedy) from error


def _compare_rows(partition: Partition, file: OutputFile, space: Space, samples: _Rows | None) -> None:
    facts, digest, ids = file.facts, ContentDigest(), IdSet()
    row = 0

    def from_source() -> Iterator[RowBatch]:
        for batch in read_rows(partition):
            digest.update(batch)
            ids.add(batch.ids)
            yield batch

    for expected, stored in _aligned(from_source(), file.read()):
        if expected is None or stored is None:
            more = "more" if stored is None else "fewer"
            raise _Fault("rows", f"the file has {facts.rows:,} rows and the source {more}.", _REMOVE_FILE)
        _require_equal("ids", "id", row, stored.column("id"), expected.ids)
        if "text" in stored.schema.names:
            _require_equal("texts", "text", row, stored.column("text"), expected.texts)
        if "text_hash" in stored.schema.names:
            _require_equal("texts", "text_hash", row, stored.column("text_hash"), text_hashes(expected.texts))
        _require_carried(row, stored, expected.carried)
        matrix = matrix_of(stored)
        invalid = invalid_row(matrix, normalized=space.normalize)
        if invalid is not None:
            kind = "finite" if not np.isfinite(matrix[invalid[0]]).all() else "length"
            raise _Fault(kind, f"row {row + invalid[0]}: {invalid[1]}.", _REMOVE_FILE)
        if samples is not None:
            samples.add(facts, row, expected.texts, matrix)
        row += len(expected)
    if row != facts.rows:
        raise _Fault("rows", f"{row:,} rows could be read of the {facts.rows:,} that the file states.", _REMOVE_FILE)
    if digest.hexdigest() != facts.content_digest:
        raise _Fault("texts", "its content digest is not that of the source's rows.", _REMOVE_FILE)
    refuse_repeated_id(partition, ids.repeated())


def _require_carried(first_row: int, stored: pa.RecordBatch, expected: pa.RecordBatch | None) -> None:
    names, carried = expected.schema.names if expected is not None else [], carried_columns(stored.schema)
    found = carried.names if carried is not None else []
    if found != names:
        raise _Fault("columns", f"the file carries the columns {found}; the source's are {names}.", _REMOVE_FILE)
    for name in names:
        _require_equal("columns", name, first_row, stored.column(name), expected.column(name))  # pyright: ignore


def _require_equal(kind: Kind, what: str, first_row: int, found: pa.Array, expected: pa.Array) -> None:
    if found.equals(expected) or _same_values(found, expected):
        return
    for row, (one, other) in enumerate(zip(found.to_pylist(), expected.to_pylist(), strict=True), first_row):
        if one != other and repr(one) != repr(other):
            finding = f"row {row}: the file has the {what} {_short(one)} and the source {_short(other)}."
            raise _Fault(kind, finding, _REMOVE_FILE)
    raise _Fault(kind, f"the {what} column has type {found.type}; the source's has {expected.type}.", _REMOVE_FILE)


def _same_values(found: pa.Array, expected: pa.Array) -> bool:
    """Whether both have the same bytes: a number that is not a number equals no other for Arrow."""
    if found.type != expected.type:
        return False
    return all(bytes(one) == bytes(other) for one, other in zip(*map(value_streams, (found, expected)), strict=True))


def _aligned(
    source: Iterator[RowBatch], file: Iterator[pa.RecordBatch]
) -> Iterator[tuple[RowBatch | None, pa.RecordBatch | None]]:
    """Both streams cut into batches of equal length; the last pair has None for a stream that ended early."""
    source, file = (batch for batch in source if len(batch)), (batch for batch in file if batch.num_rows)
    ours, theirs = next(source, None), next(file, None)
    while ours is not None and theirs is not None:
        rows = min(len(ours), theirs.num_rows)
        yield ours.rows(0, rows), theirs.slice(0, rows)
        ours = ours.rows(rows, len(ours)) if rows < len(ours) else next(source, None)
        theirs = theirs.slice(rows) if rows < theirs.num_rows else next(file, None)
    if ours is not None or theirs is not None:
        yield ours, theirs


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
