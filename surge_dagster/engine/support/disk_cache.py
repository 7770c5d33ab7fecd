"""Cache on disk for costly answers: file digests, calibration, converted models, footers.

Everything here can be deleted at any time and is then computed again; a folder that cannot be written only costs time.
Files are written to a temporary name and renamed, so that processes that start together never read a partial file.
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

from filelock import FileLock

log = logging.getLogger(__name__)

# Work under a lock takes seconds, or minutes for a large model; a process that holds one for longer may be stopped.
_PATIENCE_SECONDS = 300.0


def cache_root() -> Path:
    """`$SURGE_CACHE_DIR`, or `surge-dagster` in the user's cache folder."""
    if chosen := os.environ.get("SURGE_CACHE_DIR"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "surge-dagster"


def read_json(name: str) -> dict[str, Any] | None:
    """The document cached under `name`; None when it is missing or cannot be read."""
    try:
        document = json.loads(read_bytes(name) or b"")
    except ValueError:
        return None
    return document if isinstance(document, dict) else None


def read_bytes(name: str) -> bytes | None:
    """The content cached under `name`; None when it is missing or cannot be read."""
    try:
        return (cache_root() / name).read_bytes()
    except OSError:
        return None


@contextlib.contextmanager
def lock(name: str, patience_seconds: float = _PATIENCE_SECONDS) -> Iterator[bool]:
    """Holds the lock file `name` against other processes, so that processes that start together compute once.

    Yields False, without the lock, where the file cannot be locked or its holder keeps it beyond the patience.
    """
    target = cache_root() / name
    held = FileLock(target, timeout=patience_seconds)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        held.acquire()
    except (OSError, NotImplementedError) as error:  # filelock.Timeout is a TimeoutError
        log.warning("cannot lock %s (%s); this process computes for itself", target, error)
        yield False
        return
    try:
        yield True
    finally:
        held.release()


def write_json(name: str, document: dict[str, Any]) -> None:
    """Caches `document` under `name` (a relative path); a failed write is only logged."""
    write_bytes(name, json.dumps(document, indent=1, sort_keys=True).encode())


def write_bytes(name: str, content: bytes) -> None:
    """Caches `content` under `name`, atomically; a failed write is only logged."""
    target = cache_root() / name
    temporary = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".", suffix=".tmp", delete=False) as file:
            temporary = Path(file.name)
            file.write(content)
        temporary.replace(target)
    except OSError as error:
        log.warning("cannot cache %s (%s); it will be computed again next time", target, error)
        if temporary is not None:
            temporary.unlink(missing_ok=True)
