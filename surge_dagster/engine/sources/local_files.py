"""Source files of a local disk: how they are found, which of them are refused, and how they are opened."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.sources.listing import (
    HIDDEN,
    NO_FILE,
    OWN_FOLDER,
    UNREADABLE_FOLDER,
    NamePattern,
    SourceFile,
    SourceFiles,
)
from surge_dagster.engine.support.keys import is_text

_SETTLED_NS = 2_000_000_000  # longer than the grain of any disk's clock: a younger file may change unnoticed
_MAX_DEPTH = 50  # of folders below the one that is listed
_Found = Iterator[tuple[str, str | OSError | None]]  # names, and why they are refused or unreadable


class LocalFiles(SourceFiles):
    """Files of a disk.

    Args:
        root: the folder.
        name: of the one file in it that counts; empty where all do.
        is_wanted: whether a file of this name counts.
    """

    def __init__(
        self, url: str, root: Path, name: str, pattern: NamePattern | None, is_wanted: Callable[[str], bool]
    ) -> None:
        super().__init__(url, pattern)
        self._root = str(root)
        self._name = name
        self._is_wanted = is_wanted

    @property
    def identity(self) -> str:
        return f"{self._root}/{self._name}"

    def is_settled(self, file: SourceFile) -> bool:
        _, modified, changed, _ = file.state.split("-")
        return time.time_ns() - max(int(modified), int(changed)) > _SETTLED_NS

    def _found(self, scope: str, begin: str) -> Iterator[SourceFile]:
        scope = self._name or scope
        path = f"{self._root}/{scope}" if scope else self._root
        try:
            if scope.startswith(OWN_FOLDER) and "/" not in scope:
                found = self._own_folder(path, scope)
            elif scope and not self._name and os.path.islink(path):  # noqa: PTH114
                found = [(scope, self._refused_link(path))]
            elif scope and not os.path.isdir(path):  # noqa: PTH112
                found = [(scope, None)]
            else:
                found = self._names(path, f"{scope}/" if scope else "", begin)
            for name, refusal in found:
                yield from self._file(name, refusal)
        except OSError as error:
            raise ConfigError(f"cannot list the source {self.url!r}: {error.strerror}. Make it readable.") from error

    def _file(self, relative: str, refusal: str | OSError | None) -> Iterator[SourceFile]:
        path, token, state = f"{self._root}/{relative}", "0-0", "0-0-0-0"
        if isinstance(refusal, OSError):
            yield SourceFile(f"{relative}/", 0, UNREADABLE_FOLDER, partial(_raise, refusal))
            return
        size = 0
        try:
            if refusal is None:
                status = os.stat(path)  # noqa: PTH116, a Path for each file costs more than looking at it
                size = status.st_size
                token = f"{size}-{status.st_mtime_ns}"
                state = f"{token}-{status.st_ctime_ns}-{status.st_ino}"
                if not stat.S_ISREG(status.st_mode):  # opening a pipe may never return
                    refusal = "is a pipe, a socket or a device, not a regular file"
                elif not is_text(relative):
                    refusal = "has a name that is not UTF-8"
        except (FileNotFoundError, NotADirectoryError):
            return  # it was removed meanwhile
        except OSError as error:
            yield SourceFile(relative, 0, "unreadable", partial(_raise, error))
            return
        yield SourceFile(relative, size, token, partial(_open, path, token), refusal, state)

    def _names(self, folder: str, prefix: str, begin: str = "", depth: int = 0) -> _Found:
        """Names of files below a folder, each with the reason to refuse it; links to folders in the root are ignored.

        A folder below it that the system does not show comes with the system's error.

        Args:
            folder: full path.
            prefix: put before each name.
            begin: of the names in the folder itself that count.

        Raises:
            OSError: the system does not show the folder itself.
        """
        try:
            entries = list(os.scandir(folder))
        except FileNotFoundError:
            return
        except NotADirectoryError:
            yield prefix.rstrip("/"), "is not a folder"
            return
        except OSError as error:
            if not depth:
                raise
            yield prefix.rstrip("/"), error
            return
        for entry in entries:
            name = entry.name
            if name.startswith(HIDDEN) or not name.startswith(begin):
                continue
            relative, may_be_file = prefix + name, self._is_wanted(name)
            if entry.is_dir(follow_symlinks=False):
                if depth < _MAX_DEPTH:
                    yield from self._names(entry.path, f"{relative}/", depth=depth + 1)
                else:
                    yield relative, f"lies below {_MAX_DEPTH} nested folders; no more are allowed"
            elif entry.is_symlink() and (refusal := self._refused_link(entry.path)):
                if may_be_file or isinstance(refusal, OSError) or os.path.isdir(entry.path):  # noqa: PTH112
                    yield relative, refusal
            elif may_be_file and not entry.is_dir():
                yield relative, None

    def _own_folder(self, path: str, relative: str) -> _Found:
        """What lies in a folder `partition=…`: whatever it is, it stands for a partition."""
        refusal = self._refused_link(path) if os.path.islink(path) else None  # noqa: PTH114
        is_empty = True
        if refusal is None:
            for found in self._names(path, f"{relative}/", depth=1):
                is_empty = False
                yield found
        if is_empty and os.path.lexists(path):
            yield relative, refusal or NO_FILE

    def _refused_link(self, link: str) -> str | OSError | None:
        """Why a link is not followed, or cannot be; None for one that leads into the root."""
        try:
            catalog, target = os.path.realpath(self._root), os.path.realpath(link, strict=True)
        except (FileNotFoundError, NotADirectoryError):
            return "is a link to nothing"
        except OSError as error:
            return "is one of several links that lead to each other" if error.errno == errno.ELOOP else error
        if target == catalog:
            return "is a link to the catalog itself"
        return None if os.path.commonpath((catalog, target)) == catalog else "is a link out of the catalog"


def _open(path: str, token: str) -> pa.NativeFile:
    file = pa.OSFile(path, "rb")
    status = os.fstat(file.fileno())
    if token == f"{status.st_size}-{status.st_mtime_ns}":
        return file
    file.close()
    raise FileNotFoundError(errno.ENOENT, "another file stands in its place now", path)


def _raise(error: OSError) -> pa.NativeFile:
    raise error
