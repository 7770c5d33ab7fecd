"""Whether a text that is encoded again gets the vector that it had: read from the old file before it is replaced.

Within one space it must, up to rounding, so a lower cosine means that the model or a device has changed its mind. Only
a sample is looked at: all of the first partitions that are replaced and fewer of those that follow, and of each some
rows that lie together, which costs one row group. What does not fit into the run's memory at that moment, or cannot be
read, is left out: no comparison waits for room, and none fails a partition.
"""

from __future__ import annotations

import hashlib
import logging
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.files.embedding_file import InvalidFile, check_schema, matrix_of
from surge_dagster.engine.files.file_formats import file_name, open_output_file
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.ledger import Ledger
from surge_dagster.engine.support.unreadable import UNREADABLE

log = logging.getLogger(__name__)

SAMPLE_ROWS = 16
ALWAYS_COMPARED = 64
_COPIES = 2  # a row group as it is read, and decoded


@dataclass(frozen=True, slots=True)
class Drift:
    """Rows of one partition whose texts had a vector before, and the mean cosine of both vectors."""

    rows: int
    mean_cosine: float

    def joined(self, other: Drift | None) -> Drift:
        """Both, each row counting the same."""
        if other is None:
            return self
        rows = self.rows + other.rows
        return Drift(rows, (self.rows * self.mean_cosine + other.rows * other.mean_cosine) / rows)


class DriftDraw:
    """Which of the partitions that are replaced are compared: about `ALWAYS_COMPARED` times 1 + log of their number.

    Args:
        seed: the same one draws the same partitions of the same catalog.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._seen = 0

    def takes(self, key: str) -> bool:
        """Draw for the next partition that is replaced."""
        self._seen += 1
        drawn = hashlib.blake2b(f"{self._seed}:{key}".encode(), digest_size=8).digest()
        return int.from_bytes(drawn) * self._seen < ALWAYS_COMPARED << 64


class Comparisons:
    """What was found of partitions on their way, until their files stand; used by all publishing threads.

    Args:
        store, space: where the old files lie.
        ledger: booked with what reading a sample takes.
    """

    def __init__(self, store: Store, space: Space, ledger: Ledger) -> None:
        self._store = store
        self._space = space
        self._ledger = ledger
        self._lock = threading.Lock()
        self._found: dict[str, Drift] = {}

    def add(
        self, key: str, content_digest: str, ids: Sequence[pa.Array], texts: pa.LargeStringArray, matrix: np.ndarray
    ) -> None:
        """Compare rows of a partition: see `compare_with_previous`."""
        found = compare_with_previous(self._store, self._space, key, content_digest, ids, texts, matrix, self._ledger)
        if found is not None:
            with self._lock:
                self._found[key] = found.joined(self._found.get(key))

    def take(self, key: str) -> Drift | None:
        """What was found of a partition, whose file is complete; it is forgotten."""
        with self._lock:
            return self._found.pop(key, None)


def compare_with_previous(
    store: Store,
    space: Space,
    key: str,
    content_digest: str,
    ids: Sequence[pa.Array],
    texts: pa.LargeStringArray,
    matrix: np.ndarray,
    ledger: Ledger,
) -> Drift | None:
    """Compare rows of a partition with a sample of its file that is still there.

    Args:
        content_digest: of the old file when it was listed; another one since means another writer, and no comparison.
        ids, texts, matrix: the new rows; all of the partition or a segment of it.
        ledger: booked with what reading the sample takes.

    Returns:
        None where no row of the sample is among the new ones with the same text, or where the old file has no texts.
    """
    try:
        with (
            store.open(file_name(space.name, key, space.file_format)) as file,
            open_output_file(file, space.file_format) as reader,
        ):
            facts = reader.facts
            if facts.content_digest != content_digest or not facts.rows:
                return None
            check_schema(reader.schema, dimension=space.dimension, dtype=space.dtype)
            if "text" not in reader.schema.names:
                return None
            group = random.Random(key).randrange(reader.groups)
            booked = _COPIES * reader.group_bytes(group)
            if not ledger.try_reserve(booked):
                return None
            try:
                sample = next(reader.read(batch_rows=SAMPLE_ROWS, groups=[group]), None)
                return None if sample is None else _compared(sample, ids, texts, matrix)
            finally:
                ledger.release(booked)
    except FileNotFoundError:
        return None
    except (InvalidFile, TransientError, *UNREADABLE) as error:
        log.warning("partition %r: its old file cannot be compared with the new vectors: %s", key, error)
        return None


def _compared(
    sample: pa.RecordBatch, ids: Sequence[pa.Array], texts: pa.LargeStringArray, matrix: np.ndarray
) -> Drift | None:
    known = {row_id: row for row, row_id in enumerate(sample.column("id").to_pylist())}
    old = matrix_of(sample).astype(np.float32)
    cosines = []
    first = 0
    for part in ids:
        if part.type == sample.column("id").type:
            found = pc.is_in(part, value_set=sample.column("id"))  # pyright: ignore[reportAttributeAccessIssue]
            for offset in np.flatnonzero(found.to_numpy(zero_copy_only=False)):
                new_row, old_row = first + int(offset), known[part[int(offset)].as_py()]
                if texts[new_row].as_py() == sample.column("text")[old_row].as_py():
                    cosines.append(_cosine(old[old_row], matrix[new_row].astype(np.float32)))
        first += len(part)
    return Drift(len(cosines), sum(cosines) / len(cosines)) if cosines else None


def _cosine(one: np.ndarray, other: np.ndarray) -> float:
    lengths = float(np.linalg.norm(one)) * float(np.linalg.norm(other))
    if not lengths:
        return float(np.array_equal(one, other))
    cosine = float(one @ other) / lengths
    return cosine if np.isfinite(cosine) else 0.0
