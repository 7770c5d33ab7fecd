"""Output files on a local disk; `local_upload` writes them.

The folder itself is flushed once per SuperBatch (`sync`), before its receipts are reported. Hidden folders are created
with their first object and removed with their last.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

import pyarrow as pa

from surge_dagster.engine.errors import ConfigError, TransientError
from surge_dagster.engine.store.local_upload import (
    LOCK_NAME,
    TEMP_PREFIX,
    LocalUpload,
    StorageErrors,
    hidden_depth,
    remove_dead_temp_files,
    stored_object,
    sync_folder,
)
from surge_dagster.engine.store.store import ObjectEnd, StoredObject
from surge_dagster.engine.support.keys import is_text

# More than the resolution of any disk's clock: a file replaced within that keeps its modification time.
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
        """False: reading a footer is faster than a thread or a cache."""
        return False

    @property
    def retries(self) -> Mapping[str, int]:
        """Empty: nothing is tried again, because a disk that refuses once refuses twice."""
        return {}

    @property
    def upload_bytes(self) -> int:
        """0: written bytes go to the disk's own buffers."""
        return 0

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
                "a file. "
                "Put the output on a disk that does."
            )

    def sweep(self, folder: str) -> None:
        """Remove the temp files of dead writers; of a hidden folder, also those below it, and folders that are empty.

        Raises:
            TransientError: the disk refuses.
        """
        path = self.root / folder
        with StorageErrors(path):
            if hidden_depth(folder.split("/")) is None:
                remove_dead_temp_files(path)
            else:
                _remove_empty_below(path)
                self._remove_empty_above(f"{folder}/")

    def list(self, folder: str, *, deep: bool = False) -> Iterator[StoredObject]:
        """Yield the objects of a folder in no particular order, without hidden ones and names that are not UTF-8.

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
        prefix = f"{folder}/" if folder else ""
        with entries:
            for entry in entries:
                name = entry.name
                if name.startswith(".") or not is_text(name):
                    continue
                if deep and entry.is_dir(follow_symlinks=False):
                    yield from self.list(f"{prefix}{name}", deep=True)
                elif entry.is_file():
                    try:
                        status = entry.stat()
                    except FileNotFoundError:
                        continue  # replaced or removed while the folder is being listed
                    yield stored_object(f"{prefix}{name}", status)

    def folders(self) -> list[str]:
        """Names of the folders at the root, sorted, without hidden ones and names that are not UTF-8.

        Raises:
            ConfigError: the root cannot be listed.
        """
        try:
            entries = list(os.scandir(self.root))
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise _unlistable(self.root, error) from error
        names = (entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
        return sorted(filter(is_text, names))

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
            TransientError: the disk does not return it.
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
        return ObjectEnd(stored_object(name, status), content)

    def is_settled(self, stored: StoredObject, seen_ns: int) -> bool:
        """Whether the file was so old when it was seen that its next version gets another modification time."""
        return seen_ns - int(stored.etag) > _SETTLED_NS

    def open_listed(self, listed: StoredObject) -> pa.NativeFile:
        """Open an object as a listing showed it.

        Raises:
            FileNotFoundError: it was removed or replaced since.
        """
        file = self.open(listed.name)
        if stored_object(listed.name, os.fstat(file.fileno())) == listed:
            return file
        file.close()
        raise FileNotFoundError(errno.ENOENT, "another file stands in its place now", self.location(listed.name))

    def create(self, name: str) -> LocalUpload:
        """Begin an object; its folder must exist (see `prepare`), or is created where it is hidden."""
        return LocalUpload(self.root, name)

    def delete(self, name: str) -> None:
        """Remove an object; harmless when there is none.

        Below a hidden folder, the folders that are empty then are removed too.
        """
        path = self.root / name
        with StorageErrors(path):
            with contextlib.suppress(NotADirectoryError):
                path.unlink(missing_ok=True)
            self._remove_empty_above(name)

    def sync(self, folder: str) -> None:
        """Make the names of the files published in a folder durable."""
        sync_folder(self.root / folder)

    def _remove_empty_above(self, name: str) -> None:
        parts = name.split("/")[:-1]
        hidden = hidden_depth(parts)
        if hidden is None:
            return
        for depth in range(len(parts), hidden, -1):
            if not _remove_if_empty(self.root.joinpath(*parts[:depth])):
                break


def _remove_empty_below(folder: Path) -> None:
    """`_remove_if_empty` for all folders below this one, and for itself."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        for entry in list(os.scandir(folder)):
            if entry.is_dir(follow_symlinks=False):
                _remove_empty_below(Path(entry))
        _remove_if_empty(folder)


def _remove_if_empty(folder: Path) -> bool:
    """Remove a folder that holds nothing, or only what dead writers left; gives whether it is removed."""
    try:
        remove_dead_temp_files(folder)
        if [entry.name for entry in os.scandir(folder)] == [LOCK_NAME]:  # left by an earlier release
            (folder / LOCK_NAME).unlink(missing_ok=True)
        folder.rmdir()
    except (FileNotFoundError, NotADirectoryError):
        return True  # another process removed it
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:
            raise
        return False
    return True


def _unlistable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot list the output folder {str(path)!r}: {error.strerror}. Make it readable.")
