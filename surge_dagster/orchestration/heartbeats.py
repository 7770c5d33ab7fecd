"""Signs of life of a run, for where nobody can look at its process.

A run leaves on itself which process executes it, and every minute that it still does. Whoever is on the same machine
compares the process. A container that was started again is another machine, though, and where runs are processes of the
code server's own, none of them can be alive in it: there a run is lost that was looked at ten times, a minute apart,
without a new sign. Looks are counted and not minutes, because a database that was out of reach keeps both from getting
on, and clocks may differ. Launchers that start runs elsewhere look after them themselves.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count

import dagster as dg
from dagster._core.launcher import DefaultRunLauncher
from dagster._core.storage.tags import HIDDEN_TAG_PREFIX

from surge_dagster.orchestration.active_runs import active_runs, declare_lost, is_elsewhere, process_tags

LOOK_SECONDS = 60
_BEAT_SECONDS = 60
_LOOKS = 10
_BEAT_TAG = f"{HIDDEN_TAG_PREFIX}surge/heartbeat"
_END_SECONDS = 2.0
_SILENT = (
    f"The process of this run has given no sign of life for {_LOOKS * LOOK_SECONDS // 60} minutes; the container or "
    "machine that it was on is gone."
)


@contextmanager
def signed(context: dg.OpExecutionContext) -> Iterator[None]:
    """Leave on the run which process executes it, and that it lives for as long as the block takes.

    Before that, runs are declared failed whose process is gone, so that nobody goes on waiting for them.
    """
    instance, run_id = context.instance, context.run_id
    instance.add_run_tags(run_id, process_tags(context.get_step_execution_context(), run_id) | {_BEAT_TAG: "0"})
    for _ in active_runs(instance, lambda run: True):
        pass
    ended = threading.Event()

    def beat() -> None:
        for number in count(1):
            over = ended.wait(_BEAT_SECONDS)
            with suppress(Exception):  # a database that cannot be written now; the next one may get through
                # Nothing, at the end: the run may go on with steps that are not ours.
                instance.add_run_tags(run_id, {_BEAT_TAG: "" if over else str(number)})
            if over:
                return

    beats = threading.Thread(target=beat, name="surge-heartbeat", daemon=True)
    beats.start()
    try:
        yield
    finally:
        ended.set()
        beats.join(_END_SECONDS)


def look_for_lost_runs(instance: dg.DagsterInstance, cursor: str | None) -> tuple[int, str]:
    """Declare lost runs failed; gives how many are waiting or going on, and the cursor for the next look.

    Args:
        cursor: of the last look, None at the first one. Looks are at least a minute apart.
    """
    before, seen = _read(cursor), dict[str, tuple[str, int]]()
    going_on = 0
    for run in active_runs(instance, lambda run: True):
        sign = run.tags.get(_BEAT_TAG) if is_elsewhere(run) else None
        if sign and isinstance(instance.run_launcher, DefaultRunLauncher):
            last, looks = before.get(run.run_id, ("", 0))
            seen[run.run_id] = (sign, looks + 1 if sign == last else 0)
            if seen[run.run_id][1] >= _LOOKS:
                del seen[run.run_id]
                declare_lost(instance, run.run_id, _SILENT)
                continue
        going_on += 1
    return going_on, json.dumps(seen)


def _read(cursor: str | None) -> Mapping[str, tuple[str, int]]:
    try:
        return {str(run_id): (str(sign), int(looks)) for run_id, (sign, looks) in json.loads(cursor or "{}").items()}
    except (ValueError, TypeError, AttributeError):
        return {}
