"""Cache on disk for costly answers: file digests, calibration, converted models.

Everything here can be deleted at any time and is then computed again; a folder that cannot be
written only costs time. Files are written to a temporary name and renamed, so that processes that
start together never read a partial file. Whoever can write here decides what vectors a run gives,
so a folder that all users can write is refused.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.support.urls import expanded

log = logging.getLogger(__name__)

# Work under a lock takes seconds, or minutes for a large model; a process that holds one for longer
# may be stopped.
_PATIENCE_SECONDS = 300.0


def cache_root() -> Path:
    """Return `$SURGE_CACHE_DIR`, or `surge-dagster` in the user's cache folder.

    A user without a home folder has a folder below that of temporary files.
    """
    chosen = os.environ.get("SURGE_CACHE_DIR")
    if chosen:
        return expanded(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    if base:
        return Path(base) / "surge-dagster"
    user = expanded("~/.cache/surge-dagster")
    if user.is_absolute():
        return user
    return Path(tempfile.gettempdir()) / f"surge-dagster-{os.getuid()}"


def place(name: str) -> Path:
    """Return the path of what is cached under `name`, in a folder that neither belongs to others
    nor is open to all."""
    path = cache_root() / name
    for folder in dict.fromkeys((cache_root(), path.parent)):
        _refuse_shared(folder)
    return path


def read_json(name: str) -> dict[str, Any] | None:
    """Return the document cached under `name`; None if it is missing or cannot be read."""
    try:
        document = json.loads(place(name).read_bytes())
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


@contextlib.contextmanager
def lock(name: str, patience_seconds: float = _PATIENCE_SECONDS) -> Iterator[bool]:
    """Hold a lock file against other processes; yields False if that fails or takes longer than the
    patience."""
    target = place(name)
    held = FileLock(target, timeout=patience_seconds)
    try:
        make_folder(target.parent)
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
    """Cache `document` under `name`, a relative path, atomically; a failed write is only logged."""
    target = place(name)
    temporary = None
    try:
        make_folder(target.parent)
        with tempfile.NamedTemporaryFile(
            dir=target.parent, prefix=".", suffix=".tmp", delete=False
        ) as file:
            temporary = Path(file.name)
            file.write(json.dumps(document, indent=1, sort_keys=True).encode())
        temporary.replace(target)
    except OSError as error:
        log.warning("cannot cache %s (%s); it will be computed again next time", target, error)
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def make_folder(folder: Path) -> None:
    """Make a folder in the cache that only this user may enter, whatever the umask is."""
    inside = folder.relative_to(cache_root()).parents
    above = [cache_root() / parent for parent in reversed(inside)]
    for each in (*above, folder):
        each.mkdir(mode=0o700, parents=True, exist_ok=True)


def _refuse_shared(folder: Path) -> None:
    try:
        status = folder.stat()
    except OSError:
        return  # there is none yet, or nothing can be read from it
    if status.st_uid not in (os.geteuid(), 0):
        what = f"belongs to another user (uid {status.st_uid}; this process has {os.geteuid()})"
        remedy = "Set SURGE_CACHE_DIR to a folder of this user, or give them this one with chown"
    # a group is often the user's own, or that of a Kubernetes volume
    elif status.st_mode & stat.S_IWOTH:
        what = f"can be written by all users (its mode is {stat.S_IMODE(status.st_mode):o})"
        remedy = (
            "Remove its content and run `chmod o-w` on it, or set SURGE_CACHE_DIR to a folder of "
            "your own"
        )
    else:
        return
    raise ConfigError(
        f"the cache folder {str(folder)!r} {what}; what others put there would change the vectors "
        f"of every run. {remedy}."
    )
