"""The workers of an encoder service, with the methods of a `Dispatcher`, so that a pool need not know the difference.

A service that ends, or is silent for too long, is waited for; its next process gets the same arenas, and all unfinished
jobs again. When none comes in time, workers of this process take over. Before either of them begins, the kernel must
say that no worker of the lost service can still write to an arena: each was lent with a lock (`flock`) that lasts until
the last process that has mapped it, or holds its descriptor, has let go.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict

import numpy as np

from surge_dagster.engine.encoder import protocol
from surge_dagster.engine.encoder.arena import Arena
from surge_dagster.engine.encoder.dispatcher import Dispatcher
from surge_dagster.engine.encoder.metrics import Costs
from surge_dagster.engine.encoder.quarantine import FailedRow
from surge_dagster.engine.encoder.schedule import Job
from surge_dagster.engine.errors import EncoderError
from surge_dagster.engine.remote.connection import SEALS, SILENCE_SECONDS, Connection, Lost, Refused, shut_down
from surge_dagster.engine.support.waiting import rest, wait_for_thread

log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2


class RemoteWorkers:
    """See `Dispatcher`, whose methods and attributes these are.

    Args:
        connection: closed at the end.
        connect: finds the service again.
        start_own: starts workers of this process.
        patience_seconds: how long a lost service is waited for.
    """

    def __init__(
        self,
        connection: Connection,
        connect: Callable[[Callable[[], bool]], Connection],
        start_own: Callable[[], Dispatcher],
        patience_seconds: float,
    ) -> None:
        self._connect, self._start_own, self._patience_seconds = connect, start_own, patience_seconds
        self._lock = threading.RLock()
        self._connection: Connection | None = connection  # None while there is none
        self._own: Dispatcher | None = None
        self._arenas: dict[int, Arena] = {}
        self._jobs: dict[int, Job] = {}  # by `id`; their slots are pinned: the service has, or had, work in them
        self._heard_at = time.monotonic()
        self._lost_at: float | None = None  # since when no job was finished because of that
        self._closing = False
        self._failure: Exception | None = None
        self._replays = 0
        where = f"by the encoder service at {connection.path}"
        workers = [worker | {"detail": f"{worker['detail']}, {where}"} for worker in connection.ready["workers"]]
        self.ready_messages = dict[int, protocol.Message](enumerate(workers))
        self.started = threading.Event()
        self.started.set()
        self._thread = threading.Thread(target=self._run, name="surge-remote-workers", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> Exception | None:
        return self._failure or (self._own.failure if self._own else None)

    @property
    def replays(self) -> int:
        return self._replays + (self._own.replays if self._own else 0)

    def worker_pids(self) -> list[int]:
        if self._own is not None:
            return self._own.worker_pids()
        return self._connection.ready["pids"] if self._connection else []

    def add_arena(self, arena: Arena) -> None:
        fcntl.fcntl(arena.fd, fcntl.F_ADD_SEALS, SEALS)
        with self._lock:
            self._arenas[arena.key] = arena
            self._add(arena)

    def drop_arena(self, arena: Arena) -> None:
        with self._lock:
            self._arenas.pop(arena.key, None)
            if self._own is not None:
                self._own.drop_arena(arena)
            else:
                self._send({"op": "drop", "arena": arena.key})

    def encode(self, job: Job) -> None:
        with self._lock:
            if self._own is not None:
                self._own.encode(job)
            elif self._failure is not None:
                _end(job, self._failure)
            else:
                job.slot.pin()
                if not self._jobs:
                    self._heard_at = time.monotonic()
                self._jobs[id(job)] = job
                self._submit(job)

    def abandon(self, job: Job) -> None:
        with self._lock:
            if self._own is not None:
                self._own.abandon(job)
                return
            job.abandon()
            job.done.set()  # the service is not told: it has no more work of a run that ends

    def close(self) -> None:
        self._closing = True
        with self._lock:
            if self._connection is not None:
                shut_down(self._connection.socket)
        wait_for_thread(self._thread)
        if self._own is not None:
            self._own.close()

    def _add(self, arena: Arena) -> None:
        if self._own is not None:
            self._own.add_arena(arena)
            return
        # A description of its own, since it is what has the lock.
        lent = os.open(f"/proc/self/fd/{arena.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lent, fcntl.LOCK_SH)
            described = {"op": "arena", "arena": arena.key, "slots": arena.slots, "layout": asdict(arena.layout)}
            self._send(described, (lent,))
        finally:
            os.close(lent)

    def _submit(self, job: Job) -> None:
        place = {"job": id(job), "arena": job.slot.arena.key, "slot": job.slot.index, "texts": len(job.slot)}
        message = {"op": "encode", "chosen": None if job.chosen is None else len(job.chosen)} | place
        if job.borders is None:
            self._send(message)
            return
        # Too many for a message where partitions are small.
        with os.fdopen(os.memfd_create("surge-borders", os.MFD_CLOEXEC), "wb") as file:
            file.write(job.borders.astype(np.int64).tobytes())
            file.flush()
            self._send(message, (file.fileno(),))

    def _send(self, message: protocol.Message, descriptors: tuple[int, ...] = ()) -> None:
        # That the service has ended is noticed in one place only: where its messages are received.
        if self._connection is not None:
            with contextlib.suppress(OSError):
                protocol.send(self._connection.socket, message, descriptors)

    # Everything below runs in the thread.

    def _run(self) -> None:
        error: Exception = EncoderError("the encoder pool is closed")
        try:
            while self._connection is not None and not self._closing:
                try:
                    self._listen(self._connection)
                except Lost as lost:
                    self._recover(lost)
        except EncoderError as caught:
            error = caught.with_traceback(None)
        except BaseException as caught:
            log.exception("the thread of the remote workers failed")
            error = EncoderError(f"the encoder service cannot be used: {caught}")
        with self._lock:
            if self._own is None:
                self._fail(error)

    def _listen(self, connection: Connection) -> None:
        while not self._closing:
            message = connection.receive()
            with self._lock:
                if message is not None:
                    self._heard_at = time.monotonic()
                    self._take(message)
                elif self._jobs and time.monotonic() - self._heard_at > SILENCE_SECONDS:
                    raise Lost(f"the encoder service at {connection.path} was silent for {SILENCE_SECONDS:.0f} s")

    def _take(self, message: protocol.Message) -> None:
        job = self._jobs[message["job"]]
        if message["op"] == "progress":
            job.finished_rows = message["finished"]
            job.encoded.extend((start, stop) for start, stop in message["encoded"])
            return
        self._lost_at = None
        del self._jobs[message["job"]]
        job.slot.unpin()
        job.costs = Costs(**message["costs"])
        job.encode_seconds = message["seconds"]
        job.replays += message["replays"]
        self._replays += message["replays"]
        job.gpu_samples = [(rate, used) for rate, used in message["gpu"]]
        job.quarantine.failed = [FailedRow(row, reason) for row, reason in message["failed"]]
        _end(job, EncoderError(message["error"]) if message["error"] else None)

    def _recover(self, lost: Lost) -> None:
        """Goes on with another process of the service, or with workers of this one."""
        with self._lock:
            assert self._connection is not None
            self._connection.socket.close()
            self._connection = None
        if self._closing:
            return
        if self._lost_at is None:
            log.warning("%s; the run waits for it up to %.0f s", lost, self._patience_seconds)
            self._lost_at = time.monotonic()
        why, is_refused, deadline = str(lost), False, self._lost_at + self._patience_seconds
        while not self._closing:
            if not self._is_memory_ours():
                if time.monotonic() > deadline + SILENCE_SECONDS:
                    raise EncoderError(
                        f"{why}, and its processes still have the memory of this run, which they may write to. End "
                        "them, and run again"
                    )
            elif is_refused or time.monotonic() > deadline:
                log.warning("%s; the run goes on with workers of its own", why)
                self._go_on(None)
                return
            else:
                try:
                    self._go_on(self._connect(lambda: self._closing or time.monotonic() > deadline))
                    return
                except (Lost, Refused) as error:
                    why, is_refused = str(error), isinstance(error, Refused)
            rest(_LOOK_SECONDS, lambda: self._closing)

    def _is_memory_ours(self) -> bool:
        """Whether no other process can write to an arena any longer."""
        with self._lock:
            for arena in self._arenas.values():
                try:
                    fcntl.flock(arena.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return False
                fcntl.flock(arena.fd, fcntl.LOCK_UN)
        return True

    def _go_on(self, connection: Connection | None) -> None:
        """Gives the arenas and the unfinished jobs to the service, or to workers of this process."""
        with self._lock:
            self._connection = connection
            self._own = self._start_own() if connection is None else None
            for arena in self._arenas.values():
                self._add(arena)
            jobs, self._jobs = self._jobs, {}
            for job in jobs.values():
                if not job.done.is_set():
                    job.finished_rows = 0
                    job.encoded.clear()
                    job.replays += 1
                    self._replays += 1
                    self.encode(job)
                job.slot.unpin()

    def _fail(self, error: Exception) -> None:
        self._failure = error
        if self._connection is not None:
            self._connection.socket.close()
            self._connection = None
        for job in self._jobs.values():
            if not job.done.is_set():
                _end(job, error)
            job.slot.unpin()
        self._jobs.clear()


def _end(job: Job, error: Exception | None) -> None:
    job.error = error
    job.done.set()
