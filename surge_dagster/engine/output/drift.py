"""Drift: the cosine of a text's new vector to the one it had, read from the old file before it is replaced.

Within one space both are equal up to rounding, so a lower cosine means that the model or a device has changed. Only a
sample is compared: all of the first replaced partitions and fewer of the later ones, and of each some neighbouring
rows. A sample that does not fit into the run's memory at that moment, or that cannot be read, is left
out: a comparison never waits and never fails a partition.
"""

from __future__ import annotations

import hashlib
import logging
import random

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.files.facts import InvalidFile
from surge_dagster.engine.files.formats import file_name, open_output_file
from surge_dagster.engine.files.rows import check_schema, matrix_of
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.superbatch import Segment
from surge_dagster.engine.support.ledger import Ledger
from surge_dagster.engine.support.unreadable import UNREADABLE

log = logging.getLogger(__name__)

SAMPLE_ROWS = 16
ALWAYS_COMPARED = 64
_COPIES = 2  # a row group as it is read, and decoded


class DriftSample:
    """Chooses which replaced partitions are compared: about `ALWAYS_COMPARED` times 1 + log of their number.

    Args:
        seed: the same seed chooses the same partitions of the same catalog.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._seen = 0

    def takes(self, key: str) -> bool:
        """Whether the next replaced partition is compared."""
        self._seen += 1
        drawn = hashlib.blake2b(f"{self._seed}:{key}".encode(), digest_size=8).digest()
        return int.from_bytes(drawn) * self._seen < ALWAYS_COMPARED << 64


def compare_with_previous(
    store: Store, space: Space, segment: Segment, texts: pa.LargeStringArray, matrix: np.ndarray, ledger: Ledger
) -> list[float]:
    """Compare rows of a partition with a sample of its old file, which is still there.

    Args:
        segment: the rows; `segment.partition.replaces` is the content digest of the old file when it was listed.
        texts, matrix: their texts and new vectors, [rows, dimension].
        ledger: books what reading the sample takes.

    Returns:
        A cosine for each row of the sample with the same id and text; none where the old file has no texts, was
        replaced meanwhile or cannot be read.
    """
    key = segment.partition.key
    try:
        with (
            store.open(file_name(space.name, key, space.file_format)) as file,
            open_output_file(file, space.file_format) as reader,
        ):
            facts = reader.facts
            if facts.content_digest != segment.partition.replaces or not facts.rows:
                return []
            check_schema(reader.columns, dimension=space.dimension, dtype=space.dtype)
            if "text" not in reader.columns.names:
                return []
            group = random.Random(key).randrange(reader.groups)
            booked = _COPIES * reader.group_bytes(group)
            if not ledger.try_reserve(booked):
                return []
            try:
                sample = next(reader.read(batch_rows=SAMPLE_ROWS, groups=[group]), None)
                return [] if sample is None else _cosines(sample, segment, texts, matrix)
            finally:
                ledger.release(booked)
    except FileNotFoundError:
        return []
    except (InvalidFile, TransientError, *UNREADABLE) as error:
        log.warning("partition %r: its old file cannot be compared with the new vectors: %s", key, error)
        return []


def _cosines(sample: pa.RecordBatch, segment: Segment, texts: pa.LargeStringArray, matrix: np.ndarray) -> list[float]:
    old_ids = sample.column("id")
    old_rows = {row_id: row for row, row_id in enumerate(old_ids.to_pylist())}
    old = matrix_of(sample).astype(np.float32)
    ids = pa.chunked_array(list(segment.ids), type=segment.partition.id_type)
    if ids.type != old_ids.type:
        return []
    cosines: list[float] = []
    found = pc.is_in(ids, value_set=old_ids)  # pyright: ignore[reportAttributeAccessIssue]
    for row in np.flatnonzero(found.to_numpy()).tolist():
        old_row = old_rows[ids[row].as_py()]
        if texts[row].as_py() == sample.column("text")[old_row].as_py():
            cosines.append(_cosine(old[old_row], matrix[row].astype(np.float32)))
    return cosines


def _cosine(one: np.ndarray, other: np.ndarray) -> float:
    lengths = float(np.linalg.norm(one)) * float(np.linalg.norm(other))
    if not lengths:
        return float(np.array_equal(one, other))
    cosine = float(one @ other) / lengths
    return cosine if np.isfinite(cosine) else 0.0
