"""Comparison of a target with the files: rows of every partition, and vectors of a sample bit for bit."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from surge_dagster.consumers.target import Target
from surge_dagster.engine.errors import DataError, TransientError
from surge_dagster.engine.feed.changes import Changes
from surge_dagster.engine.files.rows import matrix_of

SAMPLED_PARTITIONS = 50
SAMPLED_ROWS = 4  # of each


@dataclass(slots=True)
class Comparison:
    """What a comparison found.

    Attributes:
        rows_expected: of the files, in the partitions that were handed over.
        vectors_compared: of a sample, which is drawn anew each time.
        interrupted: which partitions of the sample could not be compared, and why; "" where all of them were.
    """

    rows_expected: int = 0
    rows_found: int = 0
    vectors_compared: int = 0
    wrong: dict[str, str] = field(default_factory=dict)
    interrupted: str = ""


def compare(feed: Changes, target: Target) -> Comparison:
    """Compare a target with the files of the partitions that it has.

    A partition that could not be handed over is not compared; one that the target has beyond the feed's is wrong.
    """
    files, counts = feed.files(), target.counts()
    compared = Comparison(sum(file.facts.rows for file in files.values()), sum(counts.values()))
    pending = feed.versions.keys() - files.keys()
    for key in files.keys() | counts.keys() - pending:
        expected_rows, rows = files[key].facts.rows if key in files else 0, counts.get(key, 0)
        if expected_rows != rows:
            compared.wrong[key] = f"it has {rows:,} rows; its file has {expected_rows:,}"
    unread: list[str] = []
    try:
        for sampled in feed.sample(SAMPLED_PARTITIONS, SAMPLED_ROWS, random.getrandbits(32)):
            if isinstance(sampled, DataError):
                compared.wrong[sampled.key] = f"its file is damaged: {sampled.reason}"
            elif isinstance(sampled, TransientError):  # a run has replaced the file meanwhile
                unread.append(str(sampled))
            else:
                _compare_vectors(sampled, target, compared)
    except TransientError as error:  # the store does not answer
        unread.append(str(error))
    compared.interrupted = " ".join(unread)
    return compared


def _compare_vectors(sampled: pa.RecordBatch, target: Target, compared: Comparison) -> None:
    key = (sampled.schema.metadata or {})[b"partition"].decode()
    ids = sampled.column("id").to_pylist()
    vectors = target.vectors(key, ids)
    for row, vector in zip(ids, matrix_of(sampled), strict=True):
        compared.vectors_compared += 1
        if row not in vectors:
            compared.wrong[key] = f"the row {row!r} is missing"
        elif _bits(vectors[row]) != _bits(vector):
            compared.wrong[key] = f"the vector of the row {row!r} is not that of its file"


def _bits(vector: np.ndarray) -> tuple[np.dtype, bytes]:
    return vector.dtype, np.ascontiguousarray(vector).tobytes()
