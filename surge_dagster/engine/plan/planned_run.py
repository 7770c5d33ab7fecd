"""What a run over a source will take, from its partitions that are not fresh and what was measured before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import FileFormat
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.output.spaces import list_spaces
from surge_dagster.engine.plan import planner
from surge_dagster.engine.plan.calibrating import known_costs
from surge_dagster.engine.plan.calibration_run import estimate_bytes
from surge_dagster.engine.plan.planner import Plan, RunCosts
from surge_dagster.engine.run.embedding_run import publishing_threads
from surge_dagster.engine.run.memory import fit_memory
from surge_dagster.engine.run.thresholds import Bounds, Thresholds
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.process_memory import memory_bytes


def plan(
    source: Iterable[Partition],
    store: Store,
    pool: EncoderPool,
    thresholds: Thresholds | None = None,
    *,
    file_format: FileFormat = "parquet",
    memory_limit: int | None = None,
    price_per_hour: float | None = None,
    deadline_seconds: float | None = None,
    bandwidth: float | None = None,
) -> Plan:
    """Predict an `EmbeddingRun` over a source; nothing is written.

    Where a partition was embedded before and has changed, all of its rows count as new.

    Args:
        pool: a started pool, whose costs earlier runs have taught it.
        price_per_hour: of this machine.
        deadline_seconds: size a fleet that ends in time.
        bandwidth: bytes per second that a machine can send to the store; None is what was measured.
    """
    costs = known_costs(pool, store)
    bounds, memory = fit_memory(
        thresholds or Thresholds(),
        costs.encode.efficient_texts,
        pool.space,
        publishing_threads(store, costs.encode.workers),
        memory_limit,
        machine_bytes=memory_bytes(),
        upload_bytes=store.upload_bytes,
    )
    listed = list(source)
    partitions = _with_work(listed, store, pool, file_format)
    planned = plan_partitions(
        partitions,
        costs,
        bounds,
        memory=memory,
        price_per_hour=price_per_hour,
        deadline_seconds=deadline_seconds,
        bandwidth=bandwidth,
    )
    return replace(planned, partitions_fresh=len(listed) - len(partitions))


def plan_partitions(partitions: Sequence[Partition], costs: RunCosts, bounds: Bounds, **options: Any) -> Plan:
    """Predict a run that embeds these partitions, as far as their rows are counted, with options of `planner.plan`."""
    counted = [partition for partition in partitions if partition.rows is not None]
    sizes, (text_bytes, beside_bytes) = [partition.rows or 0 for partition in counted], estimate_bytes(counted)
    planned = planner.plan(sizes, text_bytes, costs, bounds, beside_bytes=beside_bytes, **options)
    return replace(planned, partitions_uncounted=len(partitions) - len(counted))


def _with_work(
    partitions: Sequence[Partition], store: Store, pool: EncoderPool, file_format: FileFormat
) -> list[Partition]:
    """The partitions that a run would not pass over."""
    own = next((space for space in list_spaces(store) if space.spec_sha256 == pool.space.spec_sha256), pool.space)
    outputs = OutputState(store, own.name, file_format)
    looked_at = outputs.looked_at(partitions)
    return [partition for partition in looked_at if outputs.freshness(partition).status != "fresh"]
