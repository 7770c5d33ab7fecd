"""Verification of an output against its source: every file, every row, and on request every vector.

Every file of a space is read in full, checksums included, side by side with its source partition
(`file_check.py`): the file must have the same ids and texts in the same order, and a valid vector
for each. Some rows, or all of them, are encoded again and must give the stored vector
(`reencoding.py`); those of a derived space are all computed again from its parent
(`derived_rows.py`). A file has at most one `Violation`; nothing is changed. Facts that other parts
of the program remember about files (`OutputState`) are not used, because the files themselves are
to be verified.

Reading everything takes hours, in which a disk or a store may fail to answer once. A file that
could not be read then is a violation too, because nothing was proven about it, and the other files
are still read.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from surge_dagster.engine.derived.derived_rows import DerivedRows
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import DataError, StoreUnavailable, TransientError
from surge_dagster.engine.files.formats import SUFFIX, file_name, is_output_file
from surge_dagster.engine.files.opening import remedy_of
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.run.staging import STAGING
from surge_dagster.engine.sources.partition import Partition, Source
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.verify.file_check import Fault, Kind, Samples, compare_with_source, opened
from surge_dagster.engine.verify.reencoding import SampledRows

_CHECK_AGAIN = "Nothing is known about it until it is checked again."
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Violation:
    """One fault of an output.

    Attributes:
        key: the partition, or the file's name where its partition is unknown.
        kind: what is at fault; "unread" is a file or source that could not be read now, "refused" a
            partition with invalid data, which correctly has no file, "orphan" a valid file whose
            partition was removed from the source. One kind is only a warning: "unused" (staged
            segments that no run needs, or a file of another format than its space's).
        remedy: "" where the finding says it, or the caller knows it.
    """

    key: str
    kind: Kind
    finding: str
    remedy: str = ""

    @property
    def reason(self) -> str:
        return f"{self.finding} {self.remedy}".rstrip()

    @property
    def is_warning(self) -> bool:
        return self.kind == "unused"

    @property
    def has_no_file(self) -> bool:
        """Whether the fault is that a partition was not embedded, or could not be."""
        return self.kind in ("missing", "refused")


@dataclass(frozen=True, slots=True)
class Verified:
    """A partition that was checked; `rows` and `truncated` texts are those of its file if it is
    valid, else zero."""

    key: str
    rows: int
    truncated: int = 0


@dataclass(frozen=True, slots=True)
class Compared:
    """The last event of a verification that computes vectors again.

    Attributes:
        partitions: of which every vector that was drawn was compared.
        partitions_not_compared: that have a file and in which not every vector could be; each has a
            violation.
        seed: which drew the rows; None where every row was compared.
    """

    vectors: int
    partitions: int
    partitions_not_compared: int
    seed: int | None


def verify(
    source: Source,
    store: Store,
    space: Space,
    *,
    pool: EncoderPool | None = None,
    reencode: int | None = 3,
    seed: int | None = None,
) -> Iterator[Violation | Verified | Compared]:
    """Check every partition of a source against its file, and every file of the space against the
    source.

    Args:
        pool: a pool of the same space, to encode rows again; None: no row is encoded again. A
            derived space needs none.
        reencode: rows of each partition to encode again; None is all.
        seed: draws the rows; None: other ones each time.

    Yields:
        Violations as they are found, and a `Verified` after each partition. Violations of vectors
            may come after it.
        Where vectors are computed again, a `Compared` is the last one.
    """
    samples: Samples | None = None
    if space.derived:
        samples = DerivedRows(store, space)
    elif pool is not None:
        samples = SampledRows(
            pool, space, reencode, secrets.randbelow(10**9) if seed is None else seed
        )
    is_complete: dict[str, bool] = {}
    compared = not_compared = 0
    for partition in source:
        result = verify_partition(partition, store, space, samples)
        is_complete[file_name(space.name, partition.key)] = isinstance(result, Verified)
        if isinstance(result, Violation):
            yield result
            not_compared += not result.has_no_file
            result = Verified(partition.key, 0)
        else:
            compared += 1
        yield result
        if samples is not None:
            yield from _wrong_vectors(samples, space)
    names = _checked(space.name, space, lambda: _unexpected_names(store, space, is_complete))
    if isinstance(names, Violation):
        yield names
        names = []
    for name in names:
        orphan = _checked(name, space, lambda name=name: _orphan(store, space, name))
        if orphan is not None:
            yield orphan
    if samples is not None:
        samples.compare()
        yield from _wrong_vectors(samples, space)
        yield Compared(samples.compared, compared, not_compared, samples.seed)


def verify_partition(
    partition: Partition, store: Store, space: Space, samples: Samples | None = None
) -> Verified | Violation:
    """Check one partition against its file; `samples` gets the rows that are to be encoded again."""
    facts = _checked(
        partition.key, space, lambda: compare_with_source(partition, store, space, samples)
    )
    return (
        facts
        if isinstance(facts, Violation)
        else Verified(partition.key, facts.rows, facts.truncated)
    )


def _checked(key: str, space: Space, check: Callable[[], _Result]) -> _Result | Violation:
    """The result of a check, or the violation that ended it."""
    try:
        return check()
    except Fault as fault:
        remedy = remedy_of(space) if fault.remedy is None else fault.remedy
        return Violation(key, fault.kind, fault.finding, remedy)
    except DataError as error:
        return Violation(key, "source", error.finding, error.remedy)
    except StoreUnavailable:
        raise
    except TransientError as error:
        return Violation(key, "unread", str(error), _CHECK_AGAIN)


def _wrong_vectors(samples: Samples, space: Space) -> Iterator[Violation]:
    for key, finding in samples.wrong().items():
        yield Violation(key, "vectors", finding, remedy_of(space))


def _unexpected_names(store: Store, space: Space, is_complete: dict[str, bool]) -> list[str]:
    """Output files without a source partition, and folders of staged segments that no run needs."""
    files = {stored.name for stored in store.list(space.name) if is_output_file(stored.name)}
    root = f"{STAGING}/{space.name}"
    staged = {
        stored.name.removeprefix(f"{root}/").partition("/")[0]
        for stored in store.list(root, deep=True)
    }
    orphans = [
        f"{root}/{folder}"
        for folder in staged
        if is_complete.get(f"{space.name}/{folder}{SUFFIX}", True)
    ]
    return [*sorted(files - is_complete.keys()), *sorted(orphans)]


def _orphan(store: Store, space: Space, name: str) -> Violation | None:
    """A file without a source partition, read in full; None where it was removed after it was
    listed."""
    location = repr(store.location(name))
    if name.startswith(f"{STAGING}/"):
        finding = f"{location} holds staged segments of a partition that is complete or was removed from the source."
        return Violation(
            name, "unused", finding, "The next run removes the former; remove the latter by hand."
        )
    try:
        with opened(store, space, name) as reader:
            for _ in reader.read():
                pass
            key = reader.facts.partition_key
    except FileNotFoundError:
        return None
    except Fault as fault:
        return Violation(
            name,
            fault.kind,
            f"{fault.finding} Its partition was removed from the source: remove it.",
        )
    finding = f"{location} is valid, but its partition was removed from the source."
    how = "`surge-dagster embed --removed-partitions delete`"
    how += ", then `surge-dagster derive --removed delete`" if space.derived else ""
    return Violation(
        key, "orphan", finding, f"If it does not come back, delete its file with {how}."
    )
