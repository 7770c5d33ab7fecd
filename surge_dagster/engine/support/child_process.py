"""Processes that run a module of this package: how they begin, how they follow who began them, and how they ended."""

from __future__ import annotations

import os
import select
import signal
import sys
from pathlib import Path

_PACKAGE_ROOT = Path(__file__).resolve().parents[3]
_PARENT_CHECK_MILLISECONDS = 2_000


def module_command(module: str, *arguments: object) -> list[str]:
    # -P: the folder that this run was started in must not hide any library.
    return [sys.executable, "-P", "-m", module, *map(str, arguments)]


def module_environment() -> dict[str, str]:
    """This process's own, in which the module is found wherever it lies."""
    paths = [path for path in (os.environ.get("PYTHONPATH"), str(_PACKAGE_ROOT)) if path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def leave_signals_to_parent() -> None:
    """Interrupts and termination signals that are sent to a whole group are the parent's business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def wait_for_parents_end(lifeline: int, parent: int) -> None:
    """Returns when the other side of the lifeline goes, or when the parent changed: a fork of it may hold that open."""
    poll = select.poll()
    poll.register(lifeline, select.POLLIN | select.POLLHUP)
    while not poll.poll(_PARENT_CHECK_MILLISECONDS):
        if os.getppid() != parent:
            return


def how_it_ended(code: int | None) -> str:
    """An exit code in words; None is of a process that was killed and goes on."""
    if code is None:
        return "it was killed and hangs inside the kernel"
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    # The kernel's out-of-memory killer is the usual sender of a SIGKILL that nobody admits to.
    return f"{name} (out of memory, or killed by hand)" if name == "SIGKILL" else name
