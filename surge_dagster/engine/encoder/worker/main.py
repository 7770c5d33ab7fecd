"""The worker process: loads one model, then turns rows of shared memory into vectors.

Three threads: the reader receives messages and tokenizes ahead, the main thread computes and
answers, and the third reports progress every second, so that the pool can distinguish a slow worker
from a hung one. It also ends the worker when the pool's process has ended in any way. Interrupts
and termination signals are ignored; the pool handles them. What a worker prints ends up in the
pool's error messages.
"""

from __future__ import annotations

import faulthandler
import logging
import mmap
import os
import queue
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from surge_dagster.engine.encoder import protocol
from surge_dagster.engine.encoder.protocol import SlotArrays, SlotLayout, slot_arrays
from surge_dagster.engine.encoder.worker.backends import (
    Backend,
    BackendSettings,
    BudgetedBackend,
    LaunchedPortion,
    QueuingBackend,
    Rows,
)
from surge_dagster.engine.encoder.worker.loading import load_backend, loaded_tokenizer
from surge_dagster.engine.errors import ConfigError, EndpointDown
from surge_dagster.engine.model.spec import Space, spec_from_json

_BEAT_SECONDS = 1.0
_LOOK_SECONDS = 0.02  # for another portion, while one waits for a server
_MAX_REPORT_CHARACTERS = 5_000


@dataclass(slots=True)
class _Work:
    """A received portion with the memory of its slot: the pool may drop an arena while a portion of
    it is still waiting here."""

    rows: Rows
    prepared: Any
    tokenize_seconds: float
    answered: _Answered


class _Answered:
    """Sends the pool which texts of a portion are answered before the others.

    Attributes:
        tokens: of these texts.
    """

    def __init__(self, send: Callable[[protocol.Message], None], encode: protocol.Message) -> None:
        self.tokens = 0
        self._send = send
        self._portion = [encode["arena"], encode["slot"], encode["start"]]

    def report(self, start: int, stop: int, tokens: int, reason: str) -> None:
        self.tokens += tokens
        message = {"op": "part", "portion": self._portion, "start": start, "stop": stop}
        self._send(message | {"tokens": tokens, "reason": reason})


class _Warnings(logging.Handler):
    """Sends the pool what this package warns of: a user sees a worker's output only if it fails."""

    def __init__(self, send: Callable[[protocol.Message], None]) -> None:
        super().__init__(logging.WARNING)
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()[:_MAX_REPORT_CHARACTERS]
        self._send({"op": "warning", "text": text})


class _PoolEnded(Exception):
    """The pool has closed the connection: no portion follows."""


class Worker:
    """The state of one worker; `run` returns its exit code when the pool stops it."""

    def __init__(self, connection: socket.socket, parent: int) -> None:
        self._connection = connection
        self._parent = parent
        self._sending = threading.Lock()
        self._progress = 0
        self._arenas: dict[int, list[SlotArrays]] = {}
        self._prepared: queue.SimpleQueue[_Work | BaseException] = queue.SimpleQueue()

    def run(self) -> int:
        logging.getLogger("surge_dagster").addHandler(_Warnings(self._send))
        threading.Thread(target=self._report_progress, daemon=True).start()
        first = protocol.receive(self._connection)
        if first is None:
            return 0
        try:
            backend = self._load(first[0])
        except BaseException as error:
            self._send(_report(error) | {"op": "refused"})
            return 1
        threading.Thread(target=self._read, args=(backend,), daemon=True).start()
        try:
            while True:
                self._encode_waiting(backend)
        except _PoolEnded:
            return 0
        except BaseException as failure:
            # The state of the device is unknown now: a new process takes over.
            self._send(_report(failure) | {"op": "failed"})
            return 1

    def _encode_waiting(self, backend: Backend) -> None:
        """Wait for a portion and answer it as soon as its vectors are there.

        While the device still works on it, launch the next waiting portion first, so that the
        device is never idle between the two. Return with nothing held: a waiting worker must not
        keep an arena that the pool has closed.
        """
        work = self._take_prepared()
        launched = self._launch(backend, work)
        while self._has_next(launched):
            waited_for = work, launched
            try:
                work = self._take_prepared()
                launched = self._launch(backend, work)
            finally:  # a failure of this portion must not lose the answer to the one before
                self._answer(*waited_for)
        self._answer(work, launched)

    def _has_next(self, launched: LaunchedPortion) -> bool:
        """Whether another portion comes before this one is done."""
        while self._prepared.empty() and launched.wait is not None and not launched.is_done():
            launched.wait(_LOOK_SECONDS)
            self._tick()
        return not launched.is_done() and not self._prepared.empty()

    def _take_prepared(self) -> _Work:
        """Wait for the next portion; raise what ended the reader, or went wrong in it."""
        work = self._prepared.get()
        if isinstance(work, BaseException):
            raise work
        return work

    def _launch(self, backend: Backend, work: _Work) -> LaunchedPortion:
        if isinstance(backend, QueuingBackend):
            return backend.launch(work.prepared, work.rows, self._tick)
        costs = backend.forward(work.prepared, work.rows, self._tick)
        return LaunchedPortion(is_done=lambda: True, finish=lambda: costs)

    def _answer(self, work: _Work, launched: LaunchedPortion) -> None:
        costs = launched.finish()
        costs = replace(
            costs,
            tokens=costs.tokens - work.answered.tokens,
            padded_tokens=costs.padded_tokens - work.answered.tokens,
            tokenize_seconds=work.tokenize_seconds,
        )
        # The worker takes the time, because the pool may read this answer late. All processes share
        # this clock.
        ended_at = time.monotonic()
        self._send({"op": "done", "costs": asdict(costs), "ended_at": ended_at})

    def _load(self, message: protocol.Message) -> Backend:
        space = Space(
            **message["space"] | {"requested": spec_from_json(message["space"]["requested"])}
        )
        settings = BackendSettings(**message["settings"])
        loaded = load_backend(space, settings, message["backend"])
        backend = loaded.backend
        saturation_tokens = 0
        if isinstance(backend, BudgetedBackend):
            saturation_tokens = backend.token_budget * backend.streams
        facts = {
            "backend": backend.name,
            "tokenizer": loaded_tokenizer(backend),
            "saturation_tokens": saturation_tokens,
            "truncation_side": getattr(backend, "truncation_side", ""),
        }
        self._send(
            {
                "op": "ready",
                "queues": isinstance(backend, QueuingBackend),
                "portion_texts": getattr(backend, "portion_texts", None),
                "detail": backend.detail,
                "calibration": loaded.calibration.name,
                "lowest_cosine": loaded.lowest_cosine,
                "notes": loaded.notes,
                "facts": facts,
            }
        )
        return backend

    def _read(self, backend: Backend) -> None:
        """Take messages until the connection ends, or an error, such as that of a portion's texts.

        The main thread reports it after its answers to the portions ahead.
        """
        end: BaseException = _PoolEnded()
        try:
            while (received := protocol.receive(self._connection)) is not None:
                self._take(backend, *received)
        except BaseException as error:  # a panic in Rust code is not an Exception
            end = error
        self._prepared.put(end)

    def _take(self, backend: Backend, message: protocol.Message, descriptors: list[int]) -> None:
        if message["op"] == "arena":
            layout = SlotLayout(**message["layout"])
            memory = mmap.mmap(descriptors[0], message["slots"] * layout.slot_bytes)
            os.close(descriptors[0])
            self._arenas[message["arena"]] = [
                slot_arrays(memory, layout, i) for i in range(message["slots"])
            ]
        elif message["op"] == "drop":
            self._arenas.pop(message["arena"], None)
        elif message["op"] == "encode":
            arrays = self._arenas[message["arena"]][message["slot"]]
            rows = np.arange(message["start"], message["stop"])
            if message["chosen"]:
                rows = arrays.chosen[rows].astype(np.intp)
            started = time.perf_counter()
            prepared = _prepare(backend, rows, arrays, message["holds_ids"])
            self._tick()
            answered = _Answered(self._send, message)
            results = Rows(arrays.matrix, arrays.truncated, rows, report=answered.report)
            self._prepared.put(_Work(results, prepared, time.perf_counter() - started, answered))

    def _tick(self) -> None:
        self._progress += 1

    def _report_progress(self) -> None:
        """Report while the pool's process lives; a fork of it may hold the connection open."""
        while os.getppid() == self._parent:
            time.sleep(_BEAT_SECONDS)
            self._send({"op": "beat", "progress": self._progress})
        os._exit(0)

    def _send(self, message: protocol.Message) -> None:
        try:
            with self._sending:
                protocol.send(self._connection, message)
        except OSError:
            os._exit(1)  # the pool has ended


def _prepare(backend: Any, rows: np.ndarray, arrays: SlotArrays, holds_ids: bool) -> Any:
    data = arrays.data
    starts = arrays.offsets[rows]
    stops = arrays.offsets[rows + 1]
    if holds_ids:
        return backend.prepare_ids(data, starts, stops)
    borders = zip(starts.tolist(), stops.tolist(), strict=True)
    return backend.prepare([str(data.data[start:stop], "utf-8") for start, stop in borders])


def _report(error: BaseException) -> protocol.Message:
    """Plain data, short enough for one message even if every character is escaped."""
    trace = "".join(traceback.format_exception(error))
    return {
        "type": type(error).__name__,
        "config": isinstance(error, ConfigError),
        "ends_pool": isinstance(error, ConfigError | EndpointDown),
        "message": str(error)[:_MAX_REPORT_CHARACTERS],
        "trace": trace[-_MAX_REPORT_CHARACTERS:],
    }


def main(arguments: list[str]) -> int:
    """Arguments: the descriptor of the socket, and the parent's process id."""
    connection, parent = (int(argument) for argument in arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Prints the stacks when a library crashes the process, or the pool aborts it because it hangs.
    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core would have gigabytes
    code = Worker(socket.socket(fileno=connection), parent).run()
    sys.stdout.flush()
    sys.stderr.flush()
    # The threads of numeric libraries can take seconds to end.
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
