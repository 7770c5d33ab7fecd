"""A folder of the cache that processes of a machine share: one of them makes it, the last one removes it."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.support import disk_cache
from surge_dagster.engine.support.waiting import rest
from surge_dagster.engine.tables.grouping import Group

log = logging.getLogger(__name__)

T = TypeVar("T")
_COMPLETE = "complete"
_WAIT_SECONDS = 0.1  # between two looks for what another process makes


class SharedFolder:
    """The folder of the grouped rows of one version of a table, and a lock that the processes that use it share."""

    def __init__(self, name: str, version: str) -> None:
        self.version = version
        self.path = disk_cache.place(f"{name}/rows-{version}")
        with write_errors(self.path):
            for made in (disk_cache.cache_root(), self.path.parent.parent, self.path.parent):
                made.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._close = weakref.finalize(self, os.close, self._lock)

    @property
    def _is_complete(self) -> bool:
        return (self.path / _COMPLETE).exists()

    @contextlib.contextmanager
    def alone(self, found: Callable[[], T | None]) -> Iterator[T | None]:
        """No other process uses the folder in here; afterwards this one goes on using it, beside others.

        Args:
            found: looks for the index; as soon as another process has made it, it is yielded, and the folder is not
                waited for.
        """
        is_waiting = False
        while not self._is_locked():
            if (index := found()) is not None:
                yield index
                return
            if not is_waiting:
                log.warning("waiting for another process that groups the same table in %s", self.path)
                is_waiting = True
            rest(_WAIT_SECONDS)
        try:
            yield found()
        except BaseException:
            self._close()
            raise
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def _is_locked(self) -> bool:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def fill(self, make: Callable[[], list[Group]]) -> list[Group]:
        """Make the grouped rows; within `alone`."""
        groups = make()
        (self.path / _COMPLETE).touch()
        return groups

    def use(self, make: Callable[[], list[Group]]) -> None:
        """Use the grouped rows beside other processes; make them where they are missing."""
        while True:
            fcntl.flock(self._lock, fcntl.LOCK_SH)  # waits while another process makes them
            if self._is_complete:
                return
            if self._is_locked():
                break
            rest(_WAIT_SECONDS)
        if not self._is_complete:
            self.fill(make)
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def remove(self) -> None:
        """Stop using the folder, and remove it where no other process uses it."""
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.path, ignore_errors=True)
        self._close()

    def remove_others(self) -> None:
        """Remove what was grouped of earlier versions, where no process uses it."""
        for folder in self.path.parent.glob("rows-*.lock"):
            if folder.stem != self.path.name:
                with contextlib.suppress(OSError):
                    other = os.open(folder, os.O_RDWR | os.O_CLOEXEC)
                    try:
                        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        shutil.rmtree(folder.with_suffix(""), ignore_errors=True)
                        folder.unlink()
                    finally:
                        os.close(other)


@contextlib.contextmanager
def write_errors(folder: Path) -> Iterator[None]:
    """Say of an error of the system what the folder needs."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the rows of the table cannot be grouped in {str(folder)!r}: {error.strerror or error}. It needs as much "
            "room as the columns that are read; set SURGE_CACHE_DIR to a folder on a disk that has it."
        ) from error
