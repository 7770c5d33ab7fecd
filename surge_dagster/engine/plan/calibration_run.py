"""The calibration of `plan --calibrate`: two short runs over first rows of some partitions, whose files are deleted.

Every stage works as in a real run, on the source's own texts and on the output's own store, so what they teach the
planner is what a run would. The first begins with small SuperBatches; the second, which knows their costs, has those of
the middle of a long run. A slow model encodes large SuperBatches a quarter faster per text than small ones.
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import SurgeError
from surge_dagster.engine.model.spec import FileFormat
from surge_dagster.engine.plan.calibrating import learning
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources.partition import Partition, RowBatch
from surge_dagster.engine.store import StorageOptions, open_store
from surge_dagster.engine.store.store import Store

_SECONDS, _BLOCKS = 20.0, 32
_SHARES = {0.25: None, 0.75: sys.maxsize}  # of the seconds, for each run, and B_min of its first SuperBatch
_UNCOUNTED_ROWS = 256  # taken of a partition whose rows are not counted
_LARGEST_PARTITIONS, _OTHER_PARTITIONS, _SAMPLED_ROWS = 16, 48, 4096
_NAME = ".surge-calibration"


def calibrate(
    partitions: Sequence[Partition],
    output: str,
    options: StorageOptions,
    pool: EncoderPool,
    file_format: FileFormat = "parquet",
    thresholds: Thresholds | None = None,
    *,
    memory_limit: int | None = None,
    seconds: float = _SECONDS,
) -> int:
    """Measure what a run over these partitions costs, in place of what earlier runs have shown.

    Takes about so many seconds of encoding, and returns how many texts were encoded.
    """
    pool.read_costs(anew=True)
    thresholds = thresholds or Thresholds()
    encoded, shuffled = 0, random.Random(0).sample(partitions, len(partitions))
    sizes = np.array([_UNCOUNTED_ROWS if each.rows is None else each.rows for each in shuffled], float)
    counted = [partition for partition in partitions if partition.rows]
    text_bytes, rows_counted = estimate_bytes(counted)[0].sum(), sum(partition.rows or 0 for partition in counted)
    for share, first_b_min in _SHARES.items():
        tokens = float(text_bytes) * pool.costs.tokens_per_single_byte / max(1, rows_counted)
        # At least one row, which shows how much of long texts the model reads.
        wanted = max(1.0, share * seconds * pool.costs.workers / pool.costs.text_seconds(tokens or None))
        chosen = [
            replace(partition, read=partial(_first_rows, partition, rows), rows=None)
            for partition, rows in zip(shuffled, _sampled_rows(sizes, wanted), strict=True)
            if rows
        ]
        with _temporary_store(output, options) as store:
            # Forced, as a calibration that was killed may have left files in a bucket.
            bounds = replace(thresholds, first_b_min=first_b_min or thresholds.first_b_min)
            run = EmbeddingRun(
                chosen, store, pool, bounds, file_format=file_format, memory_limit=memory_limit, force=True
            )
            for _ in learning(run, pool, store):
                pass
        encoded += run.report.texts_encoded
        if sizes.sum() <= wanted:  # those were all
            break
    return encoded


def _sampled_rows(sizes: np.ndarray, wanted: float) -> list[int]:
    """How many rows of each partition to take, so many in all: long ones count as much as in the catalog.

    The partitions are laid end to end, and blocks of equal length at equal distances are cut out of them.
    """
    distance, block = max(1.0, sizes.sum()) / _BLOCKS, wanted / _BLOCKS
    ends = np.cumsum(sizes)
    taken = np.where(block < distance, ends // distance * block + np.minimum(ends % distance, block), ends)
    return np.diff(np.floor(taken + 0.5), prepend=0).astype(int).tolist()  # np.round may give 2 rows of 1


def estimate_bytes(partitions: Sequence[Partition]) -> tuple[np.ndarray, float]:
    """Bytes of text in each partition, and of a row beside its text, from the first rows of some of them.

    What a source lists is an estimate, which is scaled: the size of a Parquet file counts its other columns too.
    """
    known = [place for place, partition in enumerate(partitions) if partition.rows]
    known.sort(key=lambda place: -(partitions[place].rows or 0))
    largest, others = known[:_LARGEST_PARTITIONS], known[_LARGEST_PARTITIONS:]
    read = dict[int, tuple[float, float, float, float]]()  # a partition's rows, text, what is beside it, and listed
    for place in largest + random.Random(0).sample(others, min(len(others), _OTHER_PARTITIONS)):
        partition = partitions[place]
        with contextlib.suppress(SurgeError, OSError):  # the run will say what is wrong with it
            batches = list(_first_rows(partition, _SAMPLED_ROWS))
            rows = sum(map(len, batches))
            if rows:
                each, text = (partition.rows or 0) / rows, sum(len(batch.text_values) for batch in batches)
                beside = sum(batch.value_bytes for batch in batches) - text
                read[place] = (each * rows, each * text, each * beside, partition.text_bytes or 0.0)
    seen = np.array(list(read.values()), float).reshape(-1, 4)
    # The largest may be unlike the others, of which some were drawn for those that were not read.
    is_drawn = np.array([place not in largest for place in read], bool)
    rows, text, _, listed = seen[is_drawn if is_drawn.any() else slice(None)].T
    is_listed = listed > 0
    scale = text[is_listed].sum() / listed.sum() if is_listed.any() else 1.0
    of_row = text.sum() / max(1.0, rows.sum())
    listed_bytes = [scale * (each.text_bytes or 0) or of_row * (each.rows or 0) for each in partitions]
    in_bytes = np.array(listed_bytes, float)
    in_bytes[list(read)] = seen[:, 1]
    return in_bytes, float(seen[:, 2].sum() / max(1.0, seen[:, 0].sum()))


def _first_rows(partition: Partition, rows: int) -> Iterator[RowBatch]:
    with contextlib.closing(iter(partition.read())) as batches:  # pyright: ignore[reportArgumentType]
        for batch in batches:
            yield batch.rows(0, min(rows, len(batch)))
            rows -= len(batch)
            if rows <= 0:
                return


@contextlib.contextmanager
def _temporary_store(output: str, options: StorageOptions) -> Iterator[Store]:
    """A store on the same disk or in the same bucket, which is empty again afterwards."""
    store = open_store(output, options)
    if store.is_remote:
        store = open_store(f"{store.url}/{_NAME}", options)
        try:
            yield store
        finally:
            for stored in list(store.list("", deep=True)):
                store.delete(stored.name)
        return
    above = next(folder for folder in (Path(store.url), *Path(store.url).parents) if folder.is_dir())
    with tempfile.TemporaryDirectory(prefix=_NAME, dir=above, ignore_cleanup_errors=True) as folder:
        yield open_store(folder)
