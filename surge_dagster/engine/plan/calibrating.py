"""What runs teach the planner: costs are read before a run, and its SuperBatches are added to them
after it.

`learning` wraps the events of a run where it is started, so that a run itself knows nothing of the
planner.
"""

from __future__ import annotations

import contextlib
import logging
import math
from array import array
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import astuple, dataclass, fields, replace
from statistics import mean, median
from urllib.parse import urlsplit

import numpy as np

from surge_dagster.engine.encoder.calibration import OBSERVATIONS
from surge_dagster.engine.encoder.costs import Call, fit_costs, known_calls
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.plan.cost_model import Flush
from surge_dagster.engine.plan.other_programs import CoreSeconds
from surge_dagster.engine.plan.planner import IoCosts, RunCosts, forecast
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.report import Event, RunReport, SuperBatchReport
from surge_dagster.engine.store.store import Store

log = logging.getLogger(__name__)

_MUCH, _USUAL_RUNS = 0.1, 3
# A call of more tokens per second than this many times the fastest one of the pool's start was not
# timed rightly.
_MOST_TIMES_CALIBRATED = 8.0


@dataclass(frozen=True, slots=True)
class Io:
    """A SuperBatch that was read and published.

    Attributes:
        reused: texts that kept their old vectors.
        file_bytes: of its vectors and texts.
        write_seconds: to serialize and upload, summed over threads.
        publish_seconds: from when the first thread began, by the clock.
    """

    files: float
    texts: float
    reused: float
    file_bytes: float
    read_seconds: float
    write_seconds: float
    publish_seconds: float


def learning(
    run: EmbeddingRun, pool: EncoderPool, store: Store, *, is_calibration: bool = False
) -> Generator[Event]:
    """Run, and yield its events; a run that ends by itself gets its prediction into its report, and
    is remembered.

    A calibration is remembered whatever else the machine does. Closing the generator stops the run,
    as closing its events does. `pool` and `store` are those of the run.
    """
    run_log: RunLog | None = None
    begun = CoreSeconds.now(pool.worker_pids)
    with contextlib.closing(run.events()) as events:
        for event in events:
            if isinstance(event, SuperBatchReport):
                run_log = run_log or RunLog(pool, store)
                run_log.add(event)
            yield event
    if run_log is not None and not run.stopped:
        share = CoreSeconds.now(pool.worker_pids).share_of_others(begun)
        run_log.end(run.report, 0.0 if is_calibration else share)


class RunLog:
    """The SuperBatches of one run, for its prediction and for later ones; 48 bytes of each, however
    many."""

    def __init__(self, pool: EncoderPool, store: Store) -> None:
        self._pool = pool
        self._store = store_kind(store)
        self._costs = known_costs(pool, store)
        self._held = array("d")  # of each SuperBatch its index and the values of a Flush
        self._newest = deque[SuperBatchReport](maxlen=OBSERVATIONS)
        self._first_begun: float | None = None

    def add(self, superbatch: SuperBatchReport) -> None:
        costs, span = superbatch.costs, superbatch.encode_span
        flush = superbatch.texts, superbatch.partitions, superbatch.text_bytes, costs.rows_reused
        self._held.extend((superbatch.index, *flush))
        self._newest.append(superbatch)
        if superbatch.index == 0 and span is not None:
            self._first_begun = max(0.0, span.begun - costs.read_seconds)

    def end(self, report: RunReport, share_of_others: float = 0.0) -> None:
        """Enter what was predicted for these SuperBatches into the report of the run, and keep what
        they took.

        Where other programs had much of the cores, it is kept only if they had it in each of the
        last runs too.
        """
        held = sorted(np.array(self._held).reshape(-1, 1 + len(fields(Flush))).tolist())
        calibration, newest = (
            self._pool.calibration,
            sorted(self._newest, key=lambda report: report.index),
        )
        calls, costs = calls_of(newest), self._costs
        if calls:  # as a plan counts the tokens of the catalog's own texts
            costs = replace(costs, encode=costs.encode.of_texts(calls))
        report.predicted_wall_seconds = forecast(
            [Flush(*row) for _, *row in held], costs
        ).wall_seconds
        shared = calibration.observations(name := f"others {self._pool.all_devices}")[-_USUAL_RUNS:]
        calibration.observe(name, [[share_of_others]])
        if share_of_others > _MUCH and (len(shared) < _USUAL_RUNS or min(shared) <= [_MUCH]):
            return
        calibration.observe(f"runs {self._pool.all_devices}", map(astuple, self._believed(calls)))
        calibration.write(**{f"b_min {self._pool.all_devices}": self._costs.encode.b_min})
        io = [io_of(report, self._costs.vector_bytes) for report in newest]
        calibration.observe(f"io {self._store}", map(astuple, io))
        if self._first_begun is not None:
            calibration.observe(f"starts {self._store}", [[self._first_begun]])
        costs = [report.costs for report in newest]
        waits = [each.encode_seconds - each.shared_seconds for each in costs if each.texts_computed]
        if waits and not any(each.replays for each in costs):
            calibration.observe(f"waits {self._pool.all_devices}", [[max(0.0, sum(waits))]])
        # without a cache on disk it would measure them again
        if calibration.read(f"calls {self._pool.all_devices}"):
            self._pool.read_costs()

    def _believed(self, calls: Sequence[Call]) -> list[Call]:
        """Return the calls whose times can be true, and log the others, which are not learned."""
        measured = known_calls(self._pool.calibration, f"calls {self._pool.all_devices}")
        fastest = max(
            (call.tokens / call.seconds for call in measured if call.seconds > 0), default=math.inf
        )
        limit = _MOST_TIMES_CALIBRATED * fastest

        believed = [call for call in calls if call.tokens < limit * call.seconds]
        if len(believed) < len(calls):
            log.warning(
                "the times of %d of %d SuperBatches are not learned: more than %.0f tokens/s, %.0f times what the pool "
                "reached at its start, cannot be true. If they are, measure again: surge-dagster plan --calibrate",
                *(len(calls) - len(believed), len(calls), limit, _MOST_TIMES_CALIBRATED),
            )
        return believed


def known_costs(pool: EncoderPool, store: Store) -> RunCosts:
    """What the pool's encode calls, reading, and publishing to this kind of store have taken so
    far."""
    calibration, kind = pool.calibration, store_kind(store)
    rows = calibration.observations(f"io {kind}")
    starts = calibration.observations(f"starts {kind}")
    waits = calibration.observations(f"waits {pool.all_devices}")
    vector_bytes = pool.dimension * np.dtype(pool.space.dtype).itemsize
    waiting_seconds = mean(seconds for [seconds] in waits) if waits else 0.0
    io = io_costs([Io(*row) for row in rows], [seconds for [seconds] in starts], vector_bytes)
    return RunCosts(pool.costs, io, vector_bytes, waiting_seconds)


def io_costs(
    seen: Sequence[Io], starts: Sequence[float] = (), vector_bytes: float = 0.0
) -> IoCosts:
    """Fit the costs of reading and publishing to what was observed; `vector_bytes` are those of a
    row."""
    columns = (
        np.array([astuple(superbatch) for superbatch in seen], float).reshape(-1, len(fields(Io))).T
    )
    files, texts, reused, file_bytes, read, write, publish = columns
    written = np.column_stack([files, file_bytes])
    return IoCosts(
        fit_costs(np.column_stack([files, texts, reused, file_bytes - texts * vector_bytes]), read),
        fit_costs(written, write),
        fit_costs(np.column_stack([np.ones(len(seen)), written]), publish),
        median(starts) if starts else 0.0,
    )


def store_kind(store: Store) -> str:
    """What stores of equal costs have in common: a bucket, or the local disk."""
    if not store.is_remote:
        return "local"
    url = urlsplit(store.url)
    return f"{url.scheme}://{url.netloc}"


def calls_of(seen: Sequence[SuperBatchReport]) -> list[Call]:
    """The encode calls of a run whose times say what a call costs."""
    return [
        Call(
            costs.texts_computed,
            report.text_bytes * (costs.texts_computed + costs.texts_deduplicated) / report.texts,
            costs.tokens,
            costs.shared_seconds,
            costs.texts_deduplicated,
        )
        for report in seen
        if report.texts  # none where every partition is read again
        and (costs := report.costs).texts_computed
        and report.encode_span is not None
        and not costs.replays
    ]


def io_of(report: SuperBatchReport, vector_bytes: int) -> Io:
    """What reading and publishing a SuperBatch took, without the time in which it waited for the
    one before."""
    waited, costs = 0.0, report.costs
    if report.serialize_span is not None and report.encode_span is not None:
        waited = max(0.0, report.serialize_span.begun - report.encode_span.ended)
    return Io(
        report.partitions,
        report.texts,
        costs.rows_reused,
        report.text_bytes + report.texts * vector_bytes,
        costs.read_seconds,
        costs.serialize_seconds + costs.upload_seconds,
        max(0.0, costs.publish_seconds - waited),
    )
