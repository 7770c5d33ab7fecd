"""The calibration of `plan --calibrate`: two short runs over first rows of some partitions, whose
files are deleted.

Every stage works as in a real run, on the source's own texts and on the output's own store, so what
they teach the planner is what a run would. The first begins with small SuperBatches; the second,
which knows their costs, has those of the middle of a long run. A slow model encodes large
SuperBatches a quarter faster per text than small ones.
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
from surge_dagster.engine.plan.calibrating import learning
from surge_dagster.engine.plan.catalog_sample import first_rows, sample_catalog, token_counter
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store import StorageOptions, open_store
from surge_dagster.engine.store.store import Store

_SECONDS, _BLOCKS = 20.0, 32
# of the seconds, for each run, and B_min of its first SuperBatch
_SHARES = {0.25: None, 0.75: sys.maxsize}
_UNCOUNTED_ROWS = 256  # taken of a partition whose rows are not counted
_NAME = ".surge-calibration"


def calibrate(
    partitions: Sequence[Partition],
    output: str,
    options: StorageOptions,
    pool: EncoderPool,
    thresholds: Thresholds | None = None,
    *,
    memory_limit_bytes: int | None = None,
    seconds: float = _SECONDS,
) -> int:
    """Measure what a run over these partitions costs, in place of what earlier runs have shown.

    Takes about so many seconds of encoding, and returns how many texts were encoded.
    """
    pool.read_costs(anew=True)
    thresholds = thresholds or Thresholds()
    encoded, shuffled = 0, random.Random(0).sample(partitions, len(partitions))
    sizes = np.array(
        [_UNCOUNTED_ROWS if each.rows is None else each.rows for each in shuffled], float
    )
    count_tokens, _ = token_counter(pool.space, pool.costs)
    sampled = sample_catalog(partitions, count_tokens).texts
    for share, first_b_min in _SHARES.items():
        tokens = sampled.tokens / max(1.0, sampled.texts)
        # At least one row, which shows how much of long texts the model reads.
        wanted = max(
            1.0, share * seconds * pool.costs.workers / pool.costs.text_seconds(tokens or None)
        )
        chosen = [
            replace(partition, read=partial(first_rows, partition, rows), rows=None)
            for partition, rows in zip(shuffled, _sampled_rows(sizes, wanted), strict=True)
            if rows
        ]
        with _temporary_store(output, options) as store:
            # Forced, as a calibration that was killed may have left files in a bucket.
            bounds = replace(thresholds, first_b_min=first_b_min or thresholds.first_b_min)
            run = EmbeddingRun(
                chosen, store, pool, bounds, memory_limit_bytes=memory_limit_bytes, force=True
            )
            for _ in learning(run, pool, store, is_calibration=True):
                pass
        encoded += run.report.texts_encoded
        if sizes.sum() <= wanted:  # those were all
            break
    return encoded


def _sampled_rows(sizes: np.ndarray, wanted: float) -> list[int]:
    """How many rows of each partition to take, so many in all: long ones count as much as in the
    catalog.

    The partitions are laid end to end, and blocks of equal length at equal distances are cut out of
    them.
    """
    distance, block = max(1.0, sizes.sum()) / _BLOCKS, wanted / _BLOCKS
    ends = np.cumsum(sizes)
    taken = np.where(
        block < distance, ends // distance * block + np.minimum(ends % distance, block), ends
    )
    # np.round may give 2 rows of 1
    return np.diff(np.floor(taken + 0.5), prepend=0).astype(int).tolist()


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
    above = next(
        folder for folder in (Path(store.url), *Path(store.url).parents) if folder.is_dir()
    )
    with tempfile.TemporaryDirectory(prefix=_NAME, dir=above, ignore_cleanup_errors=True) as folder:
        yield open_store(folder)
