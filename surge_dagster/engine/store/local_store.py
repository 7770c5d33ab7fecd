"""Output files on a local disk, each written to a temp file in its folder, flushed and renamed.

A writer holds a kernel lock on its temp file, which ends with its process. So a sweep can tell the
temp files of dead writers from those of living ones, in other containers too.

The folder itself is flushed once per SuperBatch (`sync`), before its receipts are reported. Hidden
folders, whose names begin with a dot, are created with their first object and removed with their
last.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePath
from types import TracebackType

import pyarrow as pa

from surge_dagster.engine.errors import ConfigError, StoreUnavailable, TransientError
from surge_dagster.engine.store.store import ObjectEnd, Store, StoredObject, Upload, is_hidden
from surge_dagster.engine.support.keys import is_text

TEMP_PREFIX = ".tmp-"
LOCK_NAME = ".lock"
# They concern every file; any other error fails only the partition of its file.
_WHOLE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE)
# More than the resolution of any disk's clock: a file replaced within that keeps its modification
# time.
_SETTLED_NS = 2_000_000_000
_ATTEMPTS = 100  # to create a temp file before another process removes it or its folder


class LocalUpload(Upload):
    """An object as a temp file, whose lock ends when `sink` is closed; a hidden folder is created
    with it.

    Paths are strings here: a `Path` for each of them costs as much as writing a few rows.
    """

    def __init__(self, root: Path, name: str) -> None:
        self._name = name
        self._final = f"{root}/{name}"
        self._folder = self._final.rpartition("/")[0]
        self._is_hidden = is_hidden(name)
        self._published = False
        with storage_errors(self._final):
            self._temp, self.sink = _open_temp(self._folder, create_folder=self._is_hidden)

    def publish(self, still_wanted: Callable[[], None]) -> StoredObject:
        """See `Upload`.

        Only the renaming needs the folder's lock. A check of a source in a bucket is a request, and
        under the lock all writers of the folder would wait for it. Hidden folders have no lock: the
        names of their files contain the version of the source.
        """
        self.flush()
        with storage_errors(self._final):
            is_published = False
            while not is_published:  # each round, another writer has published
                checked_file = self._published_file()
                still_wanted()
                is_published = self._rename(checked_file)
            return stored_object(self._name, os.fstat(self.sink.fileno()))

    def _rename(self, checked_file: tuple[int, int, int] | None) -> bool:
        """Make the file visible, unless another writer has replaced `checked_file`."""
        lock = contextlib.nullcontext() if self._is_hidden else _folder_lock(self._folder)
        with lock:
            is_replaced = not self._is_hidden and self._published_file() != checked_file
            if not is_replaced:
                os.rename(self._temp, self._final)  # noqa: PTH104
                self._published = True
        return self._published

    def _published_file(self) -> tuple[int, int, int] | None:
        try:
            status = os.stat(self._final)  # noqa: PTH116
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns

    def flush(self) -> None:
        """Write the content to the disk."""
        with storage_errors(self._final):
            self.sink.flush()
            os.fsync(self.sink.fileno())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._published:
            Path(self._temp).unlink(missing_ok=True)
        # a published file is on the disk, and another one is discarded
        with contextlib.suppress(OSError):
            self.sink.close()


@contextlib.contextmanager
def _folder_lock(folder: str) -> Iterator[None]:
    """Keep other threads and processes out, while a file is checked and renamed."""
    lock = os.open(f"{folder}/{LOCK_NAME}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)  # ends the lock


def _open_temp(folder: str, *, create_folder: bool) -> tuple[str, pa.NativeFile]:
    """Create and lock a temp file; other processes may remove an empty folder, and a file that has
    no lock yet."""
    path = f"{folder}/{TEMP_PREFIX}{secrets.token_hex(12)}"
    for _ in range(_ATTEMPTS):
        try:
            if create_folder:
                Path(folder).mkdir(parents=True, exist_ok=True)
            file = pa.OSFile(path, "wb")
        except (FileNotFoundError, FileExistsError):
            if create_folder:
                continue
            raise
        os.set_inheritable(file.fileno(), False)  # a child process would keep the lock
        fcntl.flock(file.fileno(), fcntl.LOCK_EX)
        if os.fstat(file.fileno()).st_nlink:
            return path, file
        file.close()
    raise OSError(errno.EBUSY, f"other processes removed its folder or temp file {_ATTEMPTS} times")


def remove_dead_temp_files(folder: Path) -> None:
    """Remove the temp files of dead writers in a folder; harmless when there is no such folder."""
    try:
        temp_files = list(folder.glob(f"{TEMP_PREFIX}*"))
    except (FileNotFoundError, NotADirectoryError):
        return
    for path in temp_files:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError):
            continue  # published or removed by now, or another user's
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
        except BlockingIOError:
            pass  # its writer lives
        finally:
            os.close(descriptor)


def stored_object(name: str, status: os.stat_result) -> StoredObject:
    return StoredObject(name, status.st_size, str(status.st_mtime_ns))


@contextlib.contextmanager
def storage_errors(target: Path | str) -> Iterator[None]:
    """Turn an OSError into an error that names the file and what to do."""
    try:
        yield
    except OSError as error:
        raise write_error(target, error) from error


def write_error(target: Path | str, error: OSError) -> TransientError:
    """Return the error of a file that a disk did not take: `StoreUnavailable` if it will not take
    the next one either."""
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "Make room on the disk" if is_full else "Check the disk and its permissions"
    cause = os.strerror(error.errno) if error.errno else str(error)
    message = f"cannot write {str(target)!r}: {cause}. {remedy}, then run again."
    if error.errno in _WHOLE_DISK:
        return StoreUnavailable(f"{message} What was published stays.")
    return TransientError(message)


class LocalStore(Store):
    """A folder on a local disk; nothing is attempted again, because a disk that refuses once
    refuses twice."""

    def __init__(self, root: Path) -> None:
        super().__init__(str(root), str(root))
        self.root = root

    def prepare(self, folder: str) -> None:
        """Create the folder, and refuse a disk that does not distinguish `A` from `a`."""
        path = self.root / folder
        try:
            path.mkdir(parents=True, exist_ok=True)
            probe = path / f"{TEMP_PREFIX}probe"
            probe.touch()
            folds_case = probe.with_name(probe.name.upper()).exists()
            probe.unlink(missing_ok=True)  # another run's probe is the same file
        except OSError as error:
            raise ConfigError(
                f"cannot write to the output folder {str(path)!r}: {error.strerror}. "
                "Make it writable or give another one."
            ) from error
        if folds_case:
            raise ConfigError(
                f"the disk of {str(path)!r} does not distinguish upper from lower case, and two "
                "partitions could share a file. Put the output on a disk that does."
            )

    def sweep(self, folder: str) -> None:
        """See `Store`; empty folders below a hidden one are removed too."""
        path = self.root / folder
        with storage_errors(path):
            if not is_hidden(folder):
                remove_dead_temp_files(path)
                return
            for below, _, _ in os.walk(path, topdown=False):
                remove_dead_temp_files(Path(below))
                with contextlib.suppress(OSError):  # it is not empty
                    os.rmdir(below)  # noqa: PTH106
            self._remove_empty(path.parent)

    def list(self, folder: str, *, deep: bool = False) -> Iterator[StoredObject]:
        """See `Store`; names that are not UTF-8 are left out."""
        prefix = f"{folder}/" if folder else ""
        for entry in self._entries(folder):
            if deep and entry.is_dir(follow_symlinks=False):
                yield from self.list(f"{prefix}{entry.name}", deep=True)
            elif entry.is_file():
                with contextlib.suppress(FileNotFoundError):  # removed after the folder was listed
                    yield stored_object(f"{prefix}{entry.name}", entry.stat())

    def folders(self) -> Sequence[str]:
        """See `Store`; names that are not UTF-8 are left out."""
        return sorted(entry.name for entry in self._entries("") if entry.is_dir())

    def open(self, name: str, listed: StoredObject | None = None) -> pa.NativeFile:
        file = pa.OSFile(self.location(name), "rb")
        if listed in (None, stored_object(name, os.fstat(file.fileno()))):
            return file
        file.close()
        raise FileNotFoundError(
            errno.ENOENT, "another file stands in its place now", self.location(name)
        )

    def read_end(self, name: str, size: int) -> ObjectEnd:
        path = self.location(name)
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
                f"cannot read {path!r}: {error.strerror or error}. Check the disk and its "
                "permissions, then run again."
            ) from error
        return ObjectEnd(stored_object(name, status), content)

    def is_settled(self, stored: StoredObject, seen_ns: int) -> bool:
        """Whether the file was so old when it was seen that its next version gets another
        modification time."""
        return seen_ns - int(stored.etag) > _SETTLED_NS

    def create(self, name: str) -> LocalUpload:
        return LocalUpload(self.root, name)

    def delete(self, name: str) -> None:
        """Remove an object, and its folders if they are hidden and empty then."""
        path = self.root / name
        with storage_errors(path):
            path.unlink(missing_ok=True)
            if is_hidden(name):
                self._remove_empty(path.parent)

    def sync(self, folder: str) -> None:
        """Flush the folder and those above it, whose own names may be new.

        A folder that is gone was empty: another process has deleted the objects.
        """
        path = self.root / folder
        for each in (path, *path.parents[: len(PurePath(folder).parts)]):
            with contextlib.suppress(FileNotFoundError):
                _flush_folder(each)

    def _entries(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self.root / folder) as entries:
                visible = [entry for entry in entries if not is_hidden(entry.name)]
                return [entry for entry in visible if is_text(entry.name)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            path = str(self.root / folder)
            raise ConfigError(
                f"cannot list the output folder {path!r}: {error.strerror}. Make it readable."
            ) from error

    def _remove_empty(self, folder: Path) -> None:
        """Remove a folder and those above it, as long as they are empty; the next sweep removes
        what stays."""
        with contextlib.suppress(OSError):
            while folder != self.root:
                folder.rmdir()
                folder = folder.parent


def _flush_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
