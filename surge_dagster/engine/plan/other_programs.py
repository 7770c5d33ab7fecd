"""How much of the cores other programs took: what a run beside them needed says little of the next
one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import psutil

_IDLE, _COUNTED_TWICE = ("idle", "iowait"), ("guest", "guest_nice")
_SHORT_SECONDS, _SPARE = 1.0, 0.1


@dataclass(frozen=True, slots=True)
class CoreSeconds:
    """Since some moment in the past, of the cores that this process may use.

    Attributes:
        whole: that passed, on all of them together.
        busy: in which a program ran.
        own: of this process, its encoder workers, and what it started that has ended.
    """

    whole: float
    busy: float
    own: float

    @classmethod
    def now(cls, worker_pids: Iterable[int]) -> Self:
        cores = psutil.cpu_times(percpu=True)
        if hasattr(os, "sched_getaffinity"):  # not on macOS
            cores = [cores[core] for core in os.sched_getaffinity(0) if core < len(cores)] or cores
        times = [core._asdict() for core in cores]
        whole = sum(
            seconds
            for each in times
            for kind, seconds in each.items()
            if kind not in _COUNTED_TWICE
        )
        idle = sum(each.get(kind, 0.0) for each in times for kind in _IDLE)
        return cls(whole, whole - idle, sum(map(_seconds_of, [os.getpid(), *worker_pids])))

    def share_of_others(self, since: CoreSeconds) -> float:
        """Of the cores' time, what other programs had; 0 where cores stood idle, or where it is too
        short to say."""
        whole, busy, own = self.whole - since.whole, self.busy - since.busy, self.own - since.own
        if whole < _SHORT_SECONDS or busy < (1 - _SPARE) * whole:
            return 0.0
        return max(0.0, busy - own) / whole


def _seconds_of(pid: int) -> float:
    """With those of its children that have ended."""
    with contextlib.suppress(psutil.Error):  # a process may end at any moment
        times = psutil.Process(pid).cpu_times()
        return times.user + times.system + times.children_user + times.children_system
    return 0.0
