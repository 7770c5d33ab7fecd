"""What a run over a source will take, from the partitions to embed and what was measured before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.files.formats import PublishedFile, open_published
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.output.spaces import space_of_spec
from surge_dagster.engine.plan import planner
from surge_dagster.engine.plan.calibrating import known_costs
from surge_dagster.engine.plan.catalog_sample import (
    CountTokens,
    IsReused,
    sample_catalog,
    token_counter,
    tokens_by_bytes,
)
from surge_dagster.engine.plan.planner import Goals, Plan, RunCosts
from surge_dagster.engine.run.deciding import decide
from surge_dagster.engine.run.embedding_run import publishing_threads
from surge_dagster.engine.run.memory import MemoryPlan, fit_memory
from surge_dagster.engine.run.old_rows import UNUSABLE, read_hashes
from surge_dagster.engine.run.old_values import NO_ROW
from surge_dagster.engine.run.report import Failure
from surge_dagster.engine.run.superbatch import PartitionToRead
from surge_dagster.engine.run.thresholds import Bounds, Thresholds
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.process_memory import memory_bytes
from surge_dagster.engine.support.text_hash import text_hashes
from surge_dagster.engine.support.waiting import StopSignal


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
            old, _ = read_hashes(reader)
    except UNUSABLE:
        return np.zeros(len(texts), np.bool_)
    return old.rows(text_hashes(texts)) != NO_ROW
