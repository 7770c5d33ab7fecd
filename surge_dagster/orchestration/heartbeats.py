"""Heartbeats: a tag that a run renews while it works, so that a run of a dead process or machine is
found.

No run launcher is needed for that: the default one cannot say whether a run's process lives, and
others may call a run alive whose host has no power. A heartbeat is a counter and no time, so that
the clocks of two machines are never compared. The clock of the sensor `lost_runs` counts how long
it stands still.
"""

from __future__ import annotations

import itertools
import json
import logging
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import dagster as dg

from surge_dagster.engine.support.waiting import every

# "<run id> <host> <counter>": Dagster copies the tags of a run to the run that retries it. Its UI
# leaves out tags with this prefix.
HEARTBEAT_TAG = ".dagster/surge_heartbeat"
_ENDED = "ended"  # the run may go on with steps that are not of this project
_EXECUTING = (dg.DagsterRunStatus.STARTED, dg.DagsterRunStatus.CANCELING)


@dataclass(frozen=True, slots=True)
class HeartbeatTimes:
    """When a heartbeat is renewed, and when a run without a new one is lost.

    Attributes:
        beat_seconds: between two heartbeats.
        lost_seconds: without a new heartbeat, by the sensor's clock.
        longest_gap_seconds: what the time between two ticks counts at most. If no tick came for
            longer, machines slept, the clock was set, or the database was away, and runs could not
            renew their heartbeats either.
    """

    beat_seconds: float = 15.0
    lost_seconds: float = 60.0
    longest_gap_seconds: float = 30.0


TIMES = HeartbeatTimes()


@contextmanager
def executing(context: dg.OpExecutionContext, times: HeartbeatTimes = TIMES) -> Iterator[None]:
    """Renew the heartbeat of a run, and log the engine's warnings, while the block works.

    A database that is away does not stop the run: the next heartbeat is written when the database
    answers again. The last heartbeat of a run without other steps stays, because its machine may
    die before Dagster records its end.
    """
    instance = context.instance
    run_id = context.run_id
    host = socket.gethostname()
    counter = itertools.count(1)

    def beat(value: object) -> None:
        instance.add_run_tags(run_id, {HEARTBEAT_TAG: f"{run_id} {host} {value}"})

    beat(0)
    try:
        with (
            engine_warnings(context),
            every(times.beat_seconds, lambda: beat(next(counter)), "surge-heartbeat"),
        ):
            yield
    finally:
        if len(context.job_def.nodes) > 1:
            with suppress(Exception):  # what ended the block is the error to report
                beat(_ENDED)


def declare_silent_runs(
    instance: dg.DagsterInstance,
    runs: Iterable[dg.DagsterRun],
    cursor: str | None,
    now: float,
    times: HeartbeatTimes = TIMES,
) -> str:
    """Declare runs failed whose heartbeat stands still, and return the sensor's next cursor.

    Runs without a heartbeat, of other jobs or not started yet, are left alone.

    Args:
        cursor: when the last tick was, and each heartbeat of that time with the seconds since it
            stands still.
        now: by the sensor's own clock, in seconds.
    """
    now = round(now)
    ticked, seen = json.loads(cursor) if cursor else (now, {})
    gap = min(max(now - ticked, 0), times.longest_gap_seconds)

    silent: dict[str, tuple[str, float]] = {}
    for run in runs:
        match run.tags.get(HEARTBEAT_TAG, "").split():
            case [run_id, host, value] if run_id == run.run_id and value != _ENDED:
                known_value, seconds = seen.get(run_id, (None, 0))
                seconds = seconds + gap if value == known_value else 0
                if seconds < times.lost_seconds:
                    silent[run_id] = (value, seconds)
                else:
                    _declare_lost(instance, run, host, times)
    return json.dumps([now, silent])


def _declare_lost(
    instance: dg.DagsterInstance, seen: dg.DagsterRun, host: str, times: HeartbeatTimes
) -> None:
    """Declare a run failed, unless it has ended or renewed its heartbeat since it was listed."""
    run = instance.get_run_by_id(seen.run_id)
    if run is None or run.status not in _EXECUTING:
        return
    if run.tags.get(HEARTBEAT_TAG) != seen.tags.get(HEARTBEAT_TAG):
        return
    why = (
        f"This run, on the host {host}, has shown no sign of life for {times.lost_seconds:.0f} "
        "seconds: its process was killed or hangs, or the host or its network is down. If it goes "
        "on, that does no harm: two runs never mix in a file, and the newer source wins."
    )
    if run.status is dg.DagsterRunStatus.CANCELING:  # Dagster would launch a failed run again
        instance.report_run_canceled(run, f"{why} Its termination had been requested.")
    else:
        instance.report_run_failed(run, why)


_ENGINE = logging.getLogger("surge_dagster")


class _RunLog(logging.Handler):
    def __init__(self, context: dg.OpExecutionContext) -> None:
        super().__init__(logging.WARNING)
        self._context = context

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(Exception):  # without a database the engine goes on
            self._context.log.log(record.levelno, record.getMessage())


@contextmanager
def engine_warnings(context: dg.OpExecutionContext) -> Iterator[None]:
    """Write warnings and errors of the engine into the run's log while the block works."""
    handler = _RunLog(context)
    _ENGINE.addHandler(handler)
    try:
        yield
    finally:
        _ENGINE.removeHandler(handler)
