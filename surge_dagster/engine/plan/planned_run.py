"""What a run over a source will take, from the partitions to embed and what was measured before.

Costs are read before a run, and its SuperBatches are added after it: `learning` wraps the events of
a run where it is started, so that a run needs no planner. `calibrate` is a short run over some
rows, whose files are deleted: every stage works as in a real run, on the source's own texts and on
the output's own store.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

from surge_dagster.engine.encoder.calibration import OBSERVATIONS
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.speed import Call
from surge_dagster.engine.files.formats import PublishedFile, open_published
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.output.spaces import space_of_spec
from surge_dagster.engine.plan import planner
from surge_dagster.engine.plan.catalog_sample import (
    CountTokens,
    IsReused,
    first_rows,
    sample_catalog,
    token_counter,
    tokens_by_bytes,
)
from surge_dagster.engine.plan.cost_model import Flush, Io, io_costs, io_of, store_kind
from surge_dagster.engine.plan.planner import Goals, Plan, RunCosts, forecast
from surge_dagster.engine.run.deciding import decide
from surge_dagster.engine.run.embedding_run import EmbeddingRun, publishing_threads
from surge_dagster.engine.run.memory import MemoryPlan, fit_memory
from surge_dagster.engine.run.old_rows import UNUSABLE, read_hashes
from surge_dagster.engine.run.old_values import NO_ROW
from surge_dagster.engine.run.report import Event, Failure, RunReport, SuperBatchReport
from surge_dagster.engine.run.superbatch import PartitionToRead
from surge_dagster.engine.run.thresholds import Bounds, Thresholds
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store import StorageOptions, open_store
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.process_memory import memory_bytes
from surge_dagster.engine.support.text_hash import text_hashes
from surge_dagster.engine.support.waiting import StopSignal

_SECONDS = 20.0
_PARTITIONS = 32  # give rows, if they have enough of them
_UNCOUNTED_ROWS = 256  # taken of a partition whose rows are not counted
_NAME = ".surge-calibration"


def plan(
    source: Iterable[Partition],
    store: Store,
    pool: EncoderPool,
    thresholds: Thresholds | None = None,
    *,
    memory_limit_bytes: int | None = None,
    goals: Goals | None = None,
) -> Plan:
    """Predict an `EmbeddingRun` over a source; nothing is written.

    The first rows of some partitions are read: their tokens are counted, and where a partition was
    embedded before they are compared with its file. Partitions that a run refuses are left out, as
    far as those rows show it.

    Args:
        pool: a started pool, whose costs earlier runs have taught it.
    """
    costs = known_costs(pool, store)
    bounds, memory = _memory_of(thresholds, store, pool, costs, memory_limit_bytes)
    space = space_of_spec(store, pool.space.spec_sha256) or pool.space
    decisions = list(decide(source, OutputState(store, space.name), StopSignal()))
    work = [decision for decision in decisions if isinstance(decision, PartitionToRead)]
    failures = [decision for decision in decisions if isinstance(decision, Failure)]
    count_tokens, tokens_counted = token_counter(pool.space, costs.speed)
    planned = plan_partitions(
        [each.source for each in work],
        costs,
        bounds,
        count_tokens,
        [_reuse_of(each, store, space, pool.precision) for each in work],
        memory=memory,
        goals=goals,
    )
    return replace(
        planned,
        partitions_fresh=len(decisions) - len(work) - len(failures),
        partitions_refused=(*failures, *planned.partitions_refused),
        tokens_counted=tokens_counted,
    )


def plan_partitions(
    partitions: Sequence[Partition],
    costs: RunCosts,
    bounds: Bounds,
    count_tokens: CountTokens | None = None,
    reuse: Sequence[IsReused | None] | None = None,
    *,
    memory: MemoryPlan | None = None,
    goals: Goals | None = None,
) -> Plan:
    """Predict a run that embeds these partitions, as far as their rows are counted.

    Args:
        count_tokens, reuse: see `sample_catalog`; without the first, texts have as many tokens per
            byte as those of earlier runs.
    """
    count_tokens = count_tokens or tokens_by_bytes(costs.speed)
    sample = sample_catalog(partitions, count_tokens, reuse)
    uncounted = [
        place for place, partition in enumerate(partitions) if partition.source_rows is None
    ]
    left_out = {*uncounted, *sample.refused}
    counted = [place for place in range(len(partitions)) if place not in left_out]
    if sample.texts.texts:
        costs = replace(costs, speed=costs.speed.of_texts([sample.texts]))
    planned = planner.plan(
        sample.rows[counted],
        sample.text_bytes[counted],
        costs,
        bounds,
        rows_reused=sample.rows_reused[counted],
        memory=memory,
        goals=goals,
    )
    return replace(
        planned,
        partitions_uncounted=len(uncounted),
        partitions_refused=tuple(sample.refused.values()),
        partitions_sampled=sample.partitions_read,
        texts_sampled=sample.texts_tokenized,
    )


def _memory_of(
    thresholds: Thresholds | None,
    store: Store,
    pool: EncoderPool,
    costs: RunCosts,
    memory_limit_bytes: int | None,
) -> tuple[Bounds, MemoryPlan]:
    """Return the thresholds and the memory that a run here will have."""
    return fit_memory(
        thresholds or Thresholds(),
        costs.speed.b_min,
        pool.space,
        publishing_threads(store, costs.speed.workers),
        memory_limit_bytes,
        machine_bytes=memory_bytes(),
        upload_bytes=store.upload_bytes,
    )


def _reuse_of(work: PartitionToRead, store: Store, space: Space, precision: str) -> IsReused | None:
    """Return what finds texts in the old file of a partition; None without one."""
    file = work.old_file
    if file is None or file.facts.precision != precision:
        return None
    return partial(_are_reused, store, space, file)


def _are_reused(store: Store, space: Space, file: PublishedFile, texts: pa.Array) -> np.ndarray:
    """Return which of these texts a run will find in an old file."""
    try:
        with open_published(store, space, file.stored.name, file) as reader:
            old = read_hashes(reader)
    except UNUSABLE:
        return np.zeros(len(texts), np.bool_)
    return old.rows(text_hashes(texts)) != NO_ROW


def learning(run: EmbeddingRun, pool: EncoderPool, store: Store) -> Generator[Event]:
    """Run, and yield its events; a run that ends by itself is remembered.

    Its report gets the prediction of the costs that were known before it. Closing the generator
    stops the run. `pool` and `store` are those of the run.
    """
    run_log: RunLog | None = None
    with contextlib.closing(run.events()) as events:
        for event in events:
            if isinstance(event, SuperBatchReport):
                run_log = run_log or RunLog(pool, store)
                run_log.add(event)
            yield event
    if run_log is not None and not run.stopped:
        run_log.end(run.report)


class RunLog:
    """The SuperBatches of one run, for its prediction and for later ones."""

    def __init__(self, pool: EncoderPool, store: Store) -> None:
        self._pool = pool
        self._store = store_kind(store)
        self._costs = known_costs(pool, store)
        self._flushes: dict[int, Flush] = {}  # by the index of the SuperBatch
        self._newest = deque[SuperBatchReport](maxlen=OBSERVATIONS)

    def add(self, superbatch: SuperBatchReport) -> None:
        self._flushes[superbatch.index] = Flush(
            superbatch.texts,
            superbatch.partitions,
            superbatch.text_bytes,
            superbatch.costs.rows_reused,
        )
        self._newest.append(superbatch)

    def end(self, report: RunReport) -> None:
        """Enter the prediction of these SuperBatches into the report, and keep what they took."""
        newest = sorted(self._newest, key=lambda superbatch: superbatch.index)
        calls = calls_of(newest, self._pool.core_share)
        costs = self._costs
        if calls:  # as a plan counts the tokens of the catalog's own texts
            costs = replace(costs, speed=costs.speed.of_texts(calls))
        flushes = [self._flushes[index] for index in sorted(self._flushes)]
        report.predicted_wall_seconds = forecast(flushes, costs).wall_seconds

        self._pool.learn(calls)
        io = [io_of(superbatch, costs.vector_bytes) for superbatch in newest]
        self._pool.calibration.observe(f"io {self._store}", map(astuple, io))


def known_costs(pool: EncoderPool, store: Store) -> RunCosts:
    """Return what encoding, reading, and publishing to this kind of store have taken so far."""
    kind = store_kind(store)
    seen = [Io(*row) for row in pool.calibration.observations(f"io {kind}")]
    vector_bytes = pool.dimension * np.dtype(pool.space.dtype).itemsize
    return RunCosts(pool.speed, io_costs(seen, vector_bytes), vector_bytes, pool.core_share)


def calls_of(seen: Sequence[SuperBatchReport], core_share: float = 0.0) -> list[Call]:
    """Return the encode calls of a run whose times say what a call costs.

    Args:
        core_share: see `Costs.undisturbed_seconds`.
    """
    calls = list[Call]()
    for report in seen:
        costs = report.costs
        is_measured = report.encode_span is not None and not costs.replays
        if not costs.texts_computed or not is_measured:
            continue
        texts = costs.texts_computed + costs.texts_deduplicated
        calls.append(
            Call(
                texts=costs.texts_computed,
                text_bytes=report.text_bytes * texts / report.texts,
                tokens=costs.tokens,
                seconds=costs.undisturbed_seconds(core_share),
                equal_texts=costs.texts_deduplicated,
            )
        )
    return calls


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
            chosen.append(replace(partition, read=read, rows=None, source_rows=None))
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
