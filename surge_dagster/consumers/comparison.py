"""Hand-overs with a comparison of the target with the files: rows per partition, and vectors."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from surge_dagster.consumers.target import HandOver, OpenFeed, Stored, Target
from surge_dagster.engine.compare.recall import recall_of
from surge_dagster.engine.errors import DataError, SurgeError, TransientError
from surge_dagster.engine.feed.changes import Changes, Sample
from surge_dagster.engine.files.rows import matrix_of

log = logging.getLogger(__name__)

# Three samples miss 1 % wrong rows once in 3.5 million times.
SAMPLE = Sample(rows=500, of_partition=10)


@dataclass(slots=True)
class Comparison:
    """What a comparison found.

    Attributes:
        rows_expected, rows_found: of the files and of the table, in the judged partitions.
        not_judged: partitions that could not be handed over.
        partitions_compared: those whose vectors were in the random sample; None is all.
        wrong: what is wrong, by partition.
        interrupted: why some vectors could not be compared; "" if all were.
        index_recall: the share of the ten nearest rows that the index finds; None if not measured.
    """

    rows_expected: int = 0
    rows_found: int = 0
    vectors_compared: int = 0
    not_judged: set[str] = field(default_factory=set)
    partitions_compared: list[str] | None = None
    wrong: dict[str, str] = field(default_factory=dict)
    interrupted: str = ""
    index_recall: float | None = None


def apply_and_compare(
    target: Target, open_feed: OpenFeed, *, everything: bool
) -> tuple[HandOver, Comparison]:
    """Bring a table up to date, and compare it with the files.

    The recall of its index is measured at a first load, and if everything is compared. That takes
    long and changes nothing, so it comes after the hand-over is confirmed and its lock released.
    """
    compared = Comparison()

    def judge(feed: Changes, stored: Stored) -> Collection[str]:
        nonlocal compared
        compared = compare(feed, stored, everything=everything)
        return compared.wrong

    done = target.apply(open_feed, judge)
    if everything or done.feed.is_new:
        compared.index_recall = index_recall(done.feed, target)
    return done, compared


def compare(feed: Changes, stored: Stored, *, everything: bool = False) -> Comparison:
    """Compare a table with the files of its partitions; partitions without a file are wrong.

    If a vector of the sample is wrong, everything is compared.
    """
    files = feed.files()
    counts = stored.counts()
    pending = feed.versions.keys() - files.keys()
    compared = Comparison(not_judged=pending)
    for key in files.keys() | counts.keys() - pending:
        expected_rows = files[key].facts.rows if key in files else 0
        rows = counts.get(key, 0)
        compared.rows_expected += expected_rows
        compared.rows_found += rows
        if expected_rows != rows:
            compared.wrong[key] = f"it has {rows:,} rows; its file has {expected_rows:,}"
    if everything or _differs(feed, stored, compared, SAMPLE):
        _differs(feed, stored, compared, None)
    return compared


def index_recall(feed: Changes, target: Target) -> float | None:
    """Return the share of the ten nearest rows that the index of a table finds.

    Reads all files. None if there is no index or no row, if a file cannot be read, or if the
    distance of the index gives another order than cosine.
    """
    distance = target.index_distance
    files = [file for file in feed.files().values() if file.facts.rows]
    is_cosine = distance == "cosine" or (distance is not None and feed.space.normalize)
    if not is_cosine or not files:
        return None
    try:
        return recall_of(feed.store, feed.space, files, target.nearest)
    except SurgeError as error:
        log.warning("the recall of %s is not measured: %s", target.place, error)
        return None


def _differs(feed: Changes, stored: Stored, compared: Comparison, sample: Sample | None) -> bool:
    """Record wrong vectors in `compared`; return whether a row is missing or differs."""
    differs = False
    unread: list[str] = []
    partitions: dict[str, None] = {}
    compared.vectors_compared = 0
    try:
        for key, rows in feed.vectors(sample):
            partitions[key] = None
            if isinstance(rows, DataError):
                compared.wrong[key] = f"its file is damaged: {rows.reason}"
            elif isinstance(rows, TransientError):  # a run has replaced the file since
                unread.append(str(rows))
            else:
                compared.vectors_compared += len(rows)
                found = stored.vectors(key, rows.column("id").to_pylist())
                if (reason := _difference(rows, found)) is not None:
                    compared.wrong[key] = reason
                    differs = True
    except TransientError as error:  # the store does not answer
        unread.append(str(error))
    compared.interrupted = " ".join(unread)
    compared.partitions_compared = None if sample is None else list(partitions)
    return differs


def _difference(rows: pa.RecordBatch, vectors: dict[object, np.ndarray]) -> str | None:
    for row, vector in zip(rows.column("id").to_pylist(), matrix_of(rows), strict=True):
        if row not in vectors:
            return f"the row {row!r} is missing"
        if _bits(vectors[row]) != _bits(vector):
            return f"the vector of the row {row!r} is not that of its file"
    return None


def _bits(vector: np.ndarray) -> tuple[np.dtype, bytes]:
    return vector.dtype, np.ascontiguousarray(vector).tobytes()
