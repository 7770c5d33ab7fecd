"""What runs teach the planner: costs are read before a run, and its SuperBatches added after it.

`learning` wraps the events of a run where it is started, so that a run needs no planner.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import astuple, replace

import numpy as np

from surge_dagster.engine.encoder.calibration import OBSERVATIONS
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.speed import Call
from surge_dagster.engine.plan.cost_model import Flush
from surge_dagster.engine.plan.io_costs import Io, io_costs, io_of, store_kind
from surge_dagster.engine.plan.planner import RunCosts, forecast
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.report import Event, RunReport, SuperBatchReport
from surge_dagster.engine.store.store import Store


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
        calls = calls_of(newest)
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
    return RunCosts(pool.speed, io_costs(seen, vector_bytes), vector_bytes)


def calls_of(seen: Sequence[SuperBatchReport]) -> list[Call]:
    """Return the encode calls of a run whose times say what a call costs."""
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
                seconds=costs.encode_seconds,
                equal_texts=costs.texts_deduplicated,
            )
        )
    return calls
