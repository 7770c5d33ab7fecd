"""Output files on a local disk: a temp file in the same folder, flushed to disk and renamed.

The folder itself is flushed once per SuperBatch (`sync`), before its receipts are reported. A writer holds a lock on
its temp file, so that a later run can tell the temp files of the dead from those of the living; process ids cannot,
since containers begin counting anew. Temp files of the dead are removed under a lock on the folder. The last check
before a rename runs under it too: of two writers, the one out of date loses.

A catalog may have tens of thousands of files of a few kilobytes, so what is done once per file is done with as few
system calls as it takes, on paths that are strings.
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
from surge_dagster.engine.output.store import ObjectEnd, StoredObject

_TEMP_PREFIX = ".tmp-"
_LOCK_NAME = ".lock"
# Far more than the grain of any disk's clock: a file replaced within the grain keeps its modification time.
_SETTLED_NS = 2_000_000_000


class LocalStore:
    """A folder on a local disk."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @property
    def url(self) -> str:
        return str(self.root)

    @property
    def identity(self) -> str:
        return str(self.root)

    @property
    def is_remote(self) -> bool:
        """No: an end is read sooner than another thread could be asked to, or an answer on disk be looked up."""
        return False

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
        return f"{self.root}/{name}"

    def prepare(self, folder: str) -> None:
        """Make a folder ready for writing and remove what dead writers left in it.

        Raises:
            ConfigError: the folder cannot be written, or its disk does not tell `A` from `a`.
        """
        path = self.root / folder
        try:
            path.mkdir(parents=True, exist_ok=True)
            with _Locked(path):
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
                if deep and entry.is_dir(follow_symlinks=False):
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
        return pa.OSFile(f"{self.root}/{name}", "rb")

    def read_end(self, name: str, size: int) -> ObjectEnd:
        """The last `size` bytes of an object, or all of it.

        Raises:
            FileNotFoundError: there is no such object.
            TransientError: there is one, and the disk does not give it.
        """
        path = f"{self.root}/{name}"
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                status = os.fstat(descriptor)
                content = os.pread(descriptor, size, max(0, status.st_size - size))
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise TransientError(
                f"cannot read {path!r}: {error.strerror or error}. Check the disk and its permissions, then run again."
            ) from error
        return ObjectEnd(_stored(name, status), content)

    def is_settled(self, stored: StoredObject, seen_ns: int) -> bool:
        """Whether the file was old enough when it was seen for its next version to get another modification time."""
        return seen_ns - int(stored.etag) > _SETTLED_NS

    def create(self, name: str) -> LocalUpload:
        """Begin an object; its folder must exist (see `prepare`)."""
        return LocalUpload(self.root, name)

    def delete(self, name: str) -> None:
        """Remove an object; harmless when there is none.

        Below a hidden folder, folders that are empty go with it, and what dead writers left in them.
        """
        path = self.root / name
        with _StorageErrors(path):
            with contextlib.suppress(NotADirectoryError):
                path.unlink(missing_ok=True)
            parts = name.split("/")[:-1]
            hidden = next((depth for depth, part in enumerate(parts) if part.startswith(".")), len(parts))
            for depth in range(len(parts), hidden, -1):
                if not _remove_if_empty(self.root.joinpath(*parts[:depth])):
                    break

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
        self._name = name
        self._final = f"{root}/{name}"
        self._folder = self._final.rpartition("/")[0]
        with _StorageErrors(self._final):
            self._temp, self._descriptor = _open_temp(self._folder)
        self._sink: pa.NativeFile | None = None
        self._published = False

    def __enter__(self) -> Self:
        return self

    @property
    def sink(self) -> pa.NativeFile:
        """A stream that is opened when it is asked for."""
        if self._sink is None:
            with _StorageErrors(self._final):
                self._sink = pa.OSFile(self._temp, "wb")
        return self._sink

    def write(self, data: bytes) -> None:
        """Write the whole object; instead of `sink`."""
        with _StorageErrors(self._final):
            left = memoryview(data)
            while left:
                left = left[os.write(self._descriptor, left) :]

    def publish(self, still_wanted: Callable[[], None]) -> StoredObject:
        """Make the object appear under its name, complete and flushed to disk.

        Args:
            still_wanted: called last, under the folder's lock; what it raises stops the publication.
        """
        with _StorageErrors(self._final):
            if self._sink is not None:
                self._sink.close()
            os.fsync(self._descriptor)
            with _Locked(self._folder):
                still_wanted()
                os.rename(self._temp, self._final)  # noqa: PTH104
        self._published = True
        return _stored(self._name, os.fstat(self._descriptor))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._sink is not None and not self._sink.closed:
                with contextlib.suppress(OSError):  # what a full disk could not take is thrown away
                    self._sink.close()
            if not self._published:
                Path(self._temp).unlink(missing_ok=True)
        finally:
            os.close(self._descriptor)


def _stored(name: str, status: os.stat_result) -> StoredObject:
    return StoredObject(name, status.st_size, str(status.st_mtime_ns))


def _unlistable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot list the output folder {str(path)!r}: {error.strerror}. Make it readable.")


def _open_temp(folder: str) -> tuple[str, int]:
    """A new temp file and its descriptor, which holds the lock."""
    while True:
        path = f"{folder}/{_TEMP_PREFIX}{os.getpid()}-{secrets.token_hex(6)}"
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return path, descriptor
        os.close(descriptor)  # a run that began between the two calls took it for abandoned


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


def _remove_if_empty(folder: Path) -> bool:
    """Remove a folder without objects, and those below it, with what dead writers left; gives whether it is gone."""
    try:
        entries = list(os.scandir(folder))
        below = [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
        if any(not entry.name.startswith(".") and entry not in below for entry in entries):
            return False
        if [entry for entry in below if not _remove_if_empty(Path(entry))]:
            return False
        with _Locked(folder):
            for entry in folder.glob(f"{_TEMP_PREFIX}*"):
                _remove_if_abandoned(entry)
            if [entry.name for entry in os.scandir(folder)] == [_LOCK_NAME]:
                (folder / _LOCK_NAME).unlink()
                folder.rmdir()
    except (FileNotFoundError, NotADirectoryError):
        return True  # somebody else did it
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
    return not folder.exists()


class _Locked:
    """Holds the lock of a folder; a class, because a generator takes ten times as long to enter and to leave."""

    __slots__ = ("_descriptor", "_path")

    def __init__(self, folder: str | Path) -> None:
        self._path = f"{folder}/{_LOCK_NAME}"

    def __enter__(self) -> None:
        self._descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        except BaseException:
            os.close(self._descriptor)
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)


class _StorageErrors:
    """Turns what the operating system says into an error that names the file and what to do."""

    __slots__ = ("_target",)

    def __init__(self, target: Path | str) -> None:
        self._target = target

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, OSError):
            return
        hint = (
            "Make room on the disk"
            if error.errno in (errno.ENOSPC, errno.EDQUOT)
            else "Check the disk and its permissions"
        )
        raise TransientError(
            f"cannot write {str(self._target)!r}: {error.strerror or error}. Nothing was left behind. {hint}, then run "
            "again."
        ) from error
