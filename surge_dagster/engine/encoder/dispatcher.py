"""The thread that owns the workers of a pool: it starts them, assigns portions, and replaces them.

Only this thread changes workers and calls, so nothing is locked: other threads put a request into a
queue and wake it. It ends only when every worker has ended or, where even SIGKILL
does not end one, was given up.

A worker that dies, fails, or shows no progress for too long is replaced, and its unfinished
portions go into quarantine, where they are encoded alone. A seat that loses more than
`max_respawns` processes in a row without such a portion ends the pool, with the last output of the
last process; so does a first process that is not ready in time or refuses.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import selectors
import signal
import threading
import time
from collections.abc import Callable

from surge_dagster.engine.encoder import protocol
from surge_dagster.engine.encoder.arena import Arena
from surge_dagster.engine.encoder.metrics import Costs
from surge_dagster.engine.encoder.quarantine import MAX_LOSSES
from surge_dagster.engine.encoder.schedule import (
    PORTIONS_PER_WORKER,
    EncodeCall,
    Portion,
    Schedule,
)
from surge_dagster.engine.encoder.worker_process import WorkerProcess, WorkerSeat, describe_exit
from surge_dagster.engine.errors import ConfigError, EncoderError, EndpointDown, SurgeError
from surge_dagster.engine.support.waiting import wait_for_thread

log = logging.getLogger(__name__)

_TICK_SECONDS = 0.5
_START_TIMEOUT_SECONDS = 900.0  # to load the model
_GRACE_SECONDS = 2.0


class Dispatcher:
    """Runs the workers of one pool, one per seat.

    Args:
        hang_timeout_seconds, max_respawns: see `EncoderPool`.

    Attributes:
        started: set when every seat had a ready worker, or when the pool has failed.
        ready_messages: the first one of each seat.
        failure: the error that ended the pool.
    """

    def __init__(
        self, seats: list[WorkerSeat], hang_timeout_seconds: float, max_respawns: int
    ) -> None:
        self._seats = seats
        self._hang_timeout_seconds = hang_timeout_seconds
        self._max_respawns = max_respawns
        self._requests: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = os.eventfd(0)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ, None)
        self._workers: dict[int, WorkerProcess] = {}
        self._losses: dict[int, int] = {seat.index: 0 for seat in seats}
        self._schedule = Schedule()
        self._stopping = False
        self._ended = False
        self._posting = threading.Lock()
        self.failure: Exception | None = None
        self.ready_messages: dict[int, protocol.Message] = {}
        self.started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="surge-encoder-pool", daemon=True)
        self._thread.start()

    # Called from other threads.

    def encode(self, call: EncodeCall) -> None:
        """Starts a call; its `done` is set at its end."""
        self._post(lambda: self._accept(call))

    def abandon(self, call: EncodeCall) -> None:
        """Ends a call early; workers finish their portions, which keep the slot until then."""
        self._post(lambda: self._cancel(call, None))

    def drop_arena(self, arena: Arena) -> None:
        """Closes the file of a closed arena, which this thread may be sending to a worker."""
        self._post(lambda: self._drop_arena(arena))

    def worker_pids(self) -> list[int]:
        """Of the running workers, by seat."""
        return [worker.pid for _, worker in sorted(self._workers.items())]

    def ready_workers(self) -> int:
        return sum(worker.ready for worker in list(self._workers.values()))

    def close(self) -> None:
        """Ends all workers and then the thread; unfinished calls fail."""
        if self._thread.is_alive():
            self._post(self._stop)
            wait_for_thread(self._thread)

    def _post(self, request: Callable[[], None]) -> None:
        with self._posting:
            if self._ended:
                request()  # the dispatcher's thread has ended, so this one may change its state
                return
            self._requests.put(request)
            os.eventfd_write(self._wake, 1)

    # Everything below runs in the dispatcher's own thread.

    def _run(self) -> None:
        try:
            for seat in self._seats:
                self._spawn(seat)
            while not self._stopping:
                for key, _ in self._selector.select(_TICK_SECONDS):
                    self._read(key)
                self._serve_requests()
                self._replace_hung()
                if self.failure is None:
                    self._assign_portions()
        except BaseException as error:
            log.exception("the encoder pool's own thread failed")
            self._fail(EncoderError(f"the encoder pool failed inside: {error!r}"))
        finally:
            self._shut_down()

    def _read(self, key: selectors.SelectorKey) -> None:
        if key.data is None:
            os.eventfd_read(self._wake)
            return
        worker: WorkerProcess = key.data
        if self._workers.get(worker.seat.index) is not worker:
            return  # it was lost earlier in this round
        if key.fileobj is worker.output:
            if worker.read_output() == b"":
                self._selector.unregister(worker.output)
            return
        received = protocol.receive(worker.connection)
        if received is None:
            self._replace(worker, None)
        else:
            self._handle(worker, received[0])

    def _serve_requests(self) -> None:
        while not self._requests.empty():
            self._requests.get()()

    def _accept(self, call: EncodeCall) -> None:
        if self.failure is not None:
            call.error = self.failure
            call.done.set()
        else:
            self._schedule.calls.append(call)

    def _drop_arena(self, arena: Arena) -> None:
        os.close(arena.fd)
        for worker in self._workers.values():
            worker.drop_arena(arena.key)

    def _stop(self) -> None:
        self._stopping = True

    # Messages of workers.

    def _handle(self, worker: WorkerProcess, message: protocol.Message) -> None:
        if message["op"] == "beat":
            worker.note_progress(message["progress"])
            return
        worker.note_progress()
        if message["op"] == "ready":
            worker.ready = True
            worker.queues = message["queues"]
            worker.portion_texts = message["portion_texts"]
            self.ready_messages.setdefault(worker.seat.index, message)
            if len(self.ready_messages) == len(self._seats):
                self.started.set()
        elif message["op"] == "part":
            portion = worker.portion_of(message["portion"])
            start, stop = message["start"], message["stop"]
            portion.call.add_part(portion, start, stop, message["tokens"], message["reason"])
        elif message["op"] == "warning":
            log.warning("%s", message["text"])
        elif message["op"] == "done":
            portion = worker.assigned.pop(0)
            self._losses[worker.seat.index] = 0
            costs = Costs(**message["costs"])
            portion.call.add(portion, costs, message["ended_at"])
            self._release(portion)
        elif message["op"] == "refused":
            if message["ends_pool"]:
                self._fail(_final_error(message))
            elif worker.seat.index in self.ready_messages:
                # the seat has worked before: the cause may be temporary
                self._replace(worker, message)
            else:
                self._fail(EncoderError(_failure_text(worker, message)))
        elif message["op"] == "failed":
            if message["ends_pool"]:
                self._fail(_final_error(message))
            else:
                self._replace(worker, message)

    def _release(self, portion: Portion) -> None:
        portion.call.slot.unpin()
        self._schedule.end_if_finished(portion.call)

    # Work for workers.

    def _assign_portions(self) -> None:
        """Sends portions to workers, one to each before any worker gets a second one."""
        # a backend that queues its work (`QueuingBackend`) takes one more
        for depth in range(1, PORTIONS_PER_WORKER + 2):
            for worker in list(self._workers.values()):
                full = len(worker.assigned) >= min(depth, PORTIONS_PER_WORKER + worker.queues)
                if not worker.ready or full or _takes_no_second(worker):
                    continue
                idle = not worker.assigned
                portion = self._schedule.next_portion(
                    idle=idle, is_queue=worker.queues, most_texts=worker.portion_texts
                )
                if portion is not None:
                    self._assign(worker, portion)

    def _assign(self, worker: WorkerProcess, portion: Portion) -> None:
        if portion.call.slot.arena.is_closed:
            self._cancel(
                portion.call,
                EncoderError("the arena was closed while one of its slots was being encoded"),
            )
        else:
            worker.assign(portion)

    def _cancel(self, call: EncodeCall, error: Exception | None) -> None:
        """Workers still finish the portions that they have."""
        call.drop_rest()
        self._schedule.end(call, error)

    # Supervision: start, loss and end of workers.

    def _spawn(self, seat: WorkerSeat) -> None:
        worker = WorkerProcess(seat)
        self._workers[seat.index] = worker
        self._selector.register(worker.connection, selectors.EVENT_READ, worker)
        self._selector.register(worker.output, selectors.EVENT_READ, worker)

    def _replace(
        self, worker: WorkerProcess, report: protocol.Message | None, hung: str = ""
    ) -> None:
        """Quarantine the portions of a lost process and start another one.

        Args:
            report: the process's own message.
            hung: why it was found to hang.
        """
        portions = worker.assigned
        code = self._end(worker)
        if self.failure is not None:
            for portion in portions:
                portion.call.slot.unpin()
            return

        index = worker.seat.index
        # A worker that has just proved that it can encode, and ends over one quarantined portion,
        # is not the cause.
        if len(portions) != 1 or portions[0].quarantined is None:
            self._losses[index] += 1
        reason = f"{worker.name} ended: {hung or describe_exit(code)}"
        if report:
            reason = _failure_text(worker, report)
        summary = reason.splitlines()[0]
        was_killed = code == -signal.SIGKILL and not hung and not report
        for portion in portions:
            portion.call.lose(portion, summary, was_killed=was_killed)
            self._release(portion)

        if self._losses[index] > self._max_respawns:
            self._give_up(worker, reason, portions)
            return
        for call in {portion.call for portion in portions}:
            if call.quarantine.losses > MAX_LOSSES:
                many = f"{reason} ({MAX_LOSSES} workers in one SuperBatch)"
                self._cancel(call, EncoderError(worker.with_output(many)))
        again = sum(not portion.call.abandoned for portion in portions)
        log.warning("%s; it is replaced, and %d portions are encoded again", summary, again)
        self._spawn(worker.seat)

    def _end(self, worker: WorkerProcess) -> int | None:
        """Take a worker out of the pool, and return its exit code."""
        self._unregister(worker)
        del self._workers[worker.seat.index]
        worker.assigned = []
        # A process that was killed with the pool gets no time to end by itself.
        return worker.end(0 if self.failure is not None else _GRACE_SECONDS)

    def _give_up(self, worker: WorkerProcess, reason: str, portions: list[Portion]) -> None:
        many = f"{reason} ({self._losses[worker.seat.index]} times in a row; giving up)"
        if portions:
            rows = f"{portions[0].start} to {portions[0].stop}"
            many += f"\nIt was encoding rows {rows} of its SuperBatch."
        self._fail(EncoderError(worker.with_output(many)))

    def _replace_hung(self) -> None:
        now = time.monotonic()
        for worker in list(self._workers.values()):
            if worker.ready and not worker.assigned:
                continue
            limit = self._hang_timeout_seconds if worker.ready else _START_TIMEOUT_SECONDS
            if now - worker.moved_at > limit:
                # One per round: ending it may take seconds, and requests must not wait for several.
                self._end_hung(worker, limit)
                return

    def _end_hung(self, worker: WorkerProcess, limit: float) -> None:
        worker.abort()
        if self.failure is None and worker.seat.index not in self.ready_messages:
            # Another process would most likely hang too, and a caller waits for the pool to start.
            self._end(worker)
            reason = (
                f"{worker.name} was not ready after {limit:.0f} s; giving up. Check "
                "whether the device and the model's files answer; if they are only slow, run again"
            )
            self._fail(EncoderError(worker.with_output(reason)))
            return
        self._replace(worker, None, hung=f"it showed no progress for {limit:.0f} s and was killed")
        log.warning("%s", worker.with_output(f"worker {worker.pid} hung"))

    def _fail(self, error: Exception) -> None:
        """Ends the pool: every call, and the thread that waits for the start, gets the error."""
        if self.failure is None:
            self.failure = error
        for call in list(self._schedule.calls):
            self._cancel(call, self.failure)
        self.started.set()
        for worker in self._workers.values():
            worker.process.kill()

    def _unregister(self, worker: WorkerProcess) -> None:
        for source in (worker.connection, worker.output):
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(source)

    def _shut_down(self) -> None:
        # Kills all workers before it waits for one, so the waits for those that SIGKILL does not
        # end run side by side.
        self._fail(EncoderError("the encoder pool is closed"))
        try:
            for worker in self._workers.values():
                self._unregister(worker)
                worker.end(0)
                for portion in worker.assigned:
                    portion.call.slot.unpin()
        finally:
            # Whatever happened above, no later request may wait for this thread.
            self._workers.clear()
            with self._posting:
                self._ended = True
            self._serve_requests()
            self._selector.close()
            os.close(self._wake)


def _takes_no_second(worker: WorkerProcess) -> bool:
    """Whether the worker's first portion may end it, or may never end."""
    return any(
        portion.quarantined is not None or portion.call.abandoned for portion in worker.assigned[:1]
    )


def _final_error(report: protocol.Message) -> SurgeError:
    """Return the error of a worker after which another worker would fail, too."""
    if report["config"]:
        return ConfigError(report["message"])
    return EndpointDown(report["message"])


def _failure_text(worker: WorkerProcess, report: protocol.Message) -> str:
    return f"{worker.name} failed with {report['type']}: {report['message']}\n{report['trace']}"
