"""Comparison of a target with the files: rows of every partition, and vectors of a sample bit for bit."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from surge_dagster.consumers.target import Target
from surge_dagster.engine.errors import DataError, TransientError
from surge_dagster.engine.feed.changes import Changes
from surge_dagster.engine.files.rows import matrix_of

SAMPLED_PARTITIONS = 50
SAMPLED_ROWS = 4  # of each
_SEED = 7


@dataclass(slots=True)
class Comparison:
    """What a comparison found.

    Attributes:
        rows_expected: of the files, in the partitions that were handed over.
        rows_found: of the target, in all partitions.
        vectors_compared: of the sample.
        wrong: what differs, by partition.
    """

    rows_expected: int = 0
    rows_found: int = 0
    vectors_compared: int = 0
    wrong: dict[str, str] = field(default_factory=dict)


def compare(feed: Changes, target: Target) -> Comparison:
    """Compare a target with the files of the partitions that it has.

    A partition that could not be handed over is not compared; one that the target has beyond the feed's is wrong.

    Args:
        feed: read and applied.

    Raises:
        SurgeError: the target cannot be read.
    """
    files, counts = feed.files(), target.counts()
    found = Comparison(sum(file.facts.rows for file in files.values()), sum(counts.values()))
    pending = feed.versions.keys() - files.keys()
    for key in files.keys() | counts.keys() - pending:
        expected, came = files[key].facts.rows if key in files else 0, counts.get(key, 0)
        if expected != came:
            found.wrong[key] = f"it has {came:,} rows; its file has {expected:,}"
    try:
        for batch in feed.sample(SAMPLED_PARTITIONS, SAMPLED_ROWS, _SEED):
            key = (batch.schema.metadata or {})[b"partition"].decode()
            ids = batch.column("id").to_pylist()
            vectors = target.vectors(key, ids)
            for row, vector in zip(ids, matrix_of(batch), strict=True):
                found.vectors_compared += 1
                if row not in vectors:
                    found.wrong[key] = f"the row {row!r} is missing"
                elif _bits(vectors[row]) != _bits(vector):
                    found.wrong[key] = f"the vector of the row {row!r} is not that of its file"
    except DataError as error:
        found.wrong[error.key] = f"its file is damaged: {error.reason}"
    except TransientError:
        pass  # a run replaces files meanwhile; the next hand-over compares again
    return found


def _bits(vector: np.ndarray) -> tuple[np.dtype, bytes]:
    return vector.dtype, np.ascontiguousarray(vector).tobytes()
