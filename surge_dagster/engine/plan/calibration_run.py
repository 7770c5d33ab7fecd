"""The calibration of `plan --calibrate`: a short run over some rows, whose files are deleted.

Every stage works as in a real run, on the source's own texts and on the output's own store, so what
it teaches the planner is what a run would.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.plan.calibrating import learning
from surge_dagster.engine.plan.catalog_sample import first_rows, sample_catalog, token_counter
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store import StorageOptions, open_store
from surge_dagster.engine.store.store import Store

_SECONDS = 20.0
_PARTITIONS = 32  # give rows, if they have enough of them
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
    speed = pool.measure_speed(anew=True)
    count_tokens, _ = token_counter(pool.space, speed)
    sampled = sample_catalog(partitions, count_tokens).texts
    tokens = sampled.tokens / sampled.texts if sampled.texts else speed.tokens_per_text
    wanted = round(seconds * speed.workers / speed.worker_seconds(tokens))
    with _temporary_store(output, options) as store:
        run = EmbeddingRun(
            _some_rows(partitions, max(1, wanted)),
            store,
            pool,
            thresholds or Thresholds(),
            memory_limit_bytes=memory_limit_bytes,
            force=True,  # a calibration that was killed may have left files in a bucket
        )
        for _ in learning(run, pool, store):
            pass
    return run.report.texts_encoded


def _some_rows(partitions: Sequence[Partition], wanted: int) -> list[Partition]:
    """Return partitions with first rows of some of these, about so many in all."""
    with_rows = [partition for partition in partitions if partition.rows != 0]
    random.Random(0).shuffle(with_rows)
    most = -(-wanted // min(_PARTITIONS, max(1, len(with_rows))))
    chosen = list[Partition]()
    for partition in with_rows:
        rows = min(most, wanted, partition.rows or _UNCOUNTED_ROWS)
        if rows:
            read = partial(first_rows, partition, rows)
            chosen.append(replace(partition, read=read, rows=None))
        wanted -= rows
    return chosen


@contextlib.contextmanager
def _temporary_store(output: str, options: StorageOptions) -> Iterator[Store]:
    """Yield a store on the same disk or in the same bucket, which is empty again afterwards."""
    store = open_store(output, options)
    if store.is_remote:
        store = open_store(f"{store.url}/{_NAME}", options)
        try:
            yield store
        finally:
            for stored in list(store.list("", deep=True)):
                store.delete(stored.name)
        return
    folders = [Path(store.url), *Path(store.url).parents]
    above = next(folder for folder in folders if folder.is_dir())
    with tempfile.TemporaryDirectory(prefix=_NAME, dir=above, ignore_cleanup_errors=True) as folder:
        yield open_store(folder)
