"""Output files on a local disk: a temp file in the same folder, flushed to disk and renamed.

The folder itself is flushed once per SuperBatch (`sync`), before its receipts are reported. A writer holds a lock on
its temp file, so that a later run can tell the temp files of the dead from those of the living; process ids cannot,
since containers begin counting anew. Temp files are made, and those of the dead removed, under a lock on the folder.
The last check before a rename runs under it too: of two writers, the one out of date loses.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa

from surge_dagster.engine.errors import ConfigError, TransientError
from surge_dagster.engine.output.store import StoredObject

_TEMP_PREFIX = ".tmp-"
_LOCK_NAME = ".lock"


class LocalStore:
    """A folder on a local disk."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def url(self) -> str:
        return str(self.root)

    @property
    def retries(self) -> Mapping[str, int]:
        """Nothing is tried again: what a disk refuses once it refuses twice."""
        return {}

    @property
    def upload_bytes(self) -> int:
        """None: what is written goes to the disk's own buffers."""
        return 0

    def location(self, name: str) -> str:
        """Where a person finds the object."""
        return str(self.root / name)

    def prepare(self, folder: str) -> None:
        """Make a folder ready for writing and remove what dead writers left in it.

        Raises:
            ConfigError: the folder cannot be written, or its disk does not tell `A` from `a`.
        """
        path = self.root / folder
        try:
            path.mkdir(parents=True, exist_ok=True)
            with _locked(path / _LOCK_NAME):
                for entry in list(path.glob(f"{_TEMP_PREFIX}*")):
                    _remove_if_abandoned(entry)
                probe = path / f"{_TEMP_PREFIX}probe"
                probe.touch()
                folds_case = probe.with_name(probe.name.upper()).exists()
                probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"cannot write to the output folder {str(path)!r}: {error.strerror}. "
                "Make it writable or give another one."
            ) from error
        if folds_case:
            raise ConfigError(
                f"the disk of {str(path)!r} does not tell upper from lower case, so two partitions could share a file. "
                "Put the output on a disk that does."
            )

    def list(self, folder: str, *, deep: bool = False) -> Iterator[StoredObject]:
        """Yield the objects of a folder in no particular order; hidden ones are left out.

        Args:
            deep: yield those of its folders as well.

        Raises:
            ConfigError: the folder cannot be listed.
        """
        try:
            entries = os.scandir(self.root / folder)
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise _unlistable(self.root / folder, error) from error
        with entries:
            for entry in entries:
                name = f"{folder}/{entry.name}" if folder else entry.name
                if entry.name.startswith("."):
                    continue
                if deep and entry.is_dir():
                    yield from self.list(name, deep=True)
                elif entry.is_file():
                    # It may be replaced or removed while the folder is being listed.
                    with contextlib.suppress(FileNotFoundError):
                        yield _stored(name, entry.stat())

    def folders(self) -> list[str]:
        """Names of the folders at the root, sorted; hidden ones are left out.

        Raises:
            ConfigError: the root cannot be listed.
        """
        try:
            entries = list(os.scandir(self.root))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise _unlistable(self.root, error) from error
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))

    def open(self, name: str) -> pa.NativeFile:
        """Open an object for reading.

        Raises:
            FileNotFoundError: there is no such object.
        """
        return pa.OSFile(str(self.root / name), "rb")

    def create(self, name: str) -> LocalUpload:
        """Begin an object; its folder must exist (see `prepare`)."""
        return LocalUpload(self.root, name)

    def delete(self, name: str) -> None:
        """Remove an object; harmless when there is none."""
        with _storage_errors(self.root / name):
            (self.root / name).unlink(missing_ok=True)

    def sync(self, folder: str) -> None:
        """Make the names of the files published in a folder durable."""
        descriptor = os.open(self.root / folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class LocalUpload:
    """A temp file beside its final name."""

    def __init__(self, root: Path, name: str) -> None:
        self._root = root
        self._name = name
        self._final = root / name
        self._temp = self._final.with_name(f"{_TEMP_PREFIX}{os.getpid()}-{secrets.token_hex(6)}")
        with _storage_errors(self._final):
            with _locked(self._final.parent / _LOCK_NAME):
                self._descriptor = os.open(self._temp, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            self.sink = pa.OSFile(str(self._temp), "wb")
        self._published = False

    def __enter__(self) -> Self:
        return self

    def publish(self, still_wanted: Callable[[], None]) -> StoredObject:
        """Make the object appear under its name, complete and flushed to disk.

        Args:
            still_wanted: called last, under the folder's lock; what it raises stops the publication.
        """
        with _storage_errors(self._final):
            self.sink.close()
            os.fsync(self._descriptor)
            with _locked(self._final.parent / _LOCK_NAME):
                still_wanted()
                self._temp.rename(self._final)
        self._published = True
        return _stored(self._name, os.fstat(self._descriptor))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if not self.sink.closed:
                with contextlib.suppress(OSError):  # what a full disk could not take is thrown away
                    self.sink.close()
            if not self._published:
                self._temp.unlink(missing_ok=True)
        finally:
            os.close(self._descriptor)


def _stored(name: str, status: os.stat_result) -> StoredObject:
    return StoredObject(name, status.st_size, str(status.st_mtime_ns))


def _unlistable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot list the output folder {str(path)!r}: {error.strerror}. Make it readable.")


def _remove_if_abandoned(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return  # published or removed meanwhile, or another user's
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except BlockingIOError:
        pass  # its writer lives
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _storage_errors(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = (
            "Make room on the disk"
            if error.errno in (errno.ENOSPC, errno.EDQUOT)
            else "Check the disk and its permissions"
        )
        raise TransientError(
            f"cannot write {str(target)!r}: {error.strerror or error}. Nothing was left behind. {hint}, then run again."
        ) from error
