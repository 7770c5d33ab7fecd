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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa

from surge_dagster.engine.errors import ConfigError, TransientError
from surge_dagster.engine.output.store import ObjectEnd, StoredObject, Upload
from surge_dagster.engine.output.temp_files import (
    TEMP_PREFIX,
    Locked,
    open_temp,
    open_temp_and_folder,
    remove_abandoned,
    remove_empty_below,
    remove_if_empty,
    sync_folder,
)

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
        with _StorageErrors(path):
            if _hidden_depth(folder.split("/")) is None:
                remove_abandoned(path)
            else:
                remove_empty_below(path)
                self._remove_empty_above(f"{folder}/")

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
        prefix = f"{folder}/" if folder else ""
        with entries:
            for entry in entries:
                name = entry.name
                if name.startswith("."):
                    continue
                if deep and entry.is_dir(follow_symlinks=False):
                    yield from self.list(f"{prefix}{name}", deep=True)
                elif entry.is_file():
                    try:
                        status = entry.stat()
                    except FileNotFoundError:
                        continue  # replaced or removed while the folder is being listed
                    yield _stored(f"{prefix}{name}", status)

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

    def open_listed(self, listed: StoredObject) -> pa.NativeFile:
        """Open an object as a listing showed it.

        Raises:
            FileNotFoundError: it has gone, or another one stands at its name now.
        """
        file = self.open(listed.name)
        if _stored(listed.name, os.fstat(file.fileno())) == listed:
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
        with _StorageErrors(path):
            with contextlib.suppress(NotADirectoryError):
                path.unlink(missing_ok=True)
            self._remove_empty_above(name)

    def sync(self, folder: str) -> None:
        """Make the names of the files published in a folder durable."""
        sync_folder(self.root / folder)

    def _remove_empty_above(self, name: str) -> None:
        parts = name.split("/")[:-1]
        hidden = _hidden_depth(parts)
        if hidden is None:
            return
        for depth in range(len(parts), hidden, -1):
            if not remove_if_empty(self.root.joinpath(*parts[:depth])):
                break


class LocalUpload:
    """A temp file beside its final name."""

    def __init__(self, root: Path, name: str) -> None:
        self._name = name
        self._final = f"{root}/{name}"
        self.folder = self._final.rpartition("/")[0]
        folder = name.rpartition("/")[0]
        hidden = _hidden_depth(folder.split("/")) is not None
        with _StorageErrors(self._final):
            self._temp, self._descriptor = open_temp_and_folder(root, folder) if hidden else open_temp(self.folder)
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
        self.flush()
        with _StorageErrors(self._final), Locked(self.folder):
            return self.appear(still_wanted)

    def flush(self) -> None:
        """Bring the content to the disk: the first half of `publish`."""
        with _StorageErrors(self._final):
            if self._sink is not None:
                self._sink.close()
            os.fsync(self._descriptor)

    def appear(self, still_wanted: Callable[[], None]) -> StoredObject:
        """Take the name: the second half of `publish`, for who holds the folder's lock."""
        with _StorageErrors(self._final):
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


def publish_together(
    uploads: Sequence[tuple[Upload, Callable[[], None]]],
) -> list[StoredObject | Exception]:
    """Publish several uploads, each with its last look, as their own `publish` would.

    Files of one folder are all flushed before the first one takes its name, and the folder is locked once: a disk that
    is told of many files in a row flushes them together. Uploads of any other kind publish themselves.

    Returns:
        For each what was published, or what it raised; one that fails holds up no other.
    """
    outcomes: list[StoredObject | Exception] = []
    ours = [upload for upload, _ in uploads if type(upload) is LocalUpload]
    if len(ours) < len(uploads) or len({upload.folder for upload in ours}) != 1:
        for upload, still_wanted in uploads:
            try:
                outcomes.append(upload.publish(still_wanted))
            except Exception as error:
                outcomes.append(error)
        return outcomes
    flushed: list[Exception | None] = []
    for upload in ours:
        try:
            upload.flush()
            flushed.append(None)
        except Exception as error:
            flushed.append(error)
    try:
        with _StorageErrors(ours[0].folder), Locked(ours[0].folder):
            for upload, error, (_, still_wanted) in zip(ours, flushed, uploads, strict=True):
                try:
                    outcomes.append(error or upload.appear(still_wanted))
                except Exception as refusal:
                    outcomes.append(refusal)
    except TransientError as error:  # the lock: none of them has taken its name
        return [error] * len(ours)
    return outcomes


def _stored(name: str, status: os.stat_result) -> StoredObject:
    return StoredObject(name, status.st_size, str(status.st_mtime_ns))


def _unlistable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"cannot list the output folder {str(path)!r}: {error.strerror}. Make it readable.")


def _hidden_depth(parts: Sequence[str]) -> int | None:
    """Which part of a name is the first that hides what lies below it, None when none does."""
    return next((depth for depth, part in enumerate(parts) if part.startswith(".")), None)


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
