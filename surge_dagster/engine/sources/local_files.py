"""Source files of a local disk: how they are found, which are refused, and how they are opened."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.sources.formats import is_source_file
from surge_dagster.engine.sources.listing import (
    HIDDEN,
    NamePattern,
    SourceFile,
    SourceFiles,
    require_no_table,
)
from surge_dagster.engine.store.local_store import LocalStore, stored_object
from surge_dagster.engine.support.keys import is_text
from surge_dagster.engine.support.unreadable import visible


class LocalFiles(SourceFiles):
    """Files in a folder of a disk; with a name, only the file of this name."""

    def __init__(self, url: str, root: Path, name: str, pattern: NamePattern | None) -> None:
        super().__init__(url, LocalStore(root), name, pattern)
        self._root = str(root)

    def _found(self, scope: str, begin: str) -> Iterator[SourceFile]:
        try:
            for name, refusal in self._names(scope, begin):
                yield from self._file(name, refusal)
        except OSError as error:
            shown = visible(str(error.filename or self._root))
            raise ConfigError(
                f"cannot list the source {self.url!r}: {shown!r}: {error.strerror}. "
                "Make it readable, then run again."
            ) from error

    def _names(self, scope: str, begin: str) -> Iterator[tuple[str, str | None]]:
        """Yield the names of files, each with the reason if it is refused."""
        path = f"{self._root}/{scope}"
        if self._name:
            yield self._name, None
        elif not scope:
            yield from self._walk(self._root, "", begin)
        elif os.path.islink(path):  # noqa: PTH114
            yield scope, self._refusal_of_link(path)
        elif os.path.isdir(path):  # noqa: PTH112
            yield from self._walk(path, f"{scope}/", begin)
        else:
            yield scope, None

    def _walk(self, folder: str, prefix: str, begin: str) -> Iterator[tuple[str, str | None]]:
        try:
            entries = list(os.scandir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return  # it was removed since its parent was listed
        for entry in entries:
            name = entry.name
            relative = prefix + name
            require_no_table(self.url, relative)
            if name.startswith(HIDDEN) or not name.startswith(begin):
                continue
            if entry.is_symlink():
                # Other links to folders of the catalog are listed where these lie.
                if is_source_file(name) or "=" in name or not self._is_inside(entry.path):
                    yield relative, self._refusal_of_link(entry.path)
            elif entry.is_dir():
                yield from self._walk(entry.path, f"{relative}/", "")
            elif is_source_file(name):
                yield relative, None

    def _is_inside(self, link: str) -> bool:
        root = os.path.realpath(self._root)
        return os.path.realpath(link).startswith(f"{root}{os.sep}")

    def _refusal_of_link(self, link: str) -> str | None:
        """Return why a link is not followed; None for one to a file of the catalog."""
        if self._is_inside(link) and os.path.isfile(link):  # noqa: PTH113
            return None
        return "is a link, and only links to files of the source are followed"

    def _file(self, relative: str, refusal: str | None) -> Iterator[SourceFile]:
        path = f"{self._root}/{relative}"
        try:
            # A Path for each file costs more than looking at the file.
            status = os.stat(path, follow_symlinks=refusal is None)  # noqa: PTH116
        except (FileNotFoundError, NotADirectoryError):
            return  # it was removed since its folder was listed
        if refusal is None and not stat.S_ISREG(status.st_mode):  # opening a pipe may never return
            refusal = "is a pipe, a socket or a device, not a regular file"
        elif not is_text(relative):
            refusal = "has a name that is not UTF-8"
        stored = stored_object(relative, status)
        yield SourceFile(
            relative=relative,
            stored=stored,
            token=f"{stored.size}-{stored.etag}",
            open=partial(self._store.open, relative, stored),
            refusal=refusal,
        )
