"""Proof of what lies in an output, made from the files and the source alone.

Every file of a space is read in full, checksums included, side by side with its source partition: the same ids and
texts in the same order, none missing, none twice, and a vector of the right kind for each. Sampled rows, or all of
them, are encoded again and must give the vector that is there. What does not hold is a `Violation`; nothing is changed.

Reading everything takes hours, in which a disk or a store may fail to answer once. What could not be read because of
that is a violation too, since nothing was proven of it, and the rest is read all the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa

from surge_dagster.engine.encoder.arena import Slot
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import DataError, StoreUnavailable, SurgeError, TransientError
from surge_dagster.engine.files.facts import FileFacts, InvalidFile, desired_version
from surge_dagster.engine.files.formats import SUFFIXES, OutputFile, file_name, format_of, open_output_file
from surge_dagster.engine.files.rows import check_schema, matrix_of
from surge_dagster.engine.files.validation import invalid_row
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.staging import STAGING
from surge_dagster.engine.sources.content import ContentDigest, IdSet, refuse_repeated_id
from surge_dagster.engine.sources.partition import Partition, RowBatch, Source
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.columns import value_lengths
from surge_dagster.engine.support.unreadable import UNREADABLE, first_line, is_systems, not_given

# Promise 5 of the design: lowest cosine between a stored vector and the same text encoded again.
LOWEST_COSINE = {"fp32": 0.99999, "fp16": 0.999, "bf16": 0.999}
_SAMPLE_TEXTS = 4096
_SAMPLE_BYTES = 64 * 1024 * 1024

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
_CHECK_AGAIN = "Nothing is known of it until it is checked again."
_REMOVE = "Remove it and run again."
_REMOVE_FILE = "Remove the file and run again."
_WARNINGS: frozenset[Kind] = frozenset({"refused", "orphan"})


@dataclass(frozen=True, slots=True)
class Violation:
    """One thing that does not hold.

    Attributes:
        key: the partition, or the file's name where its partition is unknown.
        kind: what is at fault; "unread" is what could not be read now, whatever it holds. Two are only warnings:
            "refused" (a partition with bad data, which rightly has no file) and "orphan" (a valid file, or staged
            segments, whose partition the source no longer has).
        reason: what was expected, what was found, and what to do.
        remedy: the end of `reason` that says what to do, "" where it is not set apart.
    """

    key: str
    kind: Kind
    reason: str
    remedy: str = ""

    @property
    def finding(self) -> str:
        """The reason without what to do, where that is set apart."""
        return self.reason.removesuffix(self.remedy).rstrip()

    @property
    def is_warning(self) -> bool:
        return self.kind in _WARNINGS


@dataclass(frozen=True, slots=True)
class Verified:
    """A partition that was looked at.

    Attributes:
        rows, truncated: of its file, where that holds what it should; else zero. Truncated are the texts of which the
            model saw only the first tokens.
    """

    key: str
    rows: int
    truncated: int = 0


class _Broken(Exception):
    def __init__(self, kind: Kind, reason: str, remedy: str) -> None:
        self.kind: Kind = kind
        self.reason = f"{reason} {remedy}"
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
        pool: a pool of the same space, for encoding again; None leaves that out.
        reencode: rows of each partition to encode again, drawn with `seed`; None is all.

    Yields:
        Violations as they are found, and a `Verified` after each partition. Those of vectors may come after it.

    Raises:
        StoreUnavailable: the store answers nobody any more.
        ConfigError: the source or the output cannot be listed.
    """
    samples = _Samples(pool, space) if pool is not None else None
    expected: set[str] = set()
    for partition in source:
        name = file_name(space.name, partition.key, space.file_format)
        expected.add(name)
        rows = truncated = 0
        try:
            rows, truncated = _verify_partition(partition, store, space, name, samples, reencode, seed)
        except _Broken as broken:
            yield Violation(partition.key, broken.kind, broken.reason, broken.remedy)
        except DataError as error:
            yield Violation(partition.key, "source", str(error), error.remedy)
        except StoreUnavailable:
            raise
        except TransientError as error:
            yield _unread(partition.key, error)
        yield Verified(partition.key, rows, truncated)
        if samples is not None:
            yield from samples.due()
    yield from _left_over(store, space, expected)
    if samples is not None:
        yield from samples.finish()


def _unread(key: str, error: TransientError) -> Violation:
    return Violation(key, "unread", f"{error} {_CHECK_AGAIN}", _CHECK_AGAIN)


def _left_over(store: Store, space: Space, expected: set[str]) -> Iterator[Violation]:
    try:
        for stored in sorted(store.list(space.name), key=lambda stored: stored.name):
            if stored.name not in expected and format_of(stored.name):
                found = _without_source(store, space, stored.name)
                if found is not None:
                    yield found
        yield from _staged_without_source(store, space, expected)
    except StoreUnavailable:
        raise
    except TransientError as error:
        yield _unread(space.name, error)


def _without_source(store: Store, space: Space, name: str) -> Violation | None:
    """What is wrong with a file that no partition of the source has; None where it has gone since it was listed."""
    location = store.location(name)
    if format_of(name) != space.file_format:
        return Violation(
            name,
            "orphan",
            f"{location!r} is no file of a space whose files are in the format {space.file_format!r}: nobody reads it. "
            "Remove it.",
        )
    try:
        with store.open(name) as file, open_output_file(file, space.file_format) as reader:
            facts = _facts(reader, space, None, name)
            for _ in reader.read():
                pass
    except _Broken as broken:
        return Violation(name, broken.kind, broken.reason)
    except FileNotFoundError:
        return None
    except StoreUnavailable:
        raise
    except TransientError as error:
        return _unread(name, error)
    except (InvalidFile, *UNREADABLE) as error:
        if is_systems(error):
            return _unread(name, not_given(repr(location), error))
        return Violation(
            name, "damaged", f"{location!r}: {first_line(error)}. The source has no such partition: remove it."
        )
    return Violation(
        facts.partition_key,
        "orphan",
        f"{location!r} is valid, but the source has no such partition. Remove it if it has gone for good.",
    )


def _staged_without_source(store: Store, space: Space, expected: set[str]) -> Iterator[Violation]:
    root = f"{STAGING}/{space.name}"
    folders = {stored.name.removeprefix(f"{root}/").partition("/")[0] for stored in store.list(root, deep=True)}
    for folder in sorted(folders):
        if f"{space.name}/{folder}{SUFFIXES[space.file_format]}" not in expected:
            yield Violation(
                f"{root}/{folder}",
                "orphan",
                f"{store.location(f'{root}/{folder}')!r} holds what an unfinished run staged of a partition that the "
                "source no longer has. Remove it if it has gone for good.",
            )


def _verify_partition(
    partition: Partition,
    store: Store,
    space: Space,
    name: str,
    samples: _Samples | None,
    reencode: int | None,
    seed: int,
) -> tuple[int, int]:
    location = store.location(name)
    try:
        with store.open(name) as file, open_output_file(file, space.file_format) as reader:
            facts = _facts(reader, space, partition.key, name)
            if facts.source_version != partition.source_version:
                _require_as_listed(partition)
                raise _Broken(
                    "stale",
                    f"{location!r} was made from source version {facts.source_version!r}; the source has "
                    f"{partition.source_version!r} now.",
                    _RUN_AGAIN,
                )
            wanted = _rows_to_encode(facts.rows, reencode, f"{seed}:{partition.key}") if samples else frozenset()
            _verify_rows(partition, facts, reader, space, wanted, samples)
            return facts.rows, facts.truncated
    except FileNotFoundError:
        _require_readable(partition)
        raise _Broken("missing", f"there is no file {location!r}.", _RUN_AGAIN) from None
    except InvalidFile as error:
        raise _Broken("damaged", f"{location!r}: {error}.", _REMOVE) from error
    except UNREADABLE as error:
        if is_systems(error):
            raise not_given(repr(location), error) from error
        raise _Broken("damaged", f"{location!r} cannot be read: {first_line(error)}.", _REMOVE) from error


def _require_as_listed(partition: Partition) -> None:
    if partition.current_source_version() != partition.source_version:
        raise TransientError(f"partition {partition.key!r}: its source changed after it was listed.", partition.key)


def _require_readable(partition: Partition) -> None:
    ids = IdSet()
    try:
        for batch in partition.read():
            ids.add(batch.ids)
        refuse_repeated_id(partition, ids.repeated())
    except DataError as error:
        reason = f"it has no file, because its data are refused: {str(error).removesuffix(error.remedy).rstrip()}"
        raise _Broken("refused", reason, error.remedy) from error


def _facts(reader: OutputFile, space: Space, key: str | None, name: str) -> FileFacts:
    facts = reader.facts
    if facts.space != space.name:
        raise _Broken(
            "space", f"{name!r} holds vectors of the space {facts.space!r}; expected {space.name!r}.", "Move it away."
        )
    if file_name(space.name, facts.partition_key, space.file_format) != name or key not in (None, facts.partition_key):
        raise _Broken(
            "ids", f"{name!r} is the file of partition {facts.partition_key!r}.", "Move it away and run again."
        )
    if facts.dimension != space.dimension:
        raise _Broken(
            "dimension",
            f"{name!r} says that its vectors have dimension {facts.dimension}; expected {space.dimension}.",
            _REMOVE,
        )
    if facts.precision not in LOWEST_COSINE:
        raise InvalidFile(f"its metadata name an unknown precision {facts.precision!r}")
    if facts.desired_version != desired_version(facts.content_digest, facts.space):
        raise InvalidFile("its desired version does not follow from its content digest and space")
    check_schema(reader.columns, dimension=space.dimension, dtype=space.dtype)
    return facts


def _verify_rows(
    partition: Partition,
    facts: FileFacts,
    reader: OutputFile,
    space: Space,
    wanted: frozenset[int],
    samples: _Samples | None,
) -> None:
    digest, ids = ContentDigest(), IdSet()
    row = 0

    def from_source() -> Iterator[RowBatch]:
        for batch in partition.read():
            digest.update(batch)
            ids.add(batch.ids)
            yield batch

    for ours, theirs in _aligned(from_source(), reader.read()):
        if ours is None or theirs is None:
            raise _Broken(
                "rows",
                f"the file has {facts.rows:,} rows and the source {'more' if theirs is None else 'fewer'}.",
                _REMOVE_FILE,
            )
        _require_equal("ids", "id", row, theirs.column("id"), ours.ids)
        if "text" in theirs.schema.names:
            _require_equal("texts", "text", row, theirs.column("text"), ours.texts)
        matrix = matrix_of(theirs)
        wrong = invalid_row(matrix, normalized=space.normalize)
        if wrong is not None:
            kind = "finite" if not np.isfinite(matrix[wrong[0]]).all() else "length"
            raise _Broken(kind, f"row {row + wrong[0]}: {wrong[1]}.", _REMOVE_FILE)
        if samples is not None:
            picked = [offset for offset in range(len(ours)) if row + offset in wanted]
            samples.add(partition.key, facts.precision, row, ours.texts, matrix, picked)
        row += len(ours)
    if row != facts.rows:
        raise _Broken(
            "rows", f"{row:,} rows could be read of the {facts.rows:,} that the file announces.", _REMOVE_FILE
        )
    if digest.hexdigest() != facts.content_digest:
        raise _Broken("texts", "its content digest is not that of the source's rows.", _REMOVE_FILE)
    refuse_repeated_id(partition, ids.repeated())


def _require_equal(kind: Kind, what: str, first_row: int, found: pa.Array, expected: pa.Array) -> None:
    if found.equals(expected):
        return
    row = next((row for row, (a, b) in enumerate(zip(found, expected, strict=True)) if a.as_py() != b.as_py()), None)
    if row is None:
        raise _Broken(kind, f"the {what} column has type {found.type}; the source's has {expected.type}.", _REMOVE_FILE)
    raise _Broken(
        kind,
        f"row {first_row + row}: the file has the {what} {_short(found[row])} and the source {_short(expected[row])}.",
        _REMOVE_FILE,
    )


def _aligned(
    ours: Iterator[RowBatch], theirs: Iterator[pa.RecordBatch]
) -> Iterator[tuple[RowBatch | None, pa.RecordBatch | None]]:
    """Both streams cut into pieces of equal length; a side that ends early gives None."""
    mine = next(ours, None)
    other = next(theirs, None)
    while mine is not None or other is not None:
        if mine is not None and not len(mine):
            mine = next(ours, None)
        elif other is not None and not other.num_rows:
            other = next(theirs, None)
        elif mine is None or other is None:
            yield mine, other
            return
        else:
            rows = min(len(mine), other.num_rows)
            yield RowBatch(mine.ids[:rows], mine.texts[:rows]), other.slice(0, rows)
            mine, other = RowBatch(mine.ids[rows:], mine.texts[rows:]), other.slice(rows)


def _rows_to_encode(rows: int, reencode: int | None, seed: str) -> frozenset[int]:
    if reencode is None or reencode >= rows:
        return frozenset(range(rows))
    return frozenset(random.Random(seed).sample(range(rows), reencode))


class _Samples:
    """Rows waiting to be encoded again; compared a slot at a time."""

    def __init__(self, pool: EncoderPool, space: Space) -> None:
        if pool.space.spec_sha256 != space.spec_sha256:
            raise SurgeError(f"the pool encodes into {pool.space.name}, not into {space.name}")
        self._pool = pool
        self._texts: list[pa.LargeStringArray] = []
        self._vectors: list[np.ndarray] = []
        self._origins: list[tuple[str, str, int]] = []
        self._bytes = 0
        self._found: list[Violation] = []
        self._blamed: set[str] = set()

    def add(
        self,
        key: str,
        precision: str,
        first_row: int,
        texts: pa.LargeStringArray,
        matrix: np.ndarray,
        picked: list[int],
    ) -> None:
        for offset in picked:
            text = texts[offset : offset + 1]
            size = int(value_lengths(text)[0])
            if len(self._texts) == _SAMPLE_TEXTS or self._bytes + size > _SAMPLE_BYTES:
                self._compare()
            self._texts.append(text)
            self._vectors.append(matrix[offset].copy())
            self._origins.append((key, precision, first_row + offset))
            self._bytes += size

    def due(self) -> Iterator[Violation]:
        found, self._found = self._found, []
        yield from found

    def finish(self) -> Iterator[Violation]:
        self._compare()
        yield from self.due()

    def _compare(self) -> None:
        if not self._texts:
            return
        with self._pool.arena(slots=1, max_texts=len(self._texts), max_bytes=max(1, self._bytes)) as arena:
            slot = arena.acquire()
            _fill(slot, self._texts)
            self._pool.encode(slot)
            again = slot.matrix(0, len(slot)).astype(np.float32)
            cosines = _cosines(np.stack(self._vectors).astype(np.float32), again)
            slot.release()
        for (key, precision, row), cosine in zip(self._origins, cosines, strict=True):
            lowest = min(LOWEST_COSINE[precision], LOWEST_COSINE[self._pool.precision])
            if not cosine >= lowest and key not in self._blamed:
                self._blamed.add(key)
                self._found.append(
                    Violation(
                        key,
                        "vectors",
                        f"row {row}: its vector has cosine {cosine:.6f} to its text encoded again; expected at least "
                        f"{lowest}. {_REMOVE_FILE}",
                        _REMOVE_FILE,
                    )
                )
        self._texts, self._vectors, self._origins, self._bytes = [], [], [], 0


def _fill(slot: Slot, texts: list[pa.LargeStringArray]) -> None:
    slot.append(pa.concat_arrays(texts))  # pyright: ignore[reportArgumentType]


def _cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return np.einsum("ij,ij->i", a, b) / np.maximum(lengths, np.finfo(np.float32).tiny)


def _short(value: pa.Scalar) -> str:
    text = repr(value.as_py())
    return text if len(text) <= 60 else f"{text[:57]}…"
