"""ServedRun: one run that encodes through the service, and what it is held to.

It hands in its arenas, as memory files that can neither shrink nor grow, and names slots and rows of them; see
`engine.remote`. What it says is checked before a worker hears of it, on copies of its offsets and row numbers. Who
breaks the rules, or ends, loses the connection: its jobs are abandoned, its arenas dropped, and other runs go on.

A program of the same user may still change offsets after they were checked. At worst that ends the worker that reads
them, which is replaced, and the rows are tried by themselves, as with a text that ends every worker.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import logging
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from concurrent.futures import wait
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np

from surge_dagster.engine.encoder import protocol
from surge_dagster.engine.encoder.arena import Arena, Slot
from surge_dagster.engine.encoder.dispatcher import Dispatcher
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.protocol import SlotLayout
from surge_dagster.engine.encoder.schedule import Job
from surge_dagster.engine.errors import SurgeError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.remote.connection import SEALS, TURN_SECONDS, Refused, peer, requirements, shut_down
from surge_dagster.engine.support.waiting import in_background, result_of
from surge_dagster.version import __version__

log = logging.getLogger(__name__)

_MOST_ARENAS, _MOST_SLOTS, _MOST_JOBS, _MOST_BYTES = 16, 64, 64, 1 << 40
_MOST_DESCRIPTORS, _MOST_SAMPLES, _MOST_CHARACTERS = 4, 1_000, 400  # of a message; the characters are of one reason
_AT_A_TIME = 2  # jobs of runs that the workers have
_LOOK_SECONDS = 0.1
_SILENT_SECONDS = 10  # in which a run reads none of what it is sent
_KEYS = itertools.count(-1, -1)  # other ones than arenas of this process have


@dataclass(frozen=True, slots=True)
class _RunArena:
    """An arena as dispatchers and workers see one; its memory is read here, and never mapped."""

    key: int
    fd: int
    slots: int
    layout: SlotLayout

    def read(self, slot: int, region: int, dtype: Any, count: int) -> np.ndarray:
        start = slot * self.layout.slot_bytes + self.layout.starts[region]
        return np.frombuffer(os.pread(self.fd, np.dtype(dtype).itemsize * count, start), dtype, count)


@dataclass(slots=True, eq=False)
class _RunSlot:
    """A slot as jobs see one; its offsets are a checked copy."""

    arena: _RunArena
    index: int
    offsets: np.ndarray
    pins: int = 0

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def choose(self, rows: np.ndarray) -> None:
        """They are in the memory already."""

    def pin(self) -> None:
        self.pins += 1

    def unpin(self) -> None:
        self.pins -= 1


class Turns:
    """Hands the jobs of runs to a dispatcher, in turn. Several threads may call it.

    The workers get two jobs of runs at a time, one of them ahead, so that none waits. Next is always a job of the run
    that has had the least so far, in bytes of text and a constant per row, so that runs get the same, however they cut
    it into SuperBatches. Who comes later, or comes back, begins with what the others have had least.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self._lock = threading.Lock()
        self._had = Counter[Hashable]()
        self._waiting: list[tuple[Hashable, Job]] = []
        self._begun: list[tuple[Hashable, Job]] = []

    def add(self, run: Hashable, job: Job) -> None:
        with self._lock:
            others = {other for other, _ in (*self._waiting, *self._begun)}
            if others and run not in others:
                self._had[run] = max(self._had[run], min(self._had[other] for other in others))
            self._waiting.append((run, job))
            self._begin()

    def abandon(self, run: Hashable, job: Job) -> None:
        """As `Dispatcher.abandon`."""
        with self._lock:
            if (run, job) in self._waiting:
                self._waiting.remove((run, job))
                job.abandon()
                job.done.set()
                return
        self.dispatcher.abandon(job)

    def end(self, run: Hashable, job: Job) -> None:
        """Call it once the job is done."""
        with self._lock:
            if (run, job) in self._begun:
                self._begun.remove((run, job))
            self._begin()

    def leave(self, run: Hashable) -> None:
        """Forget a run that adds no more jobs."""
        with self._lock:
            self._had.pop(run, None)

    def _begin(self) -> None:
        while self._waiting and len(self._begun) < _AT_A_TIME:
            run, job = min(self._waiting, key=lambda waiting: self._had[waiting[0]])
            self._waiting.remove((run, job))
            self._begun.append((run, job))
            self._had[run] += int(job.ends[-1])
            self.dispatcher.encode(job)


class ServedRun:
    """Answers a run until its end.

    Args:
        pool_of: the pool for a `Space.vectors_key`, or `Refused`.
        turns_of: the same for all runs of a dispatcher.
    """

    def __init__(
        self,
        connection: socket.socket,
        pool_of: Callable[[str], EncoderPool],
        turns_of: Callable[[Dispatcher], Turns],
    ) -> None:
        self.connection = connection
        self._pool_of, self._turns_of = pool_of, turns_of
        self._process, self._user = peer(connection)
        patience = struct.pack("ll", _SILENT_SECONDS, 0)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
        self._sending = threading.Lock()
        self._space: Space | None = None
        self._turns: Turns | None = None
        self._arenas: dict[int, _RunArena] = {}
        self._jobs: dict[int, Job] = {}

    def serve(self) -> None:
        """Returns when the run has ended, or has broken a rule."""
        try:
            while self._answer_next():
                pass
        except Refused as error:
            self._send("refused", message=str(error))
        except Exception as error:
            self._give_up(error)
        if self._turns is not None:
            for job in list(self._jobs.values()):
                self._turns.abandon(self, job)
            for arena in self._arenas.values():
                self._drop(arena)
            self._turns.leave(self)
        self.connection.close()

    def _answer_next(self) -> bool:
        try:
            received = socket.recv_fds(self.connection, protocol.MAX_MESSAGE_BYTES, _MOST_DESCRIPTORS)
        except OSError:
            return False
        content, descriptors, _, _ = received
        try:
            if content:
                self._answer(json.loads(content), descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return bool(content)

    def _answer(self, message: protocol.Message, descriptors: list[int]) -> None:
        if self._turns is None or self._space is None:
            self._agree(message)
        elif message["op"] == "arena":
            layout = SlotLayout(**message["layout"])
            self._add(message["arena"], message["slots"], layout, self._space, self._turns.dispatcher, *descriptors)
        elif message["op"] == "drop":
            self._drop(self._arenas.pop(message["arena"]))
        elif message["op"] == "encode":
            self._encode(message, self._turns, *descriptors)
        else:
            raise ValueError(f"it sent {message['op']!r}")

    def _agree(self, message: protocol.Message) -> None:
        if self._user != os.geteuid():
            raise Refused(f"the encoder service is that of another user than uid {self._user}")
        if message.get("version") != __version__:
            raise Refused(f"the encoder service has version {__version__}, and this run {message.get('version')}")
        pool = self._pool_of(message["space"])
        starting = in_background(pool.dispatcher, "surge-start-pool")
        while not wait([starting], TURN_SECONDS).done:
            self._send("starting")
        try:
            dispatcher = result_of(starting)
        except SurgeError as error:
            raise Refused(f"the encoder service cannot encode: {str(error).splitlines()[0]}") from None
        for name, own in requirements(pool.space, dispatcher.seats[0]).items():
            if message[name] != own:
                raise Refused(f"the encoder service has {name} {own}, and this run {message[name]}")
        workers = [dispatcher.ready_messages[seat.index] | {"device": seat.device} for seat in dispatcher.seats]
        self._space, self._turns = pool.space, self._turns_of(dispatcher)
        self._send("ready", workers=workers, hardware=pool.hardware, pids=dispatcher.worker_pids())

    def _add(
        self, key: int, slots: int, layout: SlotLayout, space: Space, dispatcher: Dispatcher, descriptor: int
    ) -> None:
        _require_number(slots, _MOST_SLOTS)
        _require_number(layout.max_texts, _MOST_BYTES)
        _require_number(layout.max_bytes, _MOST_BYTES)
        if key in self._arenas or len(self._arenas) >= _MOST_ARENAS:
            raise ValueError(f"it has {len(self._arenas)} arenas, and adds {key}")
        if (layout.dimension, layout.dtype) != (space.dimension, space.dtype):
            raise ValueError(f"its vectors are {layout.dimension} {layout.dtype}")
        size, found = slots * layout.slot_bytes, os.fstat(descriptor).st_size
        if size != found or size > _MOST_BYTES:
            raise ValueError(f"an arena of {size} bytes has {found}")
        is_writable = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) != SEALS or not is_writable:
            raise ValueError("the memory of an arena can change its size, or cannot be written to")
        self._arenas[key] = arena = _RunArena(next(_KEYS), os.dup(descriptor), slots, layout)
        dispatcher.add_arena(cast(Arena, arena))

    def _drop(self, arena: _RunArena) -> None:
        assert self._turns is not None
        self._turns.dispatcher.drop_arena(cast(Arena, arena))
        os.close(arena.fd)

    def _encode(self, message: protocol.Message, turns: Turns, *borders: int) -> None:
        number, index, texts, chosen = (message[name] for name in ("job", "slot", "texts", "chosen"))
        arena = self._arenas[message["arena"]]
        _require_number(index, arena.slots - 1)
        _require_number(texts, arena.layout.max_texts)
        _require_number(chosen or 0, texts)
        if number in self._jobs or len(self._jobs) >= _MOST_JOBS:
            raise ValueError(f"it has {len(self._jobs)} jobs, and adds {number}")
        offsets = arena.read(index, 0, np.int64, texts + 1)
        _require_rising(offsets, 0, arena.layout.max_bytes)
        rows = None
        if chosen is not None:
            rows = arena.read(index, 2, np.int32, chosen)
            _require_rising(rows, None, texts - 1)
        slot = _RunSlot(arena, index, offsets)
        self._jobs[number] = job = Job(cast(Slot, slot), _borders(texts, *borders) if borders else None, rows)
        in_background(partial(self._follow, number, job, slot, turns), "surge-served-job")
        turns.add(self, job)

    def _follow(self, number: int, job: Job, slot: _RunSlot, turns: Turns) -> None:
        """Tells the run what becomes of a job, and its end when no worker has the slot any longer."""
        sent, is_over = 0, False
        try:
            while not is_over:
                is_over = job.done.wait(TURN_SECONDS / 2) and not slot.pins
                if is_over:  # before anything is sent, which takes as long as the run reads nothing
                    turns.end(self, job)
                ranges = job.encoded[sent:]
                sent += len(ranges)
                self._send("progress", job=number, finished=job.finished_rows, encoded=ranges)
                if job.done.is_set() and not is_over:
                    time.sleep(_LOOK_SECONDS)
            if job.error is not None and turns.dispatcher.failure is not None:
                raise job.error  # not of this job: another service, or the run itself, can encode it
            del self._jobs[number]
            self._send("done", job=number, **_result(job))
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        log.warning("the run of process %d is no longer served: %s", self._process, str(error) or repr(error))
        shut_down(self.connection)

    def _send(self, op: str, **facts: Any) -> None:
        with self._sending, contextlib.suppress(OSError):  # that the run has ended is noticed in one place only
            try:
                protocol.send(self.connection, {"op": op} | facts)
            except BlockingIOError:
                shut_down(self.connection)
                log.warning("the run of process %d reads nothing, and is no longer served", self._process)


def _result(job: Job) -> protocol.Message:
    return {
        "costs": job.costs.measured(),
        "seconds": job.encode_seconds,
        "replays": job.replays,
        "gpu": job.gpu_samples[-_MOST_SAMPLES:],
        "failed": [(failed.row, failed.reason[:_MOST_CHARACTERS]) for failed in job.quarantine.failed],
        "error": str(job.error)[: 10 * _MOST_CHARACTERS] if job.error else None,
    }


def _borders(texts: int, descriptor: int) -> np.ndarray:
    size = os.fstat(descriptor).st_size
    if size > 8 * texts:
        raise ValueError(f"{texts} texts have {size // 8} borders")
    borders = np.frombuffer(os.pread(descriptor, size, 0), np.int64)
    _require_rising(borders, 0, texts - 1)
    return borders


def _require_number(value: object, most: int) -> None:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"it names {value!r}, which is not within 0..{most}")


def _require_rising(values: np.ndarray, first: int | None, most: int) -> None:
    """Neighbours are compared: their difference may be more than the type can hold."""
    is_begun = len(values) and values[0] >= 0 and first in (None, values[0])
    if not is_begun or values[-1] > most or (values[1:] < values[:-1]).any():
        raise ValueError(f"its offsets or row numbers do not rise within 0..{most}")
