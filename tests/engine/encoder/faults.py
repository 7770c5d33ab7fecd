"""FaultyBackend: the hash backend, in which some texts kill, hang or fail their worker.

`die once PATH` and `hang once PATH` do so unless PATH exists, and create it first, so that the
second worker to meet the text survives. `die always`, `hang always` and `fail always` do so every
time, and `die until PATH` as long as PATH does not exist. `fail once PATH` raises once. `chatter
once PATH` prints a line every few milliseconds without end. `babble` raises an error that is too
long for a message; `panic` raises a `BaseException` in the tokenizer. `zero` and the empty text get
a vector of zeros, as a text without tokens. `wait PATH` blocks until PATH exists, and `seen PATH`
creates it when the text is tokenized.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

from surge_dagster.engine.encoder.metrics import Costs
from surge_dagster.engine.encoder.worker.backends import (
    BackendSettings,
    HashBackend,
    LaunchedPortion,
    Progress,
    Rows,
)
from surge_dagster.engine.model.spec import Space


class DeviceLost(RuntimeError):
    """An error that no pickle could carry: it holds a lock."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class Panic(BaseException):
    """A panic in Rust code as Python sees it."""


class FaultyBackend(HashBackend):
    def prepare(self, texts: list[str]) -> list[bytes]:
        for text in texts:
            verb, _, path = text.partition(" ")
            if verb == "panic":
                raise Panic("the tokenizer panicked")
            if verb == "seen":
                Path(path).touch()
        return super().prepare(texts)

    def forward(self, prepared: Any, rows: Rows, progress: Progress) -> Costs:
        for text in prepared:
            verb, _, path = text.decode().partition(" ")
            if verb == "wait":
                while not Path(path).exists():
                    progress()
                    threading.Event().wait(0.01)
            else:
                _harm(text.decode())
        costs = super().forward(prepared, rows, progress)
        for place, text in zip(rows.places, prepared, strict=True):
            if text in (b"zero", b""):
                rows.matrix[place] = 0
        return costs


class QueuingBackend(FaultyBackend):
    """Computes a portion when it is waited for, after the next one was launched."""

    def launch(self, prepared: Any, rows: Rows, progress: Progress) -> LaunchedPortion:
        return LaunchedPortion(
            is_done=lambda: False, finish=partial(self.forward, prepared, rows, progress)
        )


class RefusingBackend(HashBackend):
    def __init__(self, space: Space, settings: BackendSettings) -> None:
        raise DeviceLost("no such device")


class UnreadyBackend(HashBackend):
    """Never finishes loading, which the file `$FAULTS_LOADING` says."""

    def __init__(self, space: Space, settings: BackendSettings) -> None:
        if "FAULTS_LOADING" in os.environ:
            Path(os.environ["FAULTS_LOADING"]).touch()
        threading.Event().wait()


class CrashingBackend(HashBackend):
    """Crashes while loading, like a library with a bug in its C code."""

    def __init__(self, space: Space, settings: BackendSettings) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


class OnceBackend(FaultyBackend):
    """Starts a limited number of times; later workers die while they load.

    `$FAULTS_STARTS` names a folder with a file for each start that is left. They are used in the
    order of their names; one that ends in `refused` is used up by an error.
    """

    def __init__(self, space: Space, settings: BackendSettings) -> None:
        super().__init__(space, settings)
        for ticket in sorted(Path(os.environ["FAULTS_STARTS"]).iterdir()):
            with contextlib.suppress(FileNotFoundError):  # another worker took it
                ticket.unlink()
                if ticket.name.endswith("refused"):
                    raise DeviceLost("the device is still busy")
                return
        _harm("die always")


def _harm(text: str) -> None:
    verb, _, rest = text.partition(" ")
    if verb == "babble":
        raise DeviceLost("\N{CJK UNIFIED IDEOGRAPH-8A9E}\x1b" * 50_000)
    if verb not in ("die", "hang", "chatter", "fail"):
        return
    if rest.startswith("until ") and Path(rest.removeprefix("until ")).exists():
        return
    if rest.startswith("once "):
        try:
            os.close(os.open(Path(rest.removeprefix("once ")), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
    if verb == "die":
        print("the device is on fire", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if verb == "hang":
        threading.Event().wait()
    while verb == "chatter":
        print("the device does not answer; trying again", flush=True)
        threading.Event().wait(0.01)
    raise DeviceLost("the device was lost")
