"""The calibration of `plan --calibrate`: a short run over the first rows of some partitions, whose files are deleted.

Every stage works as in a real run, on the source's own texts and on the output's own store, so what it teaches the
planner is what a run would.
"""

from __future__ import annotations

import contextlib
import math
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import SurgeError
from surge_dagster.engine.model.spec import FileFormat
from surge_dagster.engine.run import EmbeddingRun
from surge_dagster.engine.sources.partition import Partition, RowBatch
from surge_dagster.engine.store import StorageOptions, open_store
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.thresholds import Thresholds

_SECONDS = 10.0
_MOST_TEXTS = 1_000_000
_SUPERBATCHES, _FIRST = 16, 16  # of such a run; the first one is so much smaller
_SAMPLED_PARTITIONS, _SAMPLED_ROWS = 16, 256  # so many large ones, and as many others
_NAME = ".surge-calibration"


def calibrate(
    partitions: Sequence[Partition],
    output: str,
    options: StorageOptions,
    pool: EncoderPool,
    file_format: FileFormat = "parquet",
    seconds: float = _SECONDS,
) -> int:
    """Measure what a run over these partitions costs, in place of what earlier runs have shown.

    Args:
        output: where the run would write.
        seconds: of encoding, about.

    Returns:
        The texts that were encoded for it.
    """
    speed = pool.read_costs(anew=True)
    wanted = min(_MOST_TEXTS, max(_SUPERBATCHES, math.ceil(seconds * speed.workers / speed.text_seconds())))
    thresholds = Thresholds(
        b_min=math.ceil(wanted / _SUPERBATCHES), first_b_min=wanted // (_SUPERBATCHES * _FIRST) or 1
    )
    chosen, texts = list[Partition](), 0
    for partition in random.Random(0).sample(partitions, len(partitions)):
        rows = min(partition.rows or _SAMPLED_ROWS, 2 * wanted // _SUPERBATCHES)
        chosen.append(replace(partition, read=partial(_first_rows, partition, rows), rows=rows))
        texts += rows
        if texts >= wanted:
            break
    with _temporary_store(output, options) as store:
        run = EmbeddingRun(chosen, store, pool, thresholds, file_format=file_format)
        for _ in run.events():
            pass
    pool.read_costs()
    return run.report.texts_encoded


def text_bytes_per_listed(partitions: Sequence[Partition]) -> float:
    """Bytes of text for each byte that the source lists, from the first rows of some partitions; 1 where it lists none.

    What a source lists is an estimate: the size of a Parquet file counts its other columns too.
    """
    known = sorted((one for one in partitions if one.rows and one.text_bytes), key=lambda one: -(one.rows or 0))
    largest, others = known[:_SAMPLED_PARTITIONS], known[_SAMPLED_PARTITIONS:]
    found = listed = 0.0
    for partition in largest + random.Random(0).sample(others, min(len(others), _SAMPLED_PARTITIONS)):
        with contextlib.suppress(SurgeError, OSError):  # the run will say what is wrong with it
            read = [(len(batch), len(batch.text_values)) for batch in _first_rows(partition, _SAMPLED_ROWS)]
            rows = sum(count for count, _ in read)
            if rows:
                found += (partition.rows or 0) * sum(size for _, size in read) / rows
                listed += partition.text_bytes or 0
    return found / listed if listed else 1.0


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
    folder = tempfile.mkdtemp(prefix=_NAME, dir=above)
    try:
        yield open_store(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
