"""The calibration of `plan --calibrate`: a short run over the first rows of some partitions, whose files are deleted.

Every stage works as in a real run, on the source's own texts and on the output's own store, so what it teaches the
planner is what a run would.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import SurgeError
from surge_dagster.engine.model.spec import FileFormat
from surge_dagster.engine.run import EmbeddingRun
from surge_dagster.engine.sources.partition import Partition, RowBatch
from surge_dagster.engine.store import StorageOptions, open_store
from surge_dagster.engine.store.store import Store

_SECONDS, _LEAST_PARTITIONS = 20.0, 8
_UNCOUNTED_ROWS = 256  # taken of a partition whose rows are not counted
_SAMPLED_PARTITIONS, _SAMPLED_ROWS = 16, 4096  # so many large ones, and as many others
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
    costs, listed = pool.read_costs(anew=True), sum(partition.rows or 0 for partition in partitions)
    text_bytes, _ = estimate_bytes(partitions)
    tokens = float(text_bytes.sum()) * costs.tokens_per_byte / listed if listed else None
    wanted = seconds * costs.workers / costs.text_seconds(tokens)
    chosen, texts = list[Partition](), 0
    for partition in random.Random(0).sample(partitions, len(partitions)):
        if texts >= wanted:
            break
        rows = min(partition.rows or _UNCOUNTED_ROWS, max(1, round(wanted / _LEAST_PARTITIONS)))
        chosen.append(replace(partition, read=partial(_first_rows, partition, rows), rows=None))
        texts += rows
    with _temporary_store(output, options) as store:
        # Forced, as a calibration that was killed may have left files in a bucket.
        run = EmbeddingRun(chosen, store, pool, file_format=file_format, force=True)
        for _ in run.events():
            pass
    return run.report.texts_encoded


def estimate_bytes(partitions: Sequence[Partition]) -> tuple[np.ndarray, float]:
    """Bytes of text in each partition, and of a row beside its text, from the first rows of some of them.

    What a source lists is an estimate, which is scaled: the size of a Parquet file counts its other columns too.
    """
    known = [place for place, one in enumerate(partitions) if one.rows]
    known.sort(key=lambda place: -(partitions[place].rows or 0))
    largest, others = known[:_SAMPLED_PARTITIONS], known[_SAMPLED_PARTITIONS:]
    read = dict[int, tuple[float, float, float, float]]()  # a partition's rows, text, what is beside it, and listed
    for place in largest + random.Random(0).sample(others, min(len(others), _SAMPLED_PARTITIONS)):
        partition = partitions[place]
        with contextlib.suppress(SurgeError, OSError):  # the run will say what is wrong with it
            batches = list(_first_rows(partition, _SAMPLED_ROWS))
            rows = sum(map(len, batches))
            if rows:
                each, text = (partition.rows or 0) / rows, sum(len(batch.text_values) for batch in batches)
                beside = sum(batch.value_bytes for batch in batches) - text
                read[place] = (each * rows, each * text, each * beside, partition.text_bytes or 0.0)
    rows, text, beside, listed = np.array(list(read.values()), float).reshape(-1, 4).T
    is_listed = listed > 0
    scale = text[is_listed].sum() / listed.sum() if is_listed.any() else 1.0
    of_row = text.sum() / max(1.0, rows.sum())
    in_bytes = np.array([scale * (one.text_bytes or 0) or of_row * (one.rows or 0) for one in partitions], float)
    in_bytes[list(read)] = text
    return in_bytes, float(beside.sum() / max(1.0, rows.sum()))


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
