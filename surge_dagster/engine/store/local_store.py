"""Output files on a local disk; `local_upload` writes them.

The folder itself is flushed once per SuperBatch (`sync`), before its receipts are reported. Hidden
folders, whose names at the root begin with a dot, are created with their first object and removed
with their last.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

import pyarrow as pa

from surge_dagster.engine.errors import ConfigError, TransientError
from surge_dagster.engine.store.local_upload import (
    TEMP_PREFIX,
    LocalUpload,
    remove_dead_temp_files,
    storage_errors,
    stored_object,
)
from surge_dagster.engine.store.store import ObjectEnd, Store, StoredObject, is_hidden
from surge_dagster.engine.support.keys import is_text

# More than the resolution of any disk's clock: a file replaced within that keeps its modification
# time.
_SETTLED_NS = 2_000_000_000


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
            with open(path, "rb", buffering=0) as file:  # noqa: PTH123
                status = os.fstat(file.fileno())
                file.seek(max(0, status.st_size - size))
                content = file.read(size)
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
