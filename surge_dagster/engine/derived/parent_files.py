"""What is read of a derived space's parent: rows, the ranges of int8, how far the derived space is
behind, and the recall that it keeps.

Recall@10 is how many of a row's ten nearest rows by float32 the derived space finds too. It is
measured on a seeded sample of the parent's rows: some of them are queries, all of them are
searched, and a row does not find itself. More rows have nearer neighbours, so the recall of the
whole space is lower than that of a sample, and the report gives both numbers of rows. Queries keep
their float32 vectors, cut as the space's are. Those of a binary space are compared by Hamming
distance, and again with the forty nearest ranked by int8 vectors, as sentence-transformers
recommends.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from surge_dagster.engine.derived.conversion import comparable, convert, cut
from surge_dagster.engine.errors import ConfigError, DataError, StoreUnavailable, TransientError
from surge_dagster.engine.files.formats import PublishedFile, open_listed, usable_file
from surge_dagster.engine.files.rows import matrix_of
from surge_dagster.engine.model.spec import DerivedDtype, Ranges, Space
from surge_dagster.engine.output.freshness import Found, Freshness, OutputState
from surge_dagster.engine.output.spaces import list_spaces
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.counts import counted

log = logging.getLogger(__name__)

_BATCH_ROWS = 1024
K = 10
QUERIES = 200
RESCORED = 4 * K
_SAMPLE_BYTES = 64 * 1024 * 1024
_FILES_PER_SAMPLE = 8  # no file gives more than an eighth of the sample
_EQUAL = 1e-6


def beside_parent(
    store: Store, parent: Space, listed: Mapping[str, Found | TransientError], derived: OutputState
) -> Iterator[tuple[PublishedFile, Freshness] | DataError | TransientError]:
    """Yield each file of the parent with the freshness of its derived file, or the error."""
    for name, found in listed.items():
        try:
            file = usable_file(store, parent, name, found)
        except (DataError, TransientError) as error:
            yield error
            continue
        freshness = derived.derived_freshness(file)
        if freshness.error is not None:
            yield freshness.error
        else:
            yield file, freshness


def parent_rows(
    store: Store, parent: Space, file: PublishedFile, columns: list[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a file as it was listed; errors are those of `open_listed`."""
    with open_listed(store, parent, file) as reader:
        for batch in reader.read(columns=columns, batch_rows=_BATCH_ROWS):
            if batch.num_rows:
                yield batch


def find_ranges(
    store: Store, parent: Space, wanted: Space, files: Iterable[PublishedFile]
) -> Ranges:
    """Return the smallest and largest value of each dimension.

    Files that are damaged or cannot be read now are left out; no vectors at all is a `ConfigError`.

    Args:
        wanted: the space to derive, without ranges.
    """
    least = np.full(wanted.dimension, np.inf, np.float32)
    most = np.full(wanted.dimension, -np.inf, np.float32)
    for file in files:
        try:
            for batch in parent_rows(store, parent, file, ["embedding"]):
                vectors = cut(matrix_of(batch), wanted)
                np.minimum(least, vectors.min(0), out=least)
                np.maximum(most, vectors.max(0), out=most)
        except StoreUnavailable:
            raise
        except (DataError, TransientError) as error:
            message = "int8 has its ranges without this partition, which may be clipped: %s"
            log.warning(message, error)
    if np.isinf(least).all():
        raise ConfigError(
            f"the space {parent.name} has no vectors to find the ranges of int8 in. Embed first "
            "(`surge-dagster embed`), then derive."
        )
    return tuple(least.tolist()), tuple(most.tolist())


@dataclass(slots=True)
class Lag:
    """What a derived space lacks of its parent.

    Attributes:
        space: its name; empty if the output does not have it.
        fresh: number of partitions whose file names the rows of the parent's file.
        missing: keys of partitions without a file.
        stale: keys of partitions whose file was derived from earlier rows.
        not_judged: keys of partitions with a file that cannot be read, and why.
    """

    space: str
    fresh: int = 0
    missing: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    not_judged: list[tuple[str, str]] = field(default_factory=list)

    @property
    def judged(self) -> int:
        return self.fresh + len(self.missing) + len(self.stale)

    def in_words(self) -> str:
        """Return the lag for people in a line."""
        counts = {
            "missing": len(self.missing),
            "derived from earlier rows": len(self.stale),
            "not judged, because a file cannot be read": len(self.not_judged),
        }
        total = counted(self.judged + len(self.not_judged), "partition")
        line = f"{self.fresh:,} of {total} up to date"
        for what, count in counts.items():
            if count:
                line += f", {count:,} {what}"
        return line


def find_derived(store: Store, wanted: Space) -> Space | None:
    """Return the derived space with the parent, dtype and dimension of `wanted`, if there is one.

    Its ranges may be other ones.
    """
    for space in list_spaces(store):
        if _conversion(space) == _conversion(wanted):
            return space
    return None


def _conversion(space: Space) -> tuple[str, str, int] | None:
    if space.derived is None:
        return None
    return space.derived.parent_sha256, space.dtype, space.dimension


def find_lag(store: Store, parent: Space, dtype: DerivedDtype, dimension: int | None) -> Lag:
    """Compare each file of the parent with the file that is derived from it."""
    wanted = parent.derive(dtype, dimension)
    space = find_derived(store, wanted)
    lag = Lag(space.name if space else "")
    parents = OutputState(store, parent.name).files()
    own = space or wanted
    derived = OutputState(store, own.name)
    derived.files()  # reads them concurrently from a bucket
    for judged in beside_parent(store, parent, parents, derived):
        if not isinstance(judged, tuple):
            lag.not_judged.append((judged.key or "?", str(judged)))
            continue
        file, freshness = judged
        if freshness.status == "fresh":
            lag.fresh += 1
        elif freshness.status == "stale":
            lag.stale.append(file.facts.partition_key)
        else:
            lag.missing.append(file.facts.partition_key)
    return lag


@dataclass(frozen=True, slots=True)
class Recall:
    """The recall@10 of a space.

    Attributes:
        recall_at_10: mean over the queries, 0 to 1.
        rescored_at_10: of a binary space with int8 rescoring; else None.
        queries, rows, partitions: of the sample: rows that were looked up, rows that were searched,
            and partitions that have them.
    """

    recall_at_10: float
    rescored_at_10: float | None
    queries: int
    rows: int
    partitions: int
    total_rows: int

    def in_words(self) -> str:
        line = f"recall@10 against float32: {self.recall_at_10:.3f}"
        if self.rescored_at_10 is not None:
            line += f", {self.rescored_at_10:.3f} with int8 rescoring"
        rows = f"{self.rows:,} of {counted(self.total_rows, 'row')}"
        partitions = counted(self.partitions, "partition")
        return f"{line} ({self.queries:,} rows as queries among {rows}, in {partitions})"


def measure_recall(
    store: Store, parent: Space, space: Space, files: Sequence[PublishedFile], seed: int = 0
) -> Recall | None:
    """Measure a space on a seeded sample of its parent's rows, at most 64 MiB of them.

    Files that are damaged or cannot be read now give no rows; None if there are fewer than two.
    """
    sample, partitions = _sample(store, parent, files, random.Random(seed))
    if len(sample) < 2:
        return None
    drawn = random.Random(seed).sample(range(len(sample)), min(QUERIES, len(sample)))
    plain, rescored = recall_of(sample, np.array(sorted(drawn)), space)
    return Recall(
        recall_at_10=round(plain, 4),
        rescored_at_10=rescored and round(rescored, 4),
        queries=len(drawn),
        rows=len(sample),
        partitions=partitions,
        total_rows=sum(file.facts.rows for file in files),
    )


def recall_of(matrix: np.ndarray, queries: np.ndarray, space: Space) -> tuple[float, float | None]:
    """Return the recall@10 of a space among these rows, for a binary space also with rescoring.

    Rows that are equally near count equally, so that repeated texts neither raise nor lower it.

    Args:
        matrix: float32 vectors of the parent, [rows, dimension].
        queries: places of the rows that are looked up.
    """
    k = min(K, len(matrix) - 1)
    exact = _without_self(_units(matrix[queries]) @ _units(matrix).T, queries)
    least = np.partition(exact, -k, axis=1)[:, -k] - _EQUAL
    vectors = cut(matrix, space)
    stored = convert(vectors, space)
    asked = vectors[queries]
    if space.dtype == "binary":
        asked = comparable(stored[queries], space)
    scores = _without_self(asked @ _units(comparable(stored, space)).T, queries)

    def share(places: np.ndarray) -> float:
        return float(np.mean(np.take_along_axis(exact, places, axis=1) >= least[:, None]))

    plain = share(_best(scores, k))
    if space.dtype != "binary":
        return plain, None
    assert space.derived
    near = _best(scores, min(RESCORED, len(matrix) - 1))
    ranges = (tuple(vectors.min(0).tolist()), tuple(vectors.max(0).tolist()))
    whole = replace(space, dtype="int8", derived=replace(space.derived, ranges=ranges))
    again = np.einsum(
        "qd,qnd->qn", vectors[queries], _units(comparable(convert(vectors, whole), whole))[near]
    )
    return plain, share(np.take_along_axis(near, _best(again, k), axis=1))


def _sample(
    store: Store, parent: Space, files: Sequence[PublishedFile], draw: random.Random
) -> tuple[np.ndarray, int]:
    """Return rows of some files, [rows, dimension], and the number of files."""
    most = max(2, _SAMPLE_BYTES // (4 * parent.dimension))
    sample = [np.empty((0, parent.dimension), np.float32)]
    rows = 0
    partitions = 0
    for file in draw.sample(files, len(files)):
        wanted = min(max(1, most // _FILES_PER_SAMPLE), most - rows)
        if not wanted:
            break
        try:
            taken = _first_rows(store, parent, file, wanted)
        except StoreUnavailable:
            raise
        except (DataError, TransientError):
            continue
        if len(taken):
            sample.append(taken)
            rows += len(taken)
            partitions += 1
    return np.concatenate(sample), partitions


def _first_rows(store: Store, parent: Space, file: PublishedFile, rows: int) -> np.ndarray:
    taken = np.empty((0, parent.dimension), np.float32)
    for batch in parent_rows(store, parent, file, ["embedding"]):
        if len(taken) >= rows:
            break
        taken = np.concatenate([taken, matrix_of(batch)])
    return taken[:rows]


def _units(matrix: np.ndarray) -> np.ndarray:
    return matrix / np.maximum(
        np.linalg.norm(matrix, axis=1, keepdims=True), np.finfo(np.float32).tiny
    )


def _without_self(scores: np.ndarray, queries: np.ndarray) -> np.ndarray:
    scores[np.arange(len(queries)), queries] = -np.inf
    return scores


def _best(scores: np.ndarray, k: int) -> np.ndarray:
    """Return the places of the `k` highest scores of each row, unordered."""
    return np.argpartition(scores, -k, axis=1)[:, -k:]
