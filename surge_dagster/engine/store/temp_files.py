"""Files that are being written on a local disk: who writes one holds a lock on it, and the dead hold none.

A later run tells the temp files of the dead from those of the living by these locks; process ids cannot, since
containers begin counting anew. They are removed, and files renamed, under a lock on their folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import threading
import time
from pathlib import Path
from types import TracebackType

from surge_dagster.engine.support.waiting import wait_in_turns

TEMP_PREFIX = ".tmp-"
_LOCK_NAME = ".lock"
_TRIES = 100
_TRY_SECONDS = 0.01
# Of the names of this process's files; a process of another container may have the same number.
_OURS = secrets.token_hex(6)
_NUMBERS = itertools.count()


def open_temp(folder: str) -> tuple[str, int]:
    """A new temp file and its descriptor, which holds the lock.

    Raises:
        OSError: the folder is not there or cannot be written.
    """
    while True:
        path = f"{folder}/{TEMP_PREFIX}{os.getpid()}-{_OURS}{next(_NUMBERS):x}"
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
        except FileExistsError:  # left by a fork of the same process that had the same id
            continue
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return path, descriptor
        os.close(descriptor)  # a run that began between the two calls took it for abandoned


def open_temp_and_folder(root: Path, folder: str) -> tuple[str, int]:
    """`open_temp` in a folder below `root` that comes with its first file and goes with its last.

    Raises:
        OSError: the folder cannot be made or written.
    """
    try:
        return open_temp(f"{root}/{folder}")
    except FileNotFoundError:
        path, descriptor = _make_folder(root / folder)
    try:
        for parent in Path(folder).parents:  # none of them can go any more, now that there is something in it
            sync_folder(root / parent)
    except BaseException:
        os.close(descriptor)
        raise
    return path, descriptor


def remove_abandoned(folder: Path) -> None:
    """Remove the temp files of the dead in a folder.

    Raises:
        OSError: the folder cannot be written.
    """
    with Locked(folder):
        _remove_abandoned(folder)


def remove_if_empty(folder: Path) -> bool:
    """Remove a folder in which there is nothing, or only what the dead left; gives whether it is gone."""
    try:
        with Locked(folder):
            _remove_abandoned(folder)
            if [entry.name for entry in os.scandir(folder)] == [_LOCK_NAME]:
                (folder / _LOCK_NAME).unlink()
                folder.rmdir()
    except (FileNotFoundError, NotADirectoryError):
        return True  # somebody else did it
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
    return not folder.exists()


def remove_empty_below(folder: Path) -> None:
    """`remove_if_empty` of a folder and, before it, of all that lie below it."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for entry in list(os.scandir(folder)):
            if entry.is_dir(follow_symlinks=False):
                remove_empty_below(Path(entry))
        remove_if_empty(folder)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Locked:
    """Holds the lock of a folder; a class, because a generator takes ten times as long to enter and to leave."""

    __slots__ = ("_descriptor", "_path")

    def __init__(self, folder: str | Path) -> None:
        self._path = f"{folder}/{_LOCK_NAME}"

    def __enter__(self) -> None:
        self._descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            _lock(self._descriptor)
        except BaseException:
            os.close(self._descriptor)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)


def _lock(descriptor: int) -> None:
    if threading.current_thread() is not threading.main_thread():
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return

    def wait(turn: float) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(min(turn, _TRY_SECONDS))
            return False
        return True

    wait_in_turns(wait)  # the kernel's own wait is deaf to a signal that another thread was given


def _make_folder(folder: Path) -> tuple[str, int]:
    """Make a folder, and a temp file in it before another run finds it empty and removes it."""
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError):
            folder.mkdir(parents=True, exist_ok=True)
            return open_temp(str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    return open_temp(str(folder))


def _remove_abandoned(folder: Path) -> None:
    for path in folder.glob(f"{TEMP_PREFIX}*"):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError):
            continue  # published or removed meanwhile, or another user's
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            pass  # its writer lives
        finally:
            os.close(descriptor)
