"""Output files on a local disk; `local_upload` writes them.

The folder itself is flushed once per SuperBatch (`sync`), before its receipts are reported. Hidden folders, whose
names at the root begin with a dot, are created with their first object and removed with their last.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Self

import pyarrow as pa

from surge_dagster.engine.errors import ConfigError, TransientError
from surge_dagster.engine.store.local_upload import (
    LOCK_NAME,
    TEMP_PREFIX,
    LocalUpload,
    is_hidden,
    remove_dead_temp_files,
    storage_errors,
    stored_object,
)
from surge_dagster.engine.store.store import ObjectEnd, StoredObject
from surge_dagster.engine.support.keys import is_text

# More than the resolution of any disk's clock: a file replaced within that keeps its modification time.
_SETTLED_NS = 2_000_000_000


class LocalStore:
    """A folder on a local disk; see `Store`."""

    is_remote = False  # reading a footer is faster than a thread or a cache
    upload_bytes = 0  # written bytes go to the disk's own buffers

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = self.identity = str(root)
        self.retries: Mapping[str, int] = {}  # nothing is attempted again: a disk that refuses once refuses twice

    def until(self, over: threading.Event) -> Self:
        """The same store: nothing waits for a disk."""
        return self

    def location(self, name: str) -> str:
        """The path of an object."""
        return f"{self.root}/{name}"

    def prepare(self, folder: str) -> None:
        """Make a folder ready for writing.

        Raises:
            ConfigError: the folder cannot be written, or its disk does not distinguish `A` from `a`.
        """
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
                f"the disk of {str(path)!r} does not distinguish upper from lower case, and two partitions could share "
                "a file. Put the output on a disk that does."
            )

    def sweep(self, folder: str) -> None:
        """Remove the temp files of dead writers; of a hidden folder, also those below it, and folders that are empty.

        Raises:
            TransientError: the disk refuses.
        """
        path = self.root / folder
        with storage_errors(path):
            if not is_hidden(folder):
                remove_dead_temp_files(path)
                return
            for below, _, _ in os.walk(path, topdown=False):
                remove_dead_temp_files(Path(below))
                (Path(below) / LOCK_NAME).unlink(missing_ok=True)  # earlier versions left them there
                _remove_if_empty(Path(below))
            self._remove_empty(folder)

    def list(self, folder: str, *, deep: bool = False) -> Iterator[StoredObject]:
        """Yield the objects of a folder in no particular order, without hidden ones and names that are not UTF-8.

        Args:
            deep: yield those of its folders as well.

        Raises:
            ConfigError: the folder cannot be listed.
        """
        prefix = f"{folder}/" if folder else ""
        for entry in self._entries(folder):
            if deep and entry.is_dir(follow_symlinks=False):
                yield from self.list(f"{prefix}{entry.name}", deep=True)
            elif entry.is_file():
                with contextlib.suppress(FileNotFoundError):  # removed after the folder was listed
                    yield stored_object(f"{prefix}{entry.name}", entry.stat())

    def folders(self) -> list[str]:
        """Names of the folders at the root, sorted, without hidden ones and names that are not UTF-8.

        Raises:
            ConfigError: the root cannot be listed.
        """
        return sorted(entry.name for entry in self._entries("") if entry.is_dir())

    def open(self, name: str, listed: StoredObject | None = None) -> pa.NativeFile:
        """Open an object for reading.

        Args:
            listed: the object as a listing showed it, and no other one.

        Raises:
            FileNotFoundError: there is no such object, or it was replaced since it was listed.
        """
        file = pa.OSFile(self.location(name), "rb")
        if listed in (None, stored_object(name, os.fstat(file.fileno()))):
            return file
        file.close()
        raise FileNotFoundError(errno.ENOENT, "another file stands in its place now", self.location(name))

    def read_end(self, name: str, size: int) -> ObjectEnd:
        """The last `size` bytes of an object, or all of it.

        Raises:
            FileNotFoundError: there is no such object.
            TransientError: the disk does not return it.
        """
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
                f"cannot read {path!r}: {error.strerror or error}. Check the disk and its permissions, then run again."
            ) from error
        return ObjectEnd(stored_object(name, status), content)

    def is_settled(self, stored: StoredObject, seen_ns: int) -> bool:
        """Whether the file was so old when it was seen that its next version gets another modification time."""
        return seen_ns - int(stored.etag) > _SETTLED_NS

    def create(self, name: str) -> LocalUpload:
        """Begin an object; its folder must exist (see `prepare`), or is created where it is hidden."""
        return LocalUpload(self.root, name)

    def delete(self, name: str) -> None:
        """Remove an object, and its folder where that is hidden and empty then; harmless when there is none."""
        path = self.root / name
        with storage_errors(path):
            with contextlib.suppress(NotADirectoryError):
                path.unlink(missing_ok=True)
            if is_hidden(name):
                self._remove_empty(name.rpartition("/")[0])

    def sync(self, folder: str) -> None:
        """Make the names of the files published in a folder durable; of a hidden one, also the folders' own names."""
        for part in _with_parents(folder) if is_hidden(folder) else [folder]:
            descriptor = os.open(self.root / part, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def _entries(self, folder: str) -> list[os.DirEntry[str]]:
        try:
            with os.scandir(self.root / folder) as entries:
                return [entry for entry in entries if not entry.name.startswith(".") and is_text(entry.name)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            path = str(self.root / folder)
            raise ConfigError(f"cannot list the output folder {path!r}: {error.strerror}. Make it readable.") from error

    def _remove_empty(self, folder: str) -> None:
        """Remove a folder and those above it, as long as they are empty."""
        for part in _with_parents(folder)[:-1]:
            if not _remove_if_empty(self.root / part):
                break


def _with_parents(folder: str) -> list[PurePosixPath]:
    """The folder and those above it; the last one is the root."""
    path = PurePosixPath(folder)
    return [path, *path.parents]


def _remove_if_empty(folder: Path) -> bool:
    """Remove a folder that holds nothing; returns whether it is removed."""
    try:
        folder.rmdir()
    except (FileNotFoundError, NotADirectoryError):
        return True  # another process removed it
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        return False
    return True
