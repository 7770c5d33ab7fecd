"""Heartbeats: a tag that a run renews each minute while it works, so that a run of a dead machine is found.

No run launcher is needed for that: one may call a run alive whose host has no power. A heartbeat is a counter and no
time, so that the clocks of two machines are never compared. It is judged by the clock of the sensor `lost_runs`.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import dagster as dg

from surge_dagster.engine.support.waiting import every
from surge_dagster.orchestration.active_runs import PROCESS_TAG, declare_lost, process_tag

# "<run id> <counter>": Dagster copies the tags of a run to the run that retries it.
HEARTBEAT_TAG = ".dagster/surge/heartbeat"
_BEAT_SECONDS, _SILENT_SECONDS = 60.0, 300.0
_ENDED = "ended"  # the run may go on with steps that are not of this project
# Where no tick came for longer, machines slept, the clock was set, or the database was away, and runs could not renew
# their heartbeats either: it counts as a minute, as does each of ticks that are always that rare.
_LONGEST_PAUSE_SECONDS, _COUNTED_SECONDS = 120, 60
_ID_CHARACTERS = 12  # of a run: Dagster keeps the cursor of each tick for a week


@contextmanager
def executing(context: dg.OpExecutionContext) -> Iterator[None]:
    """Tag a run with the process that executes it, and renew its heartbeat while the block works.

    A database that is away does not stop the run: the next minute's heartbeat is written when it has come back. The
    last heartbeat of a run without other steps stays, because its machine may die before Dagster knows that it ended.
    """
    instance, run_id, counter = context.instance, context.run_id, itertools.count(1)

    def beat(value: object, **others: str) -> None:
        instance.add_run_tags(run_id, {HEARTBEAT_TAG: f"{run_id} {value}", **others})

    # An executor with a process per step leaves retries to the run's own process, which is the step's parent and ends
    # after it.
    own = context.get_step_execution_context().retry_mode.name != "DEFERRED"
    beat(0, **{PROCESS_TAG: process_tag(run_id, os.getpid() if own else os.getppid())})
    try:
        with every(_BEAT_SECONDS, lambda: beat(next(counter)), "surge-heartbeat"):
            yield
    finally:
        if len(context.job_def.nodes) > 1:
            with suppress(Exception):  # what ended the block is the error to report
                beat(_ENDED)


def declare_silent_runs(
    instance: dg.DagsterInstance, runs: Iterable[dg.DagsterRun], cursor: str | None, now: float
) -> str:
    """Declare runs failed whose heartbeat has stood still for five minutes; returns the sensor's next cursor.

    Runs without a heartbeat, of other jobs or not started yet, are left alone.

    Args:
        cursor: when the last tick was, and each heartbeat of that time with the time when it was first seen.
        now: by the sensor's own clock, in seconds.
    """
    now = round(now)
    ticked, seen = json.loads(cursor) if cursor else (now, {})
    pause = now - ticked
    not_counted = min(pause, 0) if pause <= _LONGEST_PAUSE_SECONDS else pause - _COUNTED_SECONDS
    first_seen: dict[str, tuple[str, int]] = {}
    for run in runs:
        run_id, _, beat = run.tags.get(HEARTBEAT_TAG, "").partition(" ")
        if run_id != run.run_id or beat == _ENDED:
            continue
        short_id = run_id[:_ID_CHARACTERS]
        known, since = seen.get(short_id, (None, 0))
        since = since + not_counted if known == beat else now
        if now - since < _SILENT_SECONDS:
            first_seen[short_id] = beat, since
            continue
        host = run.tags.get(PROCESS_TAG, "? ?").split()[1].partition("/")[0]
        declare_lost(
            instance,
            run,
            f"This run, on the host {host}, has shown no sign of life for five minutes: the host or its network is "
            "down, or the process hangs. If it goes on, that does no harm: two runs never mix in a file, and the "
            "newer source wins.",
            HEARTBEAT_TAG,
        )
    return json.dumps([now, first_seen])
