"""The one thread that owns the workers: it spawns them, hands out chunks, and replaces those that die or hang.

Everything about workers and jobs is changed here and nowhere else, so there is nothing to lock: other threads put a
request into a queue and write one byte to wake this one up. It lives as long as the pool, because a process belongs to
the thread that spawned it in the eyes of the kernel's parent-death signals, and ends only when every worker has ended
or, when not even a kill ends it, was given up.

A worker that dies, raises, or shows no progress for too long is replaced by a new process, and its unfinished chunks
are done again, alone: `quarantine` finds the text that is the cause, if there is one. A seat that loses more than
`max_respawns` processes in a row for no such reason ends the pool, with the last words of the last one; so does the
first process of a seat that is not ready in time, or is refused its model.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from surge_dagster.engine.encoder import protocol
from surge_dagster.engine.encoder.arena import Arena
from surge_dagster.engine.encoder.calls import SMALLEST_CHUNK_WEIGHT, Chunk, Job
from surge_dagster.engine.encoder.gpu_gauge import GpuGauge
from surge_dagster.engine.encoder.quarantine import MAX_LOSSES
from surge_dagster.engine.encoder.worker_process import WorkerProcess, WorkerSeat
from surge_dagster.engine.errors import ConfigError, EncoderError
from surge_dagster.engine.support.child_process import how_it_ended
from surge_dagster.engine.support.waiting import wait_for_thread

log = logging.getLogger(__name__)

_TICK_SECONDS = 0.5
_CHUNKS_PER_WORKER = 2
_GRACE_SECONDS = 2.0
_TELL_SECONDS = 60.0
# A worker is given this many times what its chunk should take, on top of the timeout, before it counts as hanging.
_PATIENCE = 4
# How much of a worker's speed is what it was in its last chunk.
_NEWEST_WEIGHS = 0.5
# What a smaller chunk takes says more about messages than about the worker's speed.
_TELLING_WEIGHT = SMALLEST_CHUNK_WEIGHT // 8


class Dispatcher:
    """Runs the workers of one pool.

    Args:
        seats: one per worker.
        hang_timeout_seconds: how long a worker with work may show no progress, beyond what the work should take.
        start_timeout_seconds: how long loading the model may take.
        max_respawns: processes that a seat may lose in a row.
    """

    def __init__(
        self,
        seats: list[WorkerSeat],
        *,
        hang_timeout_seconds: float,
        start_timeout_seconds: float,
        max_respawns: int,
    ) -> None:
        self._seats = seats
        self._hang_timeout_seconds = hang_timeout_seconds
        self._start_timeout_seconds = start_timeout_seconds
        self._max_respawns = max_respawns
        self._requests: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_reader, selectors.EVENT_READ, None)
        self._workers: dict[int, WorkerProcess] = {}
        self._losses: dict[int, int] = {seat.index: 0 for seat in seats}
        self._rates: dict[int, float] = {}  # weight per second of each seat, once it has finished a chunk
        self._budgets: dict[int, int] = {}  # token budgets that a lack of memory has lowered
        self._numbers = itertools.count()
        self._backend: str | None = None  # what "auto" has chosen
        self._gauge = GpuGauge([seat.device for seat in seats])
        self._jobs: deque[Job] = deque()
        self._arenas: dict[int, tuple[int, Arena]] = {}
        self._stopping = False
        self._ended = False
        self._asking = threading.Lock()
        self.replays = 0
        self.failure: Exception | None = None
        self.ready_messages: dict[int, protocol.Message] = {}
        self.started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="surge-encoder-pool", daemon=True)
        self._thread.start()

    # Called from other threads.

    def encode(self, job: Job) -> None:
        """Hands a job in; its `done` is set when it is finished or has failed."""
        self._ask(lambda: self._accept(job))

    def abandon(self, job: Job) -> None:
        """Ends a job with what it has; chunks that are under way are finished, and keep the slot until then."""
        self._ask(lambda: self._withdraw(job, None))

    def add_arena(self, arena: Arena) -> None:
        """Makes an arena known: workers get its memory before their first chunk of it."""
        # A duplicate: the arena may be closed while a worker still has to be told about it.
        descriptor = os.dup(arena.fd)
        self._ask(lambda: self._know(descriptor, arena))

    def drop_arena(self, arena: Arena) -> None:
        """Lets the workers forget an arena."""
        self._ask(lambda: self._forget(arena.key))

    def worker_pids(self) -> list[int]:
        """Process ids of the workers that run now, by seat."""
        return [worker.pid for _, worker in sorted(self._workers.items())]

    def close(self) -> None:
        """Ends all workers and then the thread; jobs that are not finished fail. Harmless when called twice."""
        if self._thread.is_alive():
            self._ask(self._stop)
            wait_for_thread(self._thread)

    def _ask(self, request: Callable[[], None]) -> None:
        with self._asking:
            if self._ended:
                # No thread is left that this one could get in the way of.
                request()
                return
            self._requests.put(request)
            with contextlib.suppress(BlockingIOError):  # a full buffer has woken the thread already
                self._wake_writer.send(b"\0")

    # Everything below runs in the dispatcher's own thread.

    def _run(self) -> None:
        try:
            for seat in self._seats:
                self._spawn(seat)
            while not self._stopping:
                for key, _ in self._selector.select(_TICK_SECONDS):
                    self._serve(key)
                self._serve_requests()
                self._replace_hung()
                if self.failure is None:
                    self._hand_out()
                if self._jobs and (sample := self._gauge.sample()) is not None:
                    self._jobs[0].gpu_samples.append(sample)
        except BaseException as error:
            log.exception("the encoder pool's own thread failed")
            self._fail(EncoderError(f"the encoder pool failed inside: {error!r}"))
        finally:
            self._end_all()

    def _serve(self, key: selectors.SelectorKey) -> None:
        if key.data is None:
            with contextlib.suppress(BlockingIOError):
                self._wake_reader.recv(4096)
            return
        worker: WorkerProcess = key.data
        if self._workers.get(worker.seat.index) is not worker:
            return  # it was lost earlier in this round
        if key.fileobj is worker.output:
            if not worker.read_output():
                self._selector.unregister(worker.output)
            return
        received = protocol.receive(worker.connection)
        if received is None:
            self._lose(worker, None)
        else:
            self._hear(worker, received[0])

    def _serve_requests(self) -> None:
        while True:
            try:
                request = self._requests.get_nowait()
            except queue.Empty:
                return
            request()

    def _spawn(self, seat: WorkerSeat) -> None:
        worker = WorkerProcess(seat, self._budgets.get(seat.index), self._backend)
        self._workers[seat.index] = worker
        self._selector.register(worker.connection, selectors.EVENT_READ, worker)
        self._selector.register(worker.output, selectors.EVENT_READ, worker)

    def _hear(self, worker: WorkerProcess, message: protocol.Message) -> None:
        if message["op"] == "beat":
            worker.note_progress(message["progress"])
            return
        worker.note_progress()
        if message["op"] == "ready":
            worker.ready = True
            self._backend = self._backend or message["backend"]
            self.ready_messages.setdefault(worker.seat.index, message)
            if len(self.ready_messages) == len(self._seats):
                self.started.set()
        elif message["op"] == "returned":
            self._take_back(worker, message["chunk"])
        elif message["op"] == "done":
            self._finish(worker, message["chunk"], message["metrics"])
        elif message["op"] == "refused":
            if message["config"]:
                self._fail(ConfigError(message["message"]))
            elif worker.seat.index in self.ready_messages:
                self._lose(worker, message)  # it has worked before: what fails now may pass
            else:
                self._fail(EncoderError(_report(worker, message)))
        elif message["op"] == "failed":
            self._lose(worker, message)

    def _finish(self, worker: WorkerProcess, number: int, metrics: dict[str, Any]) -> None:
        """Takes in one of a worker's chunks."""
        seat = worker.seat.index
        self._losses[seat] = 0
        chunk = worker.take(number)
        now = time.monotonic()
        if chunk.weight >= _TELLING_WEIGHT:
            rate = chunk.weight / max(now - worker.head_since, 1e-6)
            self._rates[seat] = _NEWEST_WEIGHS * rate + (1 - _NEWEST_WEIGHS) * self._rates.get(seat, rate)
        worker.head_since = now
        budget = metrics.pop("token_budget", 0)
        if 0 < budget < self.ready_messages[seat].get("token_budget", 0):
            self._budgets[seat] = budget
        chunk.job.add(chunk, metrics)
        self._put_down(chunk)

    def _lose(self, worker: WorkerProcess, report: protocol.Message | None, reason: str = "") -> None:
        """Takes leave of a process and gives its seat and its chunks to a new one."""
        self._unregister(worker)
        index = worker.seat.index
        del self._workers[index]
        chunks, worker.assigned = worker.assigned, []
        # One that was found to hang, or was killed with the pool, is not waited for.
        code = worker.end(0 if reason or self.failure is not None else _GRACE_SECONDS)
        if self.failure is not None:
            for chunk in chunks:
                chunk.job.slot.unpin()
            return
        ended = reason or how_it_ended(code)
        alone = len(chunks) == 1 and chunks[0].quarantined is not None
        # A worker that has just shown that it can encode, and ends over one chunk, is not to blame.
        self._losses[index] += not alone
        losses = self._losses[index]
        why = _report(worker, report) if report else f"worker {worker.pid} on {worker.seat.device} ended: {ended}"
        summary = why.splitlines()[0]
        for chunk in chunks:
            chunk.job.lose(chunk, summary)
            self._put_down(chunk)
        where = f"\nIt was at work on rows {chunks[0].start} to {chunks[0].stop} of its SuperBatch." if chunks else ""
        if losses > self._max_respawns:
            self._fail(EncoderError(worker.with_last_words(f"{why} ({losses} times in a row; giving up){where}")))
            return
        for job in {chunk.job for chunk in chunks if chunk.job.quarantine.losses > MAX_LOSSES}:
            too_many = f"{why} ({MAX_LOSSES} workers in one SuperBatch)"
            self._withdraw(job, EncoderError(worker.with_last_words(too_many)))
        again = sum(not chunk.job.abandoned for chunk in chunks)
        self.replays += again
        log.warning("%s; replaced, and %d chunks are done again", summary, again)
        self._spawn(worker.seat)

    def _put_down(self, chunk: Chunk) -> None:
        """A chunk is no longer with a worker."""
        chunk.job.slot.unpin()
        self._complete(chunk.job)

    def _complete(self, job: Job) -> None:
        if not job.finished or job.done.is_set():
            return
        self._end(job)

    def _end(self, job: Job) -> None:
        """A job is over; from now on the time belongs to those that came after it."""
        now = time.monotonic()
        if job.started_at is not None:
            job.encode_seconds = now - job.started_at
        place = self._jobs.index(job)
        for later in itertools.islice(self._jobs, place + 1, None):
            if later.started_at is not None:
                later.started_at = now
        del self._jobs[place]
        job.done.set()

    def _replace_hung(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers.values()):
            if worker.ready and not worker.assigned:
                continue
            limit = self._patience(worker)
            if now - worker.moved_at > limit:
                # One in each round: to end it may take seconds, and requests are not to wait for all of them.
                self._end_hung(worker, limit)
                return
            if not worker.ready and now - worker.told_at > _TELL_SECONDS:
                worker.told_at = now
                log.info("worker %d on %s is still loading the model", worker.pid, worker.seat.device)

    def _end_hung(self, worker: WorkerProcess, limit: float) -> None:
        worker.ask_where()
        if self.failure is None and worker.seat.index not in self.ready_messages:
            # Nothing says that another one would fare better, and somebody waits for the pool to start.
            why = (
                f"worker {worker.pid} on {worker.seat.device} was not ready after {limit:.0f} s; giving up. See "
                "whether the device and the model's files answer; if they are only slow, run again"
            )
            self._fail(EncoderError(worker.with_last_words(why)))
            return
        self._lose(worker, None, f"it showed no progress for {limit:.0f} s and was killed")
        log.warning("%s", worker.with_last_words(f"worker {worker.pid} hung"))

    def _patience(self, worker: WorkerProcess) -> float:
        """Seconds without progress after which a worker counts as hanging: the more it has to do, the longer."""
        if not worker.ready:
            return self._start_timeout_seconds
        rate = self._rates.get(worker.seat.index)
        expected = worker.assigned[0].weight / rate if rate else 0.0
        return self._hang_timeout_seconds + _PATIENCE * expected

    def _accept(self, job: Job) -> None:
        if self.failure is not None:
            job.error = self.failure
            job.done.set()
        else:
            self._jobs.append(job)

    def _hand_out(self) -> None:
        """Gives chunks to workers, one each before anyone gets a second one."""
        for depth in range(1, _CHUNKS_PER_WORKER + 1):
            for worker in list(self._workers.values()):
                if worker.ready and len(worker.assigned) < depth and not self._give(worker) and depth == 1:
                    self._ask_for_work()

    def _next_chunk(self, worker: WorkerProcess) -> Chunk | None:
        """From the oldest job that has work; the next job's rows follow at once, so no worker waits in between."""
        if worker.assigned and worker.assigned[0].quarantined is not None:
            return None
        for job in list(self._jobs):
            if not worker.assigned and job.quarantine:
                chunk = job.take_quarantined()
                self._complete(job)  # the suspects may all have been rows that are no longer needed
                if chunk is not None:
                    return chunk
            if (chunk := job.take(self._share(worker), len(self._seats))) is not None:
                return chunk
        return None

    def _share(self, worker: WorkerProcess) -> float:
        """The part of the pool's speed that this worker has had so far; equal parts until that is known."""
        known = list(self._rates.values())
        typical = sum(known) / len(known) if known else 1.0
        return self._rates.get(worker.seat.index, typical) / sum(
            self._rates.get(seat.index, typical) for seat in self._seats
        )

    def _ask_for_work(self) -> None:
        """A worker has nothing to do: what the busiest one has not begun is asked back for it."""
        waiting = [
            (worker.assigned[1].weight / self._share(worker), worker)
            for worker in self._workers.values()
            if len(worker.assigned) > 1 and not worker.assigned[1].asked_back
        ]
        if waiting:
            _, busiest = max(waiting, key=lambda found: found[0])
            self._ask_back(busiest, busiest.assigned[1])

    def _ask_back(self, worker: WorkerProcess, chunk: Chunk) -> None:
        chunk.asked_back = True
        with contextlib.suppress(OSError):
            protocol.send(worker.connection, {"op": "return", "chunk": chunk.number})

    def _take_back(self, worker: WorkerProcess, number: int) -> None:
        chunk = worker.take(number)
        chunk.job.take_back(chunk)
        self._put_down(chunk)

    def _give(self, worker: WorkerProcess) -> bool:
        """Gives a worker its next chunk; False when there is none for it."""
        chunk = self._next_chunk(worker)
        if chunk is None:
            return False
        arena_id = chunk.job.slot.arena.key
        known = self._arenas.get(arena_id)
        if known is None:
            self._withdraw(chunk.job, EncoderError("the arena was closed while one of its slots was being encoded"))
            return True
        descriptor, arena = known
        if not worker.assigned:
            worker.note_progress()
            worker.head_since = worker.moved_at
        if chunk.job.started_at is None:
            chunk.job.started_at = time.monotonic()
        chunk.number = next(self._numbers)
        worker.assigned.append(chunk)
        chunk.job.slot.pin()
        try:
            if arena_id not in worker.known_arenas:
                worker.known_arenas.add(arena_id)
                described = {"op": "arena", "arena": arena_id, "slots": arena.slots, "layout": arena.layout.to_json()}
                protocol.send(worker.connection, described, (descriptor,))
            work = {"op": "encode", "arena": arena_id, "slot": chunk.job.slot.index, "chunk": chunk.number}
            protocol.send(worker.connection, work | {"start": chunk.start, "stop": chunk.stop})
        except OSError:
            pass  # it has died; the end of its connection is the next thing to be read
        return True

    def _know(self, descriptor: int, arena: Arena) -> None:
        if self._ended:
            os.close(descriptor)
        else:
            self._arenas[arena.key] = (descriptor, arena)

    def _forget(self, arena_id: int) -> None:
        known = self._arenas.pop(arena_id, None)
        if known is None:
            return
        os.close(known[0])
        for worker in self._workers.values():
            if arena_id in worker.known_arenas:
                worker.known_arenas.discard(arena_id)
                with contextlib.suppress(OSError):
                    protocol.send(worker.connection, {"op": "drop", "arena": arena_id})

    def _stop(self) -> None:
        self._stopping = True
        if self.failure is None:
            self.failure = EncoderError("the encoder pool is closed")

    def _fail(self, error: Exception) -> None:
        """The end: every job and whoever waits for the start gets the error."""
        if self.failure is None:
            self.failure = error
        for worker in self._workers.values():
            worker.kill()
        for job in list(self._jobs):
            self._withdraw(job, self.failure)
        self.started.set()

    def _withdraw(self, job: Job, error: Exception | None) -> None:
        """Hands out nothing more of a job, and ends it with `error`."""
        job.abandon()
        for worker in self._workers.values():
            for chunk in worker.assigned[1:]:
                if chunk.job is job and not chunk.asked_back:
                    self._ask_back(worker, chunk)
        if job in self._jobs:
            job.error = error
            self._end(job)

    def _unregister(self, worker: WorkerProcess) -> None:
        for source in (worker.connection, worker.output):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(source)

    def _end_all(self) -> None:
        for worker in self._workers.values():
            self._unregister(worker)
            if worker.assigned or not worker.ready:
                worker.kill()
                continue
            with contextlib.suppress(OSError):
                protocol.send(worker.connection, {"op": "stop"})
        # All are killed before it is waited for any that a kill does not end: those waits are then one.
        deadline = time.monotonic() + _GRACE_SECONDS
        for worker in self._workers.values():
            if worker.wait(deadline - time.monotonic()) is None:
                worker.kill()
        for worker in self._workers.values():
            worker.end(0)
            for chunk in worker.assigned:
                chunk.job.slot.unpin()
        self._workers.clear()
        self._fail(EncoderError("the encoder pool is closed"))
        with self._asking:
            self._ended = True
        self._serve_requests()
        for arena_key in list(self._arenas):
            self._forget(arena_key)
        self._selector.close()
        self._wake_reader.close()
        self._wake_writer.close()


def _report(worker: WorkerProcess, report: dict[str, Any]) -> str:
    return (
        f"worker {worker.pid} on {worker.seat.device} failed with {report['type']}: {report['message']}\n"
        f"{report['trace']}"
    )
