"""One worker process as the pool sees it: its socket, its lifeline, its last words and what it is working on."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import subprocess
import time
from collections import deque
from dataclasses import dataclass, field

from surge_dagster.engine.encoder import protocol
from surge_dagster.engine.encoder.calls import Chunk
from surge_dagster.engine.support.child_process import module_command, module_environment

log = logging.getLogger(__name__)

_LAST_LINES = 80
_READ_BYTES = 64 << 10
_ANSWER_SECONDS = 1.0
_WHOLE_ANSWER_SECONDS = 0.2
# Tearing down a process that holds much memory, or a device, takes a while; most end within milliseconds.
_KILLED_SECONDS = 5.0
_WORKER_MODULE = "surge_dagster.engine.encoder.worker.main"


@dataclass(frozen=True, slots=True)
class WorkerSeat:
    """Where a worker runs: its device as the user names it, and its environment.

    A process may die; its seat is taken by the next one.
    """

    index: int
    device: str
    load_message: protocol.Message
    environment: dict[str, str] = field(default_factory=dict)


class WorkerProcess:
    """A running worker. Spawned, used and ended by the dispatcher's thread alone.

    Args:
        seat: what it is to load, and where.
        token_budget: the one that its predecessor found to fit the device's memory; None is the seat's own.
        backend: what "auto" means by now: whoever replaces a worker must not choose another one.
    """

    def __init__(self, seat: WorkerSeat, token_budget: int | None = None, backend: str | None = None) -> None:
        self.seat = seat
        self.ready = False
        self.assigned: list[Chunk] = []
        self.known_arenas: set[int] = set()
        self.last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._partial_line = b""
        self.progress = -1
        self.moved_at = time.monotonic()
        self.told_at = self.moved_at  # when it was last said that it is still loading
        self.head_since = self.moved_at  # when the first of its chunks became that
        self._killed_at: float | None = None
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        lifeline, self._lifeline = os.pipe()
        try:
            self.process = subprocess.Popen(
                module_command(_WORKER_MODULE, theirs.fileno(), lifeline, os.getpid()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(), lifeline),
                env={**module_environment(), "PYTHONUNBUFFERED": "1", **seat.environment},
                # A group of its own: an interrupt from the terminal is the pool's business.
                process_group=0,
            )
        except BaseException:
            self.connection.close()
            os.close(self._lifeline)
            raise
        finally:
            theirs.close()
            os.close(lifeline)
        assert self.process.stdout is not None
        self.output = self.process.stdout
        os.set_blocking(self.output.fileno(), False)
        # A process that died at once is noticed where every other death is: at the end of its connection.
        with contextlib.suppress(OSError):
            protocol.send(self.connection, _load_message(seat, token_budget, backend))

    @property
    def pid(self) -> int:
        return self.process.pid

    def note_progress(self, progress: int | None = None) -> None:
        """Remembers that the worker moved: it sent an answer, or its counter changed."""
        if progress is None or progress != self.progress:
            self.moved_at = time.monotonic()
        if progress is not None:
            self.progress = progress

    def take(self, number: int) -> Chunk:
        """Takes a chunk, by its number, off what the worker has to do."""
        place = next(place for place, chunk in enumerate(self.assigned) if chunk.number == number)
        return self.assigned.pop(place)

    def read_output(self) -> bool:
        """Takes in what the worker printed; False once it can print no more."""
        try:
            content = os.read(self.output.fileno(), _READ_BYTES)
        except BlockingIOError:
            return True
        if not content:
            return False
        *lines, self._partial_line = (self._partial_line + content).split(b"\n")
        self.last_lines.extend(line.decode(errors="replace").rstrip() for line in lines if line.strip())
        return True

    def ask_where(self) -> None:
        """Has a process that seems to hang print the stacks of its threads, as far as it still can."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(protocol.ASK_WHERE)
        if not self._has_output(_ANSWER_SECONDS):
            return
        # A worker may go on printing without end, and its answer must not be lost in that.
        deadline = time.monotonic() + _WHOLE_ANSWER_SECONDS
        while (left := deadline - time.monotonic()) > 0 and self._has_output(left) and self.read_output():
            pass

    def with_last_words(self, why: str) -> str:
        """Why it ended, and what it printed last."""
        lines = "\n".join(f"  {line}" for line in self.last_lines)
        return f"{why}\nIts last words:\n{lines}" if lines else f"{why}; it printed nothing"

    def kill(self) -> None:
        """Ends the process at once."""
        self._killed_at = self._killed_at or time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)

    def wait(self, seconds: float) -> int | None:
        """The exit code of the process; None when it has not ended by then."""
        try:
            return self.process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            return None

    def end(self, grace_seconds: float) -> int | None:
        """Waits for the process, kills it after `grace_seconds`, and frees everything; returns its exit code.

        None: it was killed and hangs inside the kernel, which no signal ends, so it is given up. Its chunks may go to
        others all the same: it never comes back to code of its own, and what the kernel or a device may still finish
        for it goes to memory of its own, never to an arena. The system ends it whenever it can, and `subprocess` takes
        note of that when it next starts a process.
        """
        code = self.wait(grace_seconds)
        if code is None:
            self.kill()
            assert self._killed_at is not None
            code = self.wait(self._killed_at + _KILLED_SECONDS - time.monotonic())
        # A process that it started may go on printing without end.
        deadline = time.monotonic() + _WHOLE_ANSWER_SECONDS
        while self.read_output() and self._has_output() and time.monotonic() < deadline:
            pass
        if self._partial_line.strip():
            self.last_lines.append(self._partial_line.decode(errors="replace").rstrip())
        self.connection.close()
        self.output.close()
        os.close(self._lifeline)
        if code is None:
            log.warning(
                "worker %d on %s was killed and does not end: it hangs inside the kernel, as it does after a fault of "
                "a GPU's driver or on a mount that does not answer. It is left to itself, and keeps its memory, the "
                "device's too, until the kernel lets it end; dmesg may say why. Restart the machine if it stays",
                *(self.pid, self.seat.device),
            )
        return code

    def _has_output(self, patience_seconds: float = 0.0) -> bool:
        poll = select.poll()
        poll.register(self.output, select.POLLIN)
        return bool(poll.poll(1_000 * patience_seconds))


def _load_message(seat: WorkerSeat, token_budget: int | None, backend: str | None) -> protocol.Message:
    message = dict(seat.load_message)
    if token_budget is not None:
        message["settings"] = message["settings"] | {"token_budget": token_budget}
    if backend is not None and message["backend"] == "auto":
        message["backend"] = backend
    return message
