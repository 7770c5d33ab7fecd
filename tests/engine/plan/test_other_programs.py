"""Which share of the cores other programs had."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import psutil
import pytest

from surge_dagster.engine.plan.other_programs import CoreSeconds

SPIN = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"


@pytest.mark.parametrize(
    ("whole", "busy", "own", "share"),
    [
        (20.0, 20.0, 19.5, 0.025),
        (20.0, 19.0, 9.0, 0.5),
        (20.0, 15.0, 5.0, 0.0),  # nobody waited for a core
        (0.5, 0.5, 0.0, 0.0),  # too short to say
        (20.0, 20.0, 20.5, 0.0),  # clocks tick apart
    ],
)
def test_share_of_other_programs(whole: float, busy: float, own: float, share: float) -> None:
    assert CoreSeconds(100 + whole, 60 + busy, 3 + own).share_of_others(
        CoreSeconds(100, 60, 3)
    ) == pytest.approx(share)


def test_time_of_workers_is_own_time_while_they_run_and_after_their_end() -> None:
    before = CoreSeconds.now([])
    with subprocess.Popen(
        [sys.executable, "-c", SPIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as worker:
        assert worker.stdout is not None and worker.stdout.readline()
        of_others, running = CoreSeconds.now([]), CoreSeconds.now([worker.pid])
        assert running.own - of_others.own >= 0.25
    assert CoreSeconds.now([worker.pid]).own - before.own >= 0.25  # a pid of the past is no error
    assert running.whole > before.whole and running.busy > before.busy


def test_only_cores_that_this_process_may_use_count(monkeypatch: pytest.MonkeyPatch) -> None:
    core: Any = psutil.cpu_times()._replace(**dict.fromkeys(psutil.cpu_times()._fields, 0.0))
    cores = [core._replace(user=user, idle=10.0 - user, guest=user) for user in (1.0, 2.0, 4.0)]
    monkeypatch.setattr(psutil, "cpu_times", lambda percpu: cores)
    # a container may list other numbers
    for allowed, busy in (({1, 2}, 6.0), ({0}, 1.0), ({7}, 7.0)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, allowed=allowed: allowed)
        assert (CoreSeconds.now([]).busy, CoreSeconds.now([]).whole) == (
            busy,
            10.0 * (3 if allowed == {7} else len(allowed)),
        )
