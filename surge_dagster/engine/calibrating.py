"""What runs teach the planner: costs are read before a run, and its SuperBatches are added to them after it."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from statistics import median
from urllib.parse import urlsplit

import numpy as np

from surge_dagster.engine.cost_model import Flush
from surge_dagster.engine.encoder.calibration import OBSERVATIONS
from surge_dagster.engine.encoder.costs import Call, fit_costs
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.memory import SLOTS
from surge_dagster.engine.planner import PublishCosts, RunCosts, forecast
from surge_dagster.engine.report import RunReport, SuperBatchReport
from surge_dagster.engine.store.store import Store


@dataclass(frozen=True, slots=True)
class Publishing:
    """A SuperBatch that was published.

    Attributes:
        file_bytes: of its vectors, ids and texts.
        serialize_seconds, upload_seconds: summed over threads.
        publish_seconds: from when the first thread began, by the clock.
    """

    files: float
    file_bytes: float
    serialize_seconds: float
    upload_seconds: float
    publish_seconds: float


class RunLog:
    """The SuperBatches of one run, for its prediction and for later ones; some 40 bytes of each, however many.

    Args:
        pool: that the run uses; its costs are those before the run.
        store: that the run writes to.
    """

    def __init__(self, pool: EncoderPool, store: Store) -> None:
        self._pool = pool
        self._store = store_kind(store)
        self._costs = known_costs(pool, store)
        self._held = array("d")  # of each SuperBatch its index and the values of a Flush
        self._newest = deque[SuperBatchReport](maxlen=OBSERVATIONS)
        self._first_begun: float | None = None

    def add(self, superbatch: SuperBatchReport) -> None:
        """Add a SuperBatch that was published."""
        one, span = superbatch, superbatch.encode_span
        self._held.extend((one.index, one.texts, one.partitions, one.text_bytes, one.rows_reused))
        self._newest.append(one)
        if one.index == 0 and span is not None:
            self._first_begun = max(0.0, span.begun)

    def end(self, report: RunReport) -> None:
        """Enter what was predicted for these SuperBatches into the report of the run, and keep what they took."""
        if not self._held:
            return
        held = sorted(np.array(self._held).reshape(-1, 1 + len(fields(Flush))).tolist())
        report.predicted_wall_seconds = forecast([Flush(*row) for _, *row in held], self._costs).wall_seconds
        calibration, newest = self._pool.calibration, sorted(self._newest, key=lambda one: one.index)
        calibration.observe(f"runs {self._pool.all_devices}", map(astuple, calls_of(newest)))
        published = [publishing_of(one, self._costs.vector_bytes) for one in newest]
        calibration.observe(f"publishing {self._store}", map(astuple, published))
        if self._first_begun is not None:
            calibration.observe(f"starts {self._store}", [[self._first_begun]])


def known_costs(pool: EncoderPool, store: Store) -> RunCosts:
    """What the pool's encode calls and publishing to this kind of store have taken so far."""
    calibration, kind = pool.calibration, store_kind(store)
    rows = calibration.observations(f"publishing {kind}", len(fields(Publishing)))
    starts = calibration.observations(f"starts {kind}", 1)
    vector_bytes = pool.dimension * np.dtype(pool.space.dtype).itemsize
    return RunCosts(
        pool.costs, publish_costs([Publishing(*row) for row in rows], [one for [one] in starts]), vector_bytes
    )


def publish_costs(published: Sequence[Publishing], starts: Sequence[float] = ()) -> PublishCosts:
    """Fit the costs of publishing to what was observed."""
    seen = np.array([astuple(one) for one in published], float).reshape(-1, len(fields(Publishing)))
    amounts = np.column_stack([np.ones(len(seen)), seen[:, :2]])
    serialize, upload, publish = seen[:, 2:].T
    return PublishCosts(
        fit_costs(amounts[:, 1:], serialize),
        fit_costs(amounts[:, 1:], upload),
        fit_costs(amounts, publish),
        median(starts) if starts else 0.0,
    )


def store_kind(store: Store) -> str:
    """What stores of equal costs have in common: a bucket, or the local disk."""
    if not store.is_remote:
        return "local"
    url = urlsplit(store.url)
    return f"{url.scheme}://{url.netloc}"


def calls_of(seen: Sequence[SuperBatchReport]) -> list[Call]:
    """The encode calls of a run whose times say what a call costs, with the waits for the reader before them."""
    calls: list[Call] = []
    for index, one in enumerate(seen):
        span, texts = one.encode_span, one.texts_encoded - one.texts_deduplicated
        if span is None or texts <= 0 or one.replays:
            continue
        idle_since = [span.begun]
        if index and (before := seen[index - 1].encode_span):
            idle_since = [before.ended]
            if index >= SLOTS and (upload := seen[index - SLOTS].upload_span):
                idle_since.append(upload.ended)  # until then the reader had no slot to fill
        waited = max(0.0, span.begun - max(idle_since))
        text_bytes = one.text_bytes * texts / one.texts
        calls.append(Call(texts, text_bytes, one.tokens, one.encode_seconds, one.texts_deduplicated, waited))
    return calls


def publishing_of(one: SuperBatchReport, vector_bytes: int) -> Publishing:
    """What publishing a SuperBatch took, without the time in which it waited for the one before."""
    waited = 0.0
    if one.serialize_span is not None and one.encode_span is not None:
        waited = max(0.0, one.serialize_span.begun - one.encode_span.ended)
    return Publishing(
        one.partitions,
        one.text_bytes + one.texts * vector_bytes,
        one.serialize_seconds,
        one.upload_seconds,
        max(0.0, one.publish_seconds - waited),
    )
