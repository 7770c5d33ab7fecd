"""Answers that are costly to get and cheap to keep: file digests, parity, speed, converted models, footers.

Everything here can be deleted at any time and is then computed again, and a folder that cannot be written only costs
time. Files are written aside and renamed, so that two processes that start together never read half an answer.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

log = logging.getLogger(__name__)

# What is made under a lock takes seconds, or minutes for a large model; whoever holds one for longer may be stopped.
_PATIENCE_SECONDS = 300.0
_POLL_SECONDS = 0.05


def cache_root() -> Path:
    """`$SURGE_CACHE_DIR`, or `surge-dagster` in the user's cache folder."""
    if chosen := os.environ.get("SURGE_CACHE_DIR"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "surge-dagster"


def read_json(name: str) -> dict[str, Any] | None:
    """The document kept under `name`, or None when there is none that can be read."""
    try:
        document = json.loads(read_bytes(name) or b"")
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def read_bytes(name: str) -> bytes | None:
    """What is kept under `name`, or None when there is nothing that can be read."""
    try:
        return (cache_root() / name).read_bytes()
    except OSError:
        return None


@contextlib.contextmanager
def lock(name: str, patience_seconds: float = _PATIENCE_SECONDS) -> Iterator[bool]:
    """Holds the lock file `name` against every other process.

    Gives False, and no lock, where there can be none, or where its holder keeps it for longer than the patience.

    What is made under it is made once, by the first of several processes that start together. The system gives the
    lock back when its holder dies.
    """
    target = cache_root() / name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        file = target.open("w")
    except OSError as error:
        log.warning("cannot lock %s (%s); every process computes for itself", target, error)
        yield False
        return
    with file:
        try:
            locked = _locked(file, patience_seconds)
        except OSError as error:  # some network file systems
            log.warning("cannot lock %s (%s); every process computes for itself", target, error)
            locked = False
        yield locked


def _locked(file: IO[str], patience_seconds: float) -> bool:
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                log.warning(
                    "another process has held %s for %.0f s; this one computes for itself", file.name, patience_seconds
                )
                return False
        time.sleep(_POLL_SECONDS)


def write_json(name: str, document: dict[str, Any]) -> None:
    """Keeps `document` under `name` (a relative path); a failure to write is logged and forgotten."""
    write_bytes(name, json.dumps(document, indent=1, sort_keys=True).encode())


def write_bytes(name: str, content: bytes) -> None:
    """Keeps `content` under `name`, atomically; a failure to write is logged and forgotten."""
    target = cache_root() / name
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(dir=target.parent, prefix=".", suffix=".tmp")
    except OSError as error:
        log.warning("cannot keep %s (%s); it will be computed again next time", target, error)
        return
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(aside).replace(target)
    except OSError as error:
        Path(aside).unlink(missing_ok=True)
        log.warning("cannot keep %s (%s); it will be computed again next time", target, error)
