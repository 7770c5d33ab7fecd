"""Uploads to a local disk: temp files that take their names, one by one or several together.

A catalog may have tens of thousands of files of a few kilobytes, so what is done once per file is done with as few
system calls as it takes, on paths that are strings, and without context managers, which take longer than some of them.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa

from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.store.store import StoredObject, Upload
from surge_dagster.engine.store.temp_files import Locked, open_temp, open_temp_and_folder


class LocalUpload:
    """A temp file beside its final name."""

    def __init__(self, root: Path, name: str) -> None:
        self._name = name
        self._final = f"{root}/{name}"
        self.folder = self._final.rpartition("/")[0]
        self._sink: pa.NativeFile | None = None
        self._published = False
        try:
            self._temp, self._descriptor = self._open(root)
        except OSError as error:
            raise _unwritable(self._final, error) from error

    def __enter__(self) -> Self:
        return self

    @property
    def sink(self) -> pa.NativeFile:
        """A stream that is opened when it is asked for."""
        if self._sink is None:
            with StorageErrors(self._final):
                self._sink = pa.OSFile(self._temp, "wb")
        return self._sink

    def write(self, data: bytes) -> None:
        """Write the whole object; instead of `sink`."""
        try:
            written = os.write(self._descriptor, data)
            while written < len(data):
                written += os.write(self._descriptor, memoryview(data)[written:])
        except OSError as error:
            raise _unwritable(self._final, error) from error

    def publish(self, still_wanted: Callable[[], None]) -> StoredObject:
        """Make the object appear under its name, complete and flushed to disk.

        Args:
            still_wanted: called last, under the folder's lock; what it raises stops the publication.
        """
        self.flush()
        with StorageErrors(self._final), Locked(self.folder):
            return self.appear(still_wanted)

    def flush(self) -> None:
        """Bring the content to the disk: the first half of `publish`."""
        try:
            if self._sink is not None:
                self._sink.close()
            os.fsync(self._descriptor)
        except OSError as error:
            raise _unwritable(self._final, error) from error

    def appear(self, still_wanted: Callable[[], None]) -> StoredObject:
        """Take the name: the second half of `publish`, for who holds the folder's lock."""
        try:
            still_wanted()
            os.rename(self._temp, self._final)  # noqa: PTH104
            self._published = True
            return stored_object(self._name, os.fstat(self._descriptor))
        except OSError as error:
            raise _unwritable(self._final, error) from error

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

    def _open(self, root: Path) -> tuple[str, int]:
        try:
            return open_temp(self.folder)
        except FileNotFoundError:
            folder = self._name.rpartition("/")[0]
            if hidden_depth(folder.split("/")) is None:
                raise
            return open_temp_and_folder(root, folder)


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
    ours = [upload for upload, _ in uploads if isinstance(upload, LocalUpload)]
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
        with StorageErrors(ours[0].folder), Locked(ours[0].folder):
            for upload, error, (_, still_wanted) in zip(ours, flushed, uploads, strict=True):
                try:
                    outcomes.append(error or upload.appear(still_wanted))
                except Exception as refusal:
                    outcomes.append(refusal)
    except TransientError as error:  # the lock; once it was had, each of them has its own outcome
        return outcomes if len(outcomes) == len(ours) else [error] * len(ours)
    return outcomes


def stored_object(name: str, status: os.stat_result) -> StoredObject:
    """A file as a listing shows it."""
    return StoredObject(name, status.st_size, str(status.st_mtime_ns))


def hidden_depth(parts: Sequence[str]) -> int | None:
    """Which part of a name is the first that hides what lies below it, None when none does."""
    return next((depth for depth, part in enumerate(parts) if part.startswith(".")), None)


class StorageErrors:
    """Turns what the operating system says into an error that names the file and what to do."""

    __slots__ = ("_target",)

    def __init__(self, target: Path | str) -> None:
        self._target = target

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OSError):
            raise _unwritable(self._target, error) from error


def _unwritable(target: Path | str, error: OSError) -> TransientError:
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    hint = "Make room on the disk" if is_full else "Check the disk and its permissions"
    return TransientError(
        f"cannot write {str(target)!r}: {error.strerror or error}. Nothing was left behind. {hint}, then run again."
    )
