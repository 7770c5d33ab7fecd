"""A cache on disk for answers that are costly to compute: file digests, parity, speed, converted models, footers.

Everything here can be deleted at any time and is then computed again; a folder that cannot be written only costs time.
Files are written under a temporary name and renamed, so that a concurrent process never reads half an answer.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

log = logging.getLogger(__name__)

# Work under a lock takes seconds, or minutes for a large model; a holder that takes longer may be stopped.
_PATIENCE_SECONDS = 300.0


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
    """The bytes kept under `name`, or None when there are none that can be read."""
    try:
        return (cache_root() / name).read_bytes()
    except OSError:
        return None


@contextlib.contextmanager
def lock(name: str, patience_seconds: float = _PATIENCE_SECONDS) -> Iterator[bool]:
    """Hold the lock file `name` against every other process, so that only the first of several does the work.

    Yields:
        Whether the lock is held: False where the disk has no locks, or another process kept it longer than the
        patience. The system releases the lock when its holder dies.
    """
    target = cache_root() / name
    with contextlib.ExitStack() as held:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(FileLock(target, timeout=patience_seconds))
            locked = True
        except Timeout:
            log.warning(
                "another process has held %s for %.0f s; this one computes for itself", target, patience_seconds
            )
            locked = False
        except (OSError, NotImplementedError) as error:  # a read-only folder, or a network file system without locks
            log.warning("cannot lock %s (%s); every process computes for itself", target, error)
            locked = False
        yield locked


def write_json(name: str, document: dict[str, Any]) -> None:
    """Keep `document` under `name`, a relative path; a failure to write is logged and ignored."""
    write_bytes(name, json.dumps(document, indent=1, sort_keys=True).encode())


def write_bytes(name: str, content: bytes) -> None:
    """Keep `content` under `name`, atomically; a failure to write is logged and ignored."""
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
