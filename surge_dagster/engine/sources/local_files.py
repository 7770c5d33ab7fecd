"""Source files of a local disk: how they are found, which of them are refused, and how they are
opened."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.sources.endings import is_source_file
from surge_dagster.engine.sources.listing import (
    HIDDEN,
    UNREADABLE_FOLDER,
    NamePattern,
    SourceFile,
    SourceFiles,
)
from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.engine.store.local_upload import stored_object
from surge_dagster.engine.store.store import StoredObject
from surge_dagster.engine.support.keys import is_text

# longer than the grain of any disk's clock: a younger file may change unnoticed
_SETTLED_NS = 2_000_000_000
_MAX_DEPTH = 50  # of folders below the one that is listed
_Names = Iterator[tuple[str, str | OSError | None]]  # names, and why they are refused or unreadable


class LocalFiles(SourceFiles):
    """Files in a folder of a disk; where a name is given, the one of this name alone."""

    def __init__(self, url: str, root: Path, name: str, pattern: NamePattern | None) -> None:
        super().__init__(url, pattern)
        self._root = str(root)
        self._store = LocalStore(root)
        self._name = name

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
            is_link = bool(scope) and not self._name and os.path.islink(path)  # noqa: PTH114
            if refusal := is_link and self._refused_link(path):
                names: _Names = iter([(scope, refusal)])
            elif scope and not os.path.isdir(path):  # noqa: PTH112
                names = iter([(scope, None)])
            else:
                names = self._names(path, f"{scope}/" if scope else "", begin, follow=not is_link)
            for name, refusal in names:
                yield from self._file(name, refusal)
        except OSError as error:
            raise ConfigError(
                f"cannot list the source {self.url!r}: {error.strerror}. Make it readable."
            ) from error

    def _file(self, relative: str, refusal: str | OSError | None) -> Iterator[SourceFile]:
        path, stored, state = f"{self._root}/{relative}", StoredObject(relative, 0, "0"), "0-0-0-0"
        if isinstance(refusal, OSError):
            yield SourceFile(f"{relative}/", 0, UNREADABLE_FOLDER, partial(_raise, refusal))
            return
        try:
            if refusal is None:
                status = os.stat(path)  # noqa: PTH116, a Path for each file costs more than looking at it
                stored = stored_object(relative, status)
                state = f"{stored.size}-{stored.etag}-{status.st_ctime_ns}-{status.st_ino}"
                if not stat.S_ISREG(status.st_mode):  # opening a pipe may never return
                    refusal = "is a pipe, a socket or a device, not a regular file"
                elif not is_text(relative):
                    refusal = "has a name that is not UTF-8"
        except (FileNotFoundError, NotADirectoryError):
            return  # it was removed meanwhile
        except OSError as error:
            yield SourceFile(relative, 0, "unreadable", partial(_raise, error))
            return
        token, opened = f"{stored.size}-{stored.etag}", partial(self._store.open, relative, stored)
        yield SourceFile(relative, stored.size, token, opened, refusal, state)

    def _names(self, folder: str, prefix: str, begin: str = "", *, follow: bool = True) -> _Names:
        # Of links to folders in the root, those to hidden ones alone are followed (the others are
        # listed where they lie), and not within such a folder, which may link to itself.
        try:
            entries = list(os.scandir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return  # it was removed meanwhile
        except OSError as error:
            if not prefix:
                raise
            yield prefix.rstrip("/"), error
            return
        for entry in entries:
            name = entry.name
            if name.startswith(HIDDEN) or not name.startswith(begin):
                continue
            relative, may_be_file = prefix + name, is_source_file(name)
            is_link = entry.is_symlink()
            if is_link and (refusal := self._refused_link(entry.path)):
                is_folder = "=" in name or os.path.isdir(entry.path)  # noqa: PTH112
                if may_be_file or is_folder or isinstance(refusal, OSError):
                    yield relative, refusal
            elif not entry.is_dir():
                if may_be_file:
                    yield relative, None
            elif prefix.count("/") == _MAX_DEPTH:
                yield relative, f"lies below {_MAX_DEPTH} nested folders; no more are allowed"
            elif not is_link or (follow and self._is_hidden(entry.path)):
                yield from self._names(entry.path, f"{relative}/", follow=follow and not is_link)

    def _refused_link(self, link: str) -> str | OSError | None:
        """Why a link is not followed, or cannot be; None for one that leads into the root."""
        try:
            catalog, target = os.path.realpath(self._root), os.path.realpath(link, strict=True)
        except (FileNotFoundError, NotADirectoryError):
            return "is a link to nothing"
        except OSError as error:
            return (
                "is one of several links that lead to each other"
                if error.errno == errno.ELOOP
                else error
            )
        if target == catalog:
            return "is a link to the catalog itself"
        return (
            None
            if os.path.commonpath((catalog, target)) == catalog
            else "is a link out of the catalog"
        )

    def _is_hidden(self, link: str) -> bool:
        relative = os.path.relpath(os.path.realpath(link), os.path.realpath(self._root))
        return any(part.startswith(HIDDEN) for part in relative.split("/"))


def _raise(error: OSError) -> pa.NativeFile:
    raise error
