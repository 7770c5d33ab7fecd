"""The other side of the process border: loads one model, then turns rows of shared memory into vectors, until told.

Three threads: the reader takes messages and tokenizes ahead, the main thread computes and answers, and a third reports
every second how far the work has come, so that the pool can tell a slow worker from one that hangs. A fourth waits for
the end of a pipe that only the pool's process holds open: when that process goes, however it goes, the worker goes
too. Interrupts and termination signals sent to the whole group are the pool's business and are ignored here.

An exception is answered as plain data, never pickled; what a worker prints ends up in the pool's error messages.
"""

from __future__ import annotations

import faulthandler
import itertools
import mmap
import os
import queue
import socket
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from surge_dagster.engine.encoder import protocol
from surge_dagster.engine.encoder.layout import SlotArrays, SlotLayout, slot_arrays
from surge_dagster.engine.encoder.worker.backends.base import Backend, BackendSettings
from surge_dagster.engine.encoder.worker.loading import load_backend
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import EncodingSpec, Space
from surge_dagster.engine.support.child_process import leave_signals_to_parent, wait_for_parents_end

_BEAT_SECONDS = 1.0
_LONGEST_REPORT = 5_000
_HARMLESS = "a text"


@dataclass(slots=True)
class _Work:
    """A chunk that was received: where it lies, and what the tokenizer made of it or the error that it ended with.

    It holds its slot's arrays itself: the pool may forget an arena while a chunk of it is still waiting here.
    """

    chunk: int
    rows: slice
    arrays: SlotArrays
    prepared: Any = None
    error: BaseException | None = None


class Worker:
    """One worker's state; `run` returns when the pool says stop."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._progress = 0
        self._arenas: dict[int, list[SlotArrays]] = {}
        # Chunks that were received and not begun: whoever takes a number out decides whether it is encoded or returned.
        self._waiting: set[int] = set()
        self._choosing = threading.Lock()
        self._prepared: queue.SimpleQueue[_Work | BaseException | None] = queue.SimpleQueue()

    def run(self) -> int:
        first = protocol.receive(self._connection)
        if first is None:
            return 0
        threading.Thread(target=self._report_progress, daemon=True).start()
        try:
            backend = self._load(first[0])
        except BaseException as error:
            self._send(_report(error) | {"op": "refused"})
            return 1
        threading.Thread(target=self._read, args=(backend,), daemon=True).start()
        try:
            while (work := self._prepared.get()) is not None:
                if isinstance(work, BaseException):
                    raise work
                if self._begin(work.chunk):
                    metrics = self._forward(backend, work)
                    self._send({"op": "done", "chunk": work.chunk, "metrics": metrics})
                work = None  # while it waits for more it must not hold an arena that the pool has closed
        except BaseException as failure:
            # What is left of the device's state is unknown: a fresh process takes over.
            self._send(_report(failure) | {"op": "failed"})
            return 1
        return 0

    def _begin(self, chunk: int) -> bool:
        """Whether a chunk is still this worker's; from now on it cannot be given back."""
        with self._choosing:
            waits = chunk in self._waiting
            self._waiting.discard(chunk)
        return waits

    def _load(self, message: protocol.Message) -> Backend:
        space = Space(requested=EncodingSpec(**message["requested"]), **message["space"])
        settings = BackendSettings(**message["settings"])
        started = time.perf_counter()
        loaded = load_backend(space, settings, message["backend"], message["check_parity"])
        self._prove(loaded.backend, space)
        ready = {
            "op": "ready",
            "backend": loaded.backend.name,
            "detail": loaded.backend.detail,
            "token_budget": getattr(loaded.backend, "token_budget", 0),
            "lowest_cosine": loaded.lowest_cosine,
            "notes": loaded.notes,
            "load_seconds": time.perf_counter() - started,
        }
        self._send(ready)
        return loaded.backend

    def _prove(self, backend: Backend, space: Space) -> None:
        """Encodes one text, so that whoever is ready is known to work: what ends it later is what it was given."""
        prepared = backend.prepare([_HARMLESS], self._tick)
        backend.forward(prepared, np.empty((1, space.dimension), space.dtype), np.empty(1, np.uint8), self._tick)

    def _read(self, backend: Backend) -> None:
        """Takes messages until there are no more; whatever goes wrong here reaches the main thread, which answers."""
        end: BaseException | None = None
        try:
            self._read_all(backend)
        except BaseException as error:
            end = error
        self._prepared.put(end)

    def _read_all(self, backend: Backend) -> None:
        while (received := protocol.receive(self._connection)) is not None and self._take(backend, *received):
            pass

    def _take(self, backend: Backend, message: protocol.Message, descriptors: list[int]) -> bool:
        """Does what a message says; False when it says stop."""
        if message["op"] == "arena":
            layout = SlotLayout(**message["layout"])
            memory = mmap.mmap(descriptors[0], message["slots"] * layout.slot_bytes)
            os.close(descriptors[0])
            self._arenas[message["arena"]] = [slot_arrays(memory, layout, i) for i in range(message["slots"])]
        elif message["op"] == "drop":
            self._arenas.pop(message["arena"], None)
        elif message["op"] == "return":
            self._give_back(message["chunk"])
        elif message["op"] == "encode":
            arrays = self._arenas[message["arena"]][message["slot"]]
            work = _Work(message["chunk"], slice(message["start"], message["stop"]), arrays)
            self._waiting.add(work.chunk)
            # An error of this chunk's texts must not be told before the answers to the chunks ahead of it.
            try:
                work.prepared = backend.prepare(_texts(work), self._tick)
            except BaseException as error:  # a panic of the tokenizer's Rust code is no Exception
                work.error = error
            self._prepared.put(work)
        return message["op"] != "stop"

    def _give_back(self, chunk: int) -> None:
        """Returns a chunk that waits, and says nothing where that is too late."""
        if self._begin(chunk):
            self._send({"op": "returned", "chunk": chunk})

    def _forward(self, backend: Backend, work: _Work) -> dict[str, Any]:
        if work.error is not None:
            raise work.error
        matrix, truncated = work.arrays.matrix[work.rows], work.arrays.truncated[work.rows]
        return asdict(backend.forward(work.prepared, matrix, truncated, self._tick))

    def _tick(self) -> None:
        self._progress += 1

    def _report_progress(self) -> None:
        while True:
            time.sleep(_BEAT_SECONDS)
            self._send({"op": "beat", "progress": self._progress})

    def _send(self, message: protocol.Message) -> None:
        try:
            with self._sending:
                protocol.send(self._connection, message)
        except OSError:
            os._exit(1)  # the pool has gone: there is nobody left to work for


def _texts(work: _Work) -> list[str]:
    offsets = work.arrays.offsets[work.rows.start : work.rows.stop + 1]
    first = int(offsets[0])
    content = work.arrays.data[first : int(offsets[-1])].tobytes()
    borders = (offsets - first).tolist()
    return [content[a:b].decode() for a, b in itertools.pairwise(borders)]


def _report(error: BaseException) -> protocol.Message:
    """An error as plain data; with every character escaped it still fits into a message."""
    trace = "".join(traceback.format_exception(error))
    return {
        "type": type(error).__name__,
        "config": isinstance(error, ConfigError),
        "message": str(error)[:_LONGEST_REPORT],
        "trace": trace[-_LONGEST_REPORT:],
    }


def _end_with_parent(lifeline: int, parent: int) -> None:
    wait_for_parents_end(lifeline, parent)
    os._exit(0)


def main(arguments: list[str]) -> int:
    """Entry point: descriptors of the socket and the lifeline, and the parent's process id."""
    connection, lifeline, parent = (int(argument) for argument in arguments)
    leave_signals_to_parent()
    # Where it was when a library crashed it, and where it stands when the pool asks because it seems to hang.
    faulthandler.enable()
    faulthandler.register(protocol.ASK_WHERE, all_threads=True)
    # OpenVINO reports its use to its makers through this package, and works without it.
    sys.modules["openvino_telemetry"] = None  # pyright: ignore[reportArgumentType]
    threading.Thread(target=_end_with_parent, args=(lifeline, parent), daemon=True).start()
    code = Worker(socket.socket(fileno=connection)).run()
    sys.stdout.flush()
    sys.stderr.flush()
    # Libraries that compute have threads of their own, which can take seconds to end in an orderly way.
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
