"""Output files on a local disk: a temp file in the same folder, flushed to disk and renamed.

The folder itself is flushed once per SuperBatch (`sync`), before its receipts are reported. The last check before a
rename runs under the folder's lock: of two writers, the one out of date loses. Hidden folders come with their first
object and go with their last.

A catalog may have tens of thousands of files of a few kilobytes, so what is done once per file is done with as few
system calls as it takes, on paths that are strings.
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
from surge_dagster.engine.store.local_upload import LocalUpload, StorageErrors, hidden_depth, stored_object
from surge_dagster.engine.store.store import ObjectEnd, StoredObject
from surge_dagster.engine.store.temp_files import (
    TEMP_PREFIX,
    Locked,
    remove_abandoned,
    remove_empty_below,
    remove_if_empty,
    sync_folder,
)
from surge_dagster.engine.support.keys import is_text

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

    def until(self, over: threading.Event) -> Self:
        """The same store: a disk is not waited for."""
        return self

    def location(self, name: str) -> str:
        """Where a person finds the object."""
        return f"{self.root}/{name}"

    def prepare(self, folder: str) -> None:
        """Make a folder ready for writing.

        Raises:
            ConfigError: the folder cannot be written, or its disk does not tell `A` from `a`.
        """
        path = self.root / folder
        try:
            path.mkdir(parents=True, exist_ok=True)
            with Locked(path):
                probe = path / f"{TEMP_PREFIX}probe"
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

    def sweep(self, folder: str) -> None:
        """Remove the temp files of dead writers; of a hidden folder, also those below it, and folders that are empty.

        Raises:
            TransientError: the disk refuses.
        """
        path = self.root / folder
        with StorageErrors(path):
            if hidden_depth(folder.split("/")) is None:
                remove_abandoned(path)
            else:
                remove_empty_below(path)
                self._remove_empty_above(f"{folder}/")

    def list(self, folder: str, *, deep: bool = False) -> Iterator[StoredObject]:
        """Yield the objects of a folder in no particular order; not hidden ones, nor those whose name is not UTF-8.

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
        """Names of the folders at the root, sorted; not hidden ones, nor those whose name is not UTF-8.

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
        return sorted(filter(is_text, names))  # whoever opens what lies in the others would fail

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
        return ObjectEnd(stored_object(name, status), content)

    def is_settled(self, stored: StoredObject, seen_ns: int) -> bool:
        """Whether the file was old enough when it was seen for its next version to get another modification time."""
        return seen_ns - int(stored.etag) > _SETTLED_NS

    def open_listed(self, listed: StoredObject) -> pa.NativeFile:
        """Open an object as a listing showed it.

        Raises:
            FileNotFoundError: it has gone, or another one stands at its name now.
        """
        file = self.open(listed.name)
        if stored_object(listed.name, os.fstat(file.fileno())) == listed:
            return file
        file.close()
        raise FileNotFoundError(errno.ENOENT, "another file stands in its place now", self.location(listed.name))

    def create(self, name: str) -> LocalUpload:
        """Begin an object; its folder must exist (see `prepare`), or is made where it is a hidden one's."""
        return LocalUpload(self.root, name)

    def delete(self, name: str) -> None:
        """Remove an object; harmless when there is none.

        Below a hidden folder, the folders that it was the last object of go with it.
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
            if not remove_if_empty(self.root.joinpath(*parts[:depth])):
                break


def _unlistable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot list the output folder {str(path)!r}: {error.strerror}. Make it readable.")
