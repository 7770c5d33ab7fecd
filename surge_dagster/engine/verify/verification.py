"""Verification of an output against its source: every file, every row, and on request every vector.

Every file of a space is read in full, checksums included, together with its source partition
(`file_check.py`): it must have the same ids and texts in the same order, and a valid vector for
each. Some rows, or all, are encoded again and must give the stored vector (`reencoding.py`); those
of a derived space are all computed again from its parent. A file has at most
one `Violation`; nothing is changed. What is remembered about files (`OutputState`) is not used.

A file that could not be read is a violation too, because nothing was proven about it, and the other
files are still read.

The current space is switched only to a space that is complete and verified. First the footers are
compared with the catalog, which takes seconds and finds what is missing. Then every file is
verified. The switch itself replaces one small object; readers that have opened a space stay with
it.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import (
    ConfigError,
    DataError,
    StoreUnavailable,
    SurgeError,
    TransientError,
)
from surge_dagster.engine.files.formats import SUFFIX, file_name, remedy_of
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.current_space import CurrentSpace, read_current, write_current
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.run.staging import STAGING, staged_keys
from surge_dagster.engine.sources.partition import Partition, Source
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.counts import named
from surge_dagster.engine.verify.file_check import Fault, Kind, Samples, compare_with_source, opened
from surge_dagster.engine.verify.reencoding import DerivedRows, SampledRows

_CHECK_AGAIN = "Nothing is known about it until it is checked again."


_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Violation:
    """One fault of an output.

    Attributes:
        key: the partition, or the file's name where its partition is unknown.
        kind: "unread" is a file or source that could not be read now, "refused" a partition with
            invalid data, which correctly has no file, "orphan" a valid file whose partition was
            removed from the source. "unused" is only a warning: staged segments that no run needs.
        remedy: may be empty.
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
        """Whether the partition was not embedded, or could not be."""
        return self.kind in ("missing", "refused")


@dataclass(frozen=True, slots=True)
class Verified:
    """A partition that was checked, with the counts of a valid file; see `FileFacts`."""

    key: str
    rows: int
    truncated: int = 0
    rejected_rows: int = 0
    source_rows: int = 0


@dataclass(frozen=True, slots=True)
class Compared:
    """The last event of a verification that computes vectors again.

    Attributes:
        partitions: in which every drawn vector was compared.
        partitions_not_compared: with a file, and a violation that ended the comparison.
        seed: drew the rows; None if every row was compared.
    """

    vectors: int
    partitions: int
    partitions_not_compared: int
    seed: int | None


def unjudged_kinds(space: Space) -> frozenset[Kind]:
    """Return the kinds of faults that vectors of this space cannot have.

    That no such fault was found says nothing about the files.
    """
    if space.dtype in ("int8", "binary"):  # every byte is a valid value
        return frozenset({"finite", "length"})
    return frozenset() if space.normalize else frozenset({"length"})


def verify(
    source: Source,
    store: Store,
    space: Space,
    *,
    pool: EncoderPool | None = None,
    reencode: int | None = 3,
    seed: int | None = None,
) -> Iterator[Violation | Verified | Compared]:
    """Check every partition of a source and every file of the space against each other.

    Args:
        pool: a pool of the same space, to encode rows again; None: no row is encoded again. A
            derived space needs none.
        reencode: rows of each partition to encode again; None is all.
        seed: draws the rows; None: other ones each time.

    Yields:
        Violations as they are found, and a `Verified` after each partition. Violations of vectors
            may come after it. If vectors are computed again, the last event is a `Compared`.
    """
    samples = _samples(store, space, pool, reencode, seed)
    is_complete: dict[str, bool] = {}  # by the name of the partition's file
    not_compared = 0
    for partition in source:
        result = verify_partition(partition, store, space, samples)
        is_complete[file_name(space.name, partition.key)] = isinstance(result, Verified)
        yield result
        if isinstance(result, Violation):
            if not result.has_no_file:
                not_compared += 1
            yield Verified(partition.key, 0)
        yield from _wrong_vectors(samples, space)

    yield from _orphans(store, space, is_complete)
    yield from _unused_segments(store, space, is_complete)
    if samples is not None:
        samples.compare()
        yield from _wrong_vectors(samples, space)
        yield Compared(samples.compared, sum(is_complete.values()), not_compared, samples.seed)


def _samples(
    store: Store, space: Space, pool: EncoderPool | None, reencode: int | None, seed: int | None
) -> Samples | None:
    """Return what computes vectors again; None if nothing does."""
    if space.derived:
        return DerivedRows(store, space)
    if pool is None:
        return None
    seed = secrets.randbelow(10**9) if seed is None else seed
    return SampledRows(pool, space, reencode, seed)


def verify_partition(
    partition: Partition, store: Store, space: Space, samples: Samples | None = None
) -> Verified | Violation:
    """Check one partition against its file; `samples` gets the rows to encode again."""
    compare = partial(compare_with_source, partition, store, space, samples)
    facts = _checked(partition.key, space, compare)
    if isinstance(facts, Violation):
        return facts
    return Verified(
        partition.key, facts.rows, facts.truncated, facts.rejected_rows, facts.source_rows
    )


def _checked(key: str, space: Space, check: Callable[[], _Result]) -> _Result | Violation:
    """Return the result of a check, or the violation that ended it."""
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


def _wrong_vectors(samples: Samples | None, space: Space) -> Iterator[Violation]:
    if samples is not None:
        for key, finding in samples.wrong().items():
            yield Violation(key, "vectors", finding, remedy_of(space))


def _orphans(store: Store, space: Space, is_complete: dict[str, bool]) -> Iterator[Violation]:
    """Read the files without a source partition in full."""
    for stored in store.list(space.name):
        name = stored.name
        if name.endswith(SUFFIX) and name not in is_complete:
            orphan = _checked(name, space, partial(_orphan, store, space, name))
            if orphan is not None:
                yield orphan


def _orphan(store: Store, space: Space, name: str) -> Violation | None:
    """Return what is wrong with a file without a source partition; None if it was removed since."""
    location = repr(store.location(name))
    try:
        with opened(store, space, name) as reader:
            for _ in reader.read():
                pass
            key = reader.facts.partition_key
    except FileNotFoundError:
        return None
    except Fault as fault:
        finding = f"{fault.finding} No partition of the catalog has this name."
        return Violation(name, fault.kind, finding, "Move the file away.")
    finding = f"{location} is valid, but its partition was removed from the source."
    return Violation(key, "orphan", finding, _orphan_remedy(space))


def _orphan_remedy(space: Space) -> str:
    deletion = (
        "by hand, or with `surge-dagster embed --removed-partitions delete` (refused if many "
        "partitions were removed)"
    )
    if space.derived is None:
        return f"If it does not come back, delete its file {deletion}."
    return (
        f"If it does not come back, delete its file in {space.derived.parent} {deletion}, then run "
        "`surge-dagster derive --removed delete`."
    )


def _unused_segments(
    store: Store, space: Space, is_complete: dict[str, bool]
) -> Iterator[Violation]:
    """Find the folders of staged segments that no run needs."""
    for encoded_key in sorted(staged_keys(store, space.name)):
        if is_complete.get(f"{space.name}/{encoded_key}{SUFFIX}", True):
            name = f"{STAGING}/{space.name}/{encoded_key}"
            finding = (
                f"{store.location(name)!r} has staged segments of a partition that is complete or "
                "was removed from the source."
            )
            remedy = "The next run removes the former; remove the latter by hand."
            yield Violation(name, "unused", finding, remedy)


_INCOMPLETE: dict[str, tuple[Kind, str, str]] = {
    "stale": ("stale", "its file was made from an earlier source version.", ""),
    "foreign": ("space", "its file holds vectors of another space.", "Move it away."),
    "missing": ("missing", "it has no valid file.", ""),
}


@dataclass(frozen=True, slots=True)
class Switched:
    """The result of a switch; a space that was already current is not verified or `changed`."""

    current: CurrentSpace
    changed: bool
    partitions: int = 0
    rows: int = 0


class SwitchRefused(SurgeError):
    """A space is incomplete or damaged; the current space did not change.

    Attributes:
        counts: violations by kind, such as "missing" and "stale".
    """

    def __init__(self, space: str, violations: list[Violation], partitions: int) -> None:
        self.violations = violations
        self.counts = Counter(violation.kind for violation in violations)
        what = ", ".join(f"{count:,} {kind}" for kind, count in sorted(self.counts.items()))
        which = named((f"{violation.key!r} ({violation.kind})" for violation in violations), 10)
        super().__init__(
            f"the space {space!r} does not become the current one: of {partitions:,} partitions, "
            f"{what}: {which}. The first one: {violations[0].reason} Remove damaged files, embed "
            "what is missing then, and switch again."
        )


def switch_space(source: Source, store: Store, space: Space) -> Switched:
    """Make a space the one that readers use, if it is complete and every file in it is valid.

    No model is needed. Valid files of partitions that were removed from the source are ignored, and
    partitions that the current space lacks, too, such as those with bad data.

    Raises:
        SwitchRefused: partitions are missing, stale, refused or damaged, or differ from the source.
        SwitchedMeanwhile: another switch took place during the verification.
    """
    seen = read_current(store)
    if seen is not None and seen.space == space.name:
        return Switched(seen, changed=False)
    lacking = _require_complete(source, store, space, seen)

    violations: list[Violation] = []
    verified = 0
    rows = 0
    for event in verify(source, store, space):
        if isinstance(event, Compared) or event.key in lacking:
            continue
        if isinstance(event, Verified):
            verified += 1
            rows += event.rows
        elif event.kind not in ("orphan", "unused"):
            violations.append(event)
    if violations and all(violation.kind == "unread" for violation in violations):
        raise TransientError(
            f"the space {space.name!r} could not be verified: {len(violations):,} of {verified:,} "
            f"partitions could not be read. The first one: {violations[0].reason} Then switch "
            "again."
        )
    if violations:
        raise SwitchRefused(space.name, violations, verified)
    return Switched(write_current(store, space.name, seen=seen), True, verified, rows)


def _require_complete(
    source: Source, store: Store, space: Space, current: CurrentSpace | None
) -> set[str]:
    """Compare the footers of a space with the catalog; return the keys that the current space
    lacks, too."""
    outputs = OutputState(store, space.name)
    readers_files = OutputState(store, current.space) if current is not None else None
    lacking: set[str] = set()
    violations: list[Violation] = []
    partitions = 0
    for partition in outputs.looked_at(source):
        partitions += 1
        freshness = outputs.freshness(partition)
        if freshness.error is not None:
            raise freshness.error
        is_missing = freshness.status == "missing" and freshness.invalid is None
        if is_missing and readers_files and readers_files.freshness(partition).status == "missing":
            lacking.add(partition.key)
        elif freshness.status in _INCOMPLETE:
            violations.append(Violation(partition.key, *_INCOMPLETE[freshness.status]))
    if not partitions:
        raise ConfigError(
            "the source has no partitions, so no space can be complete. Give the right source."
        )
    if violations:
        raise SwitchRefused(space.name, violations, partitions)
    return lacking
