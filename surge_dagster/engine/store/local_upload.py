"""One file on its way to a local disk: a temp file in the same folder, flushed to disk and renamed.

A writer holds a kernel lock on its temp file, which ends with its process. So a sweep can tell the temp files of dead
writers from those of living ones, in other containers too. A catalog may have tens of thousands of files of a few
kilobytes; paths are strings, because `pathlib` costs more than some of these system calls.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import itertools
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa
from filelock import FileLock

from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.store.store import StoredObject
from surge_dagster.engine.support.waiting import wait_in_turns

TEMP_PREFIX = ".tmp-"
LOCK_NAME = ".lock"
_POLL_SECONDS = 0.01
_ATTEMPTS = 100  # to create a folder that other processes remove when it is empty
# Part of the names of this process's temp files; a process of another container may have the same id.
_PROCESS = secrets.token_hex(6)
_NUMBERS = itertools.count()


class LocalUpload:
    """See `Upload`; the folder must exist, or is created where it is hidden."""

    def __init__(self, root: Path, name: str) -> None:
        self._root = root
        self._name = name
        self._final = f"{root}/{name}"
        self._folder = name.rpartition("/")[0]
        self._is_hidden = hidden_depth(self._folder.split("/")) is not None
        self._sink: pa.NativeFile | None = None
        self._published = False
        with StorageErrors(self._final):
            self._temp, self._descriptor = self._open()

    def __enter__(self) -> Self:
        return self

    @property
    def sink(self) -> pa.NativeFile:
        """A stream that opens on first use."""
        if self._sink is None:
            with StorageErrors(self._final):
                self._sink = pa.OSFile(self._temp, "wb")
        return self._sink

    def write(self, data: bytes) -> None:
        """Write the whole object; instead of `sink`."""
        with StorageErrors(self._final):
            written = 0
            while written < len(data):
                written += os.write(self._descriptor, memoryview(data)[written:])

    def publish(self, still_wanted: Callable[[], None]) -> StoredObject:
        """Make the object appear under its name, complete and flushed to disk.

        Args:
            still_wanted: called last, under the folder's lock; what it raises stops the publication. Hidden folders
                have no lock: their names say which version of the source a file is of.
        """
        self.flush()
        with StorageErrors(self._final):
            if self._is_hidden:
                return self._rename(still_wanted)
            with FolderLock(f"{self._root}/{self._folder}"):
                return self._rename(still_wanted)

    def flush(self) -> None:
        """Bring the content to the disk."""
        with StorageErrors(self._final):
            if self._sink is not None:
                self._sink.close()
            os.fsync(self._descriptor)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._sink is not None and not self._sink.closed:
                with contextlib.suppress(OSError):  # the bytes that a full disk did not take are discarded
                    self._sink.close()
            if not self._published:
                Path(self._temp).unlink(missing_ok=True)
        finally:
            os.close(self._descriptor)

    def _rename(self, still_wanted: Callable[[], None]) -> StoredObject:
        still_wanted()
        os.rename(self._temp, self._final)  # noqa: PTH104
        self._published = True
        return stored_object(self._name, os.fstat(self._descriptor))

    def _open(self) -> tuple[str, int]:
        folder = self._root / self._folder
        try:
            return _open_temp(str(folder))
        except FileNotFoundError:
            if not self._is_hidden:
                raise
            temp, descriptor = _create_folder(folder)
        try:
            for parent in Path(self._folder).parents:  # which hold something now, and are not removed any more
                sync_folder(self._root / parent)
        except BaseException:
            os.close(descriptor)
            raise
        return temp, descriptor


class FolderLock:
    """Held by one thread of one process at a time, while a file is checked for the last time and renamed."""

    def __init__(self, folder: str | Path) -> None:
        self._threads, self._processes = _locks(str(folder))

    def __enter__(self) -> None:
        wait_in_turns(lambda turn: self._threads.acquire(timeout=turn))
        try:
            self._processes.acquire(poll_interval=_POLL_SECONDS)
        except BaseException:
            self._threads.release()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._processes.release()
        finally:
            self._threads.release()


@functools.cache
def _locks(folder: str) -> tuple[threading.Lock, FileLock]:
    """Both locks of a folder: filelock polls, so the threads of this process wait for each other in front of it."""
    return threading.Lock(), FileLock(f"{folder}/{LOCK_NAME}", thread_local=False)


def _open_temp(folder: str) -> tuple[str, int]:
    """Create and lock a temp file; gives its path and descriptor."""
    while True:
        path = f"{folder}/{TEMP_PREFIX}{os.getpid()}-{_PROCESS}{next(_NUMBERS):x}"
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
        except FileExistsError:  # left by a fork of the same process that had the same id
            continue
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return path, descriptor
        os.close(descriptor)  # a sweep removed it between the two calls


def _create_folder(folder: Path) -> tuple[str, int]:
    """Create a folder with a temp file in it, against runs that remove it as long as it is empty."""
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(FileNotFoundError, FileExistsError):
            folder.mkdir(parents=True, exist_ok=True)
            return _open_temp(str(folder))
    folder.mkdir(parents=True, exist_ok=True)
    return _open_temp(str(folder))


def remove_dead_temp_files(folder: Path) -> None:
    """Remove the temp files of dead writers in a folder.

    Raises:
        OSError: the folder cannot be written.
    """
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


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def stored_object(name: str, status: os.stat_result) -> StoredObject:
    """A file as a listing shows it."""
    return StoredObject(name, status.st_size, str(status.st_mtime_ns))


def hidden_depth(parts: Sequence[str]) -> int | None:
    """Which part of a name is the first that hides what lies below it, None when none does."""
    return next((depth for depth, part in enumerate(parts) if part.startswith(".")), None)


class StorageErrors:
    """Turns an OSError into an error that names the file and what to do; cheaper than a generator."""

    __slots__ = ("_target",)

    def __init__(self, target: Path | str) -> None:
        self._target = target

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OSError):
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            hint = "Make room on the disk" if is_full else "Check the disk and its permissions"
            raise TransientError(
                f"cannot write {str(self._target)!r}: {error.strerror or error}. Nothing was left behind. "
                f"{hint}, then run again."
            ) from error
