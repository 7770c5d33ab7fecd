"""One worker process as the pool sees it: its start, messages, output, work and end."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from surge_dagster.engine.encoder import protocol
from surge_dagster.engine.encoder.schedule import Portion

log = logging.getLogger(__name__)

_OUTPUT_BYTES = 8 << 10  # that error messages show
_READ_BYTES = 64 << 10
_LAST_READS = 4  # a full pipe has one or two
# Ending a process that holds much memory, or a device, takes a while; most end within milliseconds.
_KILLED_SECONDS = 5.0
_WORKER_MODULE = "surge_dagster.engine.encoder.worker.main"
# A worker computes vectors of texts that it is given: it needs no secret, and a model's library
# must not see one.
_SECRET_NAME = re.compile(
    r"TOKEN(?!IZERS)|SECRET|PASSW|_PASS$|_PWD$|_PAT$|CREDENTIAL|WEBHOOK|APIKEY"
    r"|STORAGE_OPTIONS|CONNECTION_STRING|(?:^|_)(?:KEY|GCP)(?:_|$)|^(?:AWS|AZURE|GOOGLE)_",
    re.IGNORECASE,
)
_SECRET_VALUE = re.compile(r"://[^@\s]*:[^@\s]*@|[?&]sig=")  # a URL with a password or a signature
_PACKAGE_ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, slots=True)
class WorkerSeat:
    index: int
    device: str
    load_message: protocol.Message
    environment: dict[str, str]
    niceness: int


class WorkerProcess:
    """A running worker. Only the dispatcher's thread uses it.

    Attributes:
        ready: whether it has loaded the model.
        queues: whether it launches a portion before the one before has ended.
        portion_texts: texts of a portion at most; None if its bytes are the only limit.
        assigned: portions that it was sent and has not answered; it answers in the same order.
        moved_at: when it last showed progress.
    """

    def __init__(self, seat: WorkerSeat) -> None:
        self.seat = seat
        self.ready = False
        self.queues = False
        self.portion_texts: int | None = None
        self.assigned: list[Portion] = []
        self.known_arenas: set[int] = set()
        self._printed = b""
        self._progress = -1
        self.moved_at = time.monotonic()
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self.process = _started(theirs, seat)
        except BaseException:
            self.connection.close()
            raise
        finally:
            theirs.close()

        if seat.niceness:  # of its first thread, which has started no other yet
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, self.pid, own + seat.niceness)
        assert self.process.stdout is not None
        self.output = self.process.stdout
        os.set_blocking(self.output.fileno(), False)
        self._send(seat.load_message)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def name(self) -> str:
        return f"worker {self.pid} on {self.seat.device}"

    def note_progress(self, progress: int | None = None) -> None:
        """The worker sent an answer (None), or its progress counter."""
        if progress is None or progress != self._progress:
            self.moved_at = time.monotonic()
        if progress is not None:
            self._progress = progress

    def assign(self, portion: Portion) -> None:
        """A worker gets the memory file of an arena once."""
        arena = portion.call.slot.arena
        if not self.assigned:
            self.note_progress()
        self.assigned.append(portion)
        portion.call.slot.pin()
        if arena.key not in self.known_arenas:
            self.known_arenas.add(arena.key)
            described = {
                "op": "arena",
                "arena": arena.key,
                "slots": arena.slots,
                "layout": asdict(arena.layout),
            }
            self._send(described, (arena.fd,))
        described = {
            "op": "encode",
            "arena": arena.key,
            "slot": portion.call.slot.index,
            "start": portion.start,
            "stop": portion.stop,
            "chosen": portion.call.chosen is not None,
            "holds_ids": portion.call.holds_ids,
        }
        self._send(described)

    def portion_of(self, place: Sequence[int]) -> Portion:
        """Return the assigned portion of this arena, slot and first row."""
        for portion in self.assigned:
            slot = portion.call.slot
            if [slot.arena.key, slot.index, portion.start] == list(place):
                return portion
        raise ValueError(f"{self.name} answers a portion that it does not have: {place}")

    def drop_arena(self, key: int) -> None:
        if key in self.known_arenas:
            self.known_arenas.discard(key)
            self._send({"op": "drop", "arena": key})

    def read_output(self) -> bytes | None:
        """Read what the worker printed: None if nothing yet, b"" once it can print no more."""
        try:
            printed = os.read(self.output.fileno(), _READ_BYTES)
        except BlockingIOError:
            return None
        self._printed = (self._printed + printed)[-_OUTPUT_BYTES:]
        return printed

    def with_output(self, reason: str) -> str:
        lines = self._printed.decode(errors="replace").splitlines()
        shown = [f"  {line.rstrip()}" for line in lines if line.strip()]
        if not shown:
            return f"{reason}; it printed nothing"
        return "\n".join([reason, "Its last output:", *shown])

    def abort(self) -> None:
        """Let a process that seems to hang print the stacks of its threads and end, if it can."""
        self.process.send_signal(signal.SIGABRT)

    def wait(self, seconds: float) -> int | None:
        """Return the exit code; None if the process has not ended by then."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def end(self, grace_seconds: float) -> int | None:
        """Wait for the process, kill it after `grace_seconds`, and return its exit code.

        None: it was killed and hangs inside the kernel, so it is given up. Others may still encode
        its portions: it never runs its own code again, and what the kernel or a device still
        finishes for it never goes to an arena.
        """
        code = self.wait(grace_seconds)
        if code is None:
            self.process.kill()
            code = self.wait(_KILLED_SECONDS)
        for _ in range(_LAST_READS):  # a process that it started may print without end
            self.read_output()
        self.connection.close()
        self.output.close()
        if code is None:
            log.warning(
                "%s was killed and does not end: it hangs inside the kernel, as after a fault of a "
                "GPU's driver. It keeps its memory until it ends; dmesg may say why",
                self.name,
            )
        return code

    def _send(self, message: protocol.Message, descriptors: tuple[int, ...] = ()) -> None:
        # A process that has died is noticed in one place only: at the end of its connection.
        with contextlib.suppress(OSError):
            protocol.send(self.connection, message, descriptors)


def _started(connection: socket.socket, seat: WorkerSeat) -> subprocess.Popen[bytes]:
    paths = [path for path in (os.environ.get("PYTHONPATH"), str(_PACKAGE_ROOT)) if path]
    # see `commands`
    environment = {"ARROW_DEFAULT_MEMORY_POOL": "jemalloc", **_environment_without_secrets()}
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    arguments = [str(connection.fileno()), str(os.getpid())]
    return subprocess.Popen(
        # -P: modules in the current folder must not hide libraries.
        [sys.executable, "-P", "-m", _WORKER_MODULE, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(connection.fileno(),),
        env={**environment, **seat.environment},
        # Its own process group: the pool handles an interrupt from the terminal.
        process_group=0,
    )


def describe_exit(code: int | None) -> str:
    if code is None:
        return "it was killed and hangs inside the kernel"
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    # The kernel's out-of-memory killer is the usual sender of an unexpected SIGKILL.
    if name == "SIGKILL":
        return "SIGKILL (out of memory, or killed by hand)"
    return name


def _environment_without_secrets() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if not _SECRET_NAME.search(name) and not _SECRET_VALUE.search(value)
    }
