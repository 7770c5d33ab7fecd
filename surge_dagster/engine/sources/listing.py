"""The files of a source: a folder, one file or a pattern of names, on a local disk or in a bucket,
listed alike.

    data/catalog                     every file below the folder
    data/products.parquet            one file
    products/*.parquet               `*` stands for any part of a name, `**` for any folders
    gs://shop/{category}/*.parquet   `{name}` is a `*` that has a name

Files come in bytewise order of their relative names, so that a place gives the same rows in the
same order wherever it lies. Nothing is opened. Names that begin with `_` or `.` are left out, of
files and of folders.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from surge_dagster.engine.errors import ConfigError, StoreUnavailable, TransientError
from surge_dagster.engine.sources.file_read import SourceFile
from surge_dagster.engine.sources.formats import is_source_file
from surge_dagster.engine.sources.parquet_files import Footer, read_footer
from surge_dagster.engine.store.local_store import LocalStore, stored_object
from surge_dagster.engine.store.object_client import StorageOptions
from surge_dagster.engine.store.store import Store, StoredObject
from surge_dagster.engine.support.keys import is_text, printable
from surge_dagster.engine.support.printable import visible
from surge_dagster.engine.support.unreadable import UNREADABLE
from surge_dagster.engine.support.urls import is_object_store, local_path

if TYPE_CHECKING:
    from surge_dagster.engine.store.object_store import ObjectStore

FIRST_BYTES = 1024 * 1024  # of the end of an object, that opening it brings
HIDDEN = ("_", ".")
DELTA_LOG = "_delta_log"
# Files and folders of tables whose other files are not what their rows are, by the table's format.
_OF_TABLES = re.compile(
    rf"(?:^|/)(?:(?P<Delta>{DELTA_LOG})|(?P<Hudi>\.hoodie)|"
    r"(?P<Iceberg>metadata/[^/]+\.metadata\.json))(?:/|$)"
)
_NAME = re.compile(r"\{([^{}]*)\}")
_WILD = re.compile(r"(\*\*/?|\*|\{[^{}]*\})")
_WILDCARDS = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}


@dataclass(frozen=True, slots=True)
class NamePattern:
    """What relative names of files must match, and the names that it gives to parts of them."""

    text: str
    regex: re.Pattern[str]
    names: tuple[str, ...]

    @property
    def mixes_partitions(self) -> bool:
        """Whether one folder may have files of several partitions."""
        star = self.text.find("*")
        return star >= 0 and "{" in self.text[self.text.rfind("/", 0, star) + 1 :]

    def names_in(self, relative: str) -> tuple[str, str, dict[str, str]]:
        """Return the folder (or file) and beginning of names of all files with the same names,
        and the names."""
        match = self.regex.fullmatch(relative)
        names = match.groupdict() if match else {}
        parts = self.text.split("/")
        fixed = next((number for number, part in enumerate(parts) if "*" in part), None)
        if fixed is None:
            return relative, "", names
        begin = _NAME.sub(lambda found: names[found[1]], parts[fixed].partition("*")[0])
        return "/".join(relative.split("/")[:fixed]), begin, names


class SourceFiles(ABC):
    """A place with files of known formats; each listing reads it again.

    Attributes:
        identity: distinguishes this place from every other one, without secrets.
    """

    def __init__(self, url: str, store: Store, name: str, pattern: NamePattern | None) -> None:
        self.url = url
        self.pattern = pattern
        self.is_remote = store.is_remote
        self.identity = f"{store.identity}/{name}"
        self._store = store
        self._name = name

    def list(self, scope: str = "") -> list[SourceFile]:
        """Return the files in bytewise order of their relative names.

        Args:
            scope: one file, or a folder with all that lies below it; empty is all.
        """
        files: Iterable[SourceFile] = self._found(scope)
        if (pattern := self.pattern) is not None:
            files = (file for file in files if pattern.regex.fullmatch(file.relative))
        return sorted(files, key=lambda file: os.fsencode(file.relative))

    def footers(self, files: Sequence[SourceFile]) -> Generator[Footer | Exception]:
        """Yield the footer of each Parquet file, or why it cannot be read; a store that does not
        answer raises."""
        listed = {file.stored.name: file.stored for file in files}

        def read(store: Store, name: str) -> Footer | Exception:
            try:
                with store.open(name, listed[name]) as file:
                    return read_footer(file)
            except StoreUnavailable:
                raise
            except (*UNREADABLE, TransientError) as error:
                return error.with_traceback(None)  # it may be kept for long, and frames with it

        yield from self._store.reads_ahead(list(listed), read)

    @abstractmethod
    def _found(self, scope: str) -> Iterator[SourceFile]: ...


def require_no_table(url: str, relative: str) -> None:
    """Raise `ConfigError` if a name in a source's listing belongs to a table."""
    found = _OF_TABLES.search(relative)
    if found is None:
        return
    place = visible(printable(relative[: found.start()])) or "."
    kind = found.lastgroup
    raise ConfigError(
        f"the source {url!r} has a table of {kind} in {place!r}, whose files are not its rows: "
        f"deleted and old ones are among them. {remedy_of_table(kind)}"
    )


def remedy_of_table(kind: str | None) -> str:
    """Return what to give instead of the files of a table of this format."""
    if kind == "Delta":
        return "Give the folder of the table as the source."
    return "Give a query's result or a copy of it as files."


def table_format(folder: Path) -> str | None:
    """Return the format of the table whose folder this is on a disk; None if it is not one."""
    for name, kind in ((DELTA_LOG, "Delta"), (".hoodie", "Hudi")):
        if os.path.isdir(folder / name):  # noqa: PTH112
            return kind
    with contextlib.suppress(OSError):  # a folder that may not be read
        if any(folder.glob("metadata/[v0-9]*.metadata.json")):
            return "Iceberg"
    return None


def split_pattern(url: str) -> tuple[str, NamePattern | None]:
    """Return the folder above the first wildcard of a path or URL, and the pattern below it."""
    first = _WILD.search(url)
    if first is None:
        return url, None
    base, slash, begin = url[: first.start()].rpartition("/")
    text = begin + url[first.start() :]
    pieces: list[str] = []
    names: list[str] = []
    for piece in _WILD.split(text):
        if not piece.startswith("{"):
            pieces.append(_WILDCARDS.get(piece) or re.escape(piece))
            continue
        name = piece[1:-1]
        if not name.isidentifier() or name in names:
            problem = "is there twice" if name in names else "is not a name"
            raise ConfigError(
                f"the pattern {url!r} cannot be used: {name!r} in braces {problem}. "
                "Use names such as {category}, each once; * stands for any part of a name."
            )
        names.append(name)
        pieces.append(f"(?P<{name}>[^/]+)")
    return base or slash, NamePattern(text, re.compile("".join(pieces), re.DOTALL), tuple(names))


class LocalFiles(SourceFiles):
    """Files in a folder of a disk; with a name, only the file of this name."""

    def __init__(self, url: str, root: Path, name: str, pattern: NamePattern | None) -> None:
        super().__init__(url, LocalStore(root), name, pattern)
        self._root = str(root)

    def _found(self, scope: str) -> Iterator[SourceFile]:
        try:
            for name, refusal in self._names(scope):
                yield from self._file(name, refusal)
        except OSError as error:
            shown = visible(str(error.filename or self._root))
            raise ConfigError(
                f"cannot list the source {self.url!r}: {shown!r}: {error.strerror}. "
                "Make it readable, then run again."
            ) from error

    def _names(self, scope: str) -> Iterator[tuple[str, str | None]]:
        """Yield the names of files, each with the reason if it is refused."""
        path = f"{self._root}/{scope}"
        if self._name:
            yield self._name, None
        elif not scope:
            yield from self._walk(self._root, "")
        elif os.path.islink(path):  # noqa: PTH114
            yield scope, self._refusal_of_link(path)
        elif os.path.isdir(path):  # noqa: PTH112
            yield from self._walk(path, f"{scope}/")
        else:
            yield scope, None

    def _walk(self, folder: str, prefix: str) -> Iterator[tuple[str, str | None]]:
        try:
            entries = list(os.scandir(folder))
        except (FileNotFoundError, NotADirectoryError):
            return  # it was removed since its parent was listed
        for entry in entries:
            name = entry.name
            relative = prefix + name
            require_no_table(self.url, relative)
            if name.startswith(HIDDEN):
                continue
            if entry.is_symlink():
                # Other links to folders of the catalog are listed where these lie.
                if is_source_file(name) or "=" in name or not self._is_inside(entry.path):
                    yield relative, self._refusal_of_link(entry.path)
            elif entry.is_dir():
                yield from self._walk(entry.path, f"{relative}/")
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


class BucketFiles(SourceFiles):
    """The folder or object of a name below the store's own folder; without a name all of it."""

    def __init__(
        self, url: str, store: ObjectStore, name: str, pattern: NamePattern | None
    ) -> None:
        super().__init__(url, store, name, pattern)
        self._bucket = store
        self._above = f"{name}/" if name else ""

    def _found(self, scope: str) -> Iterator[SourceFile]:
        for stored in self._stored(f"{self._above}{scope}".rstrip("/")):
            relative = stored.name.removeprefix(self._above)
            if stored.name == self._name:
                relative = stored.name.rpartition("/")[2]
            require_no_table(self.url, relative)
            is_hidden = any(part.startswith(HIDDEN) for part in relative.split("/"))
            if is_source_file(relative) and not is_hidden:
                yield SourceFile(
                    relative=relative,
                    stored=stored,
                    token=stored.etag or str(stored.size),
                    open=partial(self._open, stored),
                )

    def _stored(self, place: str) -> Sequence[StoredObject]:
        """Return what lies in a folder, or the object of this name."""
        found = list(self._bucket.list(place, deep=True, hidden=True))
        if found or not place:
            return found
        try:
            return [self._bucket.read_end(place, 1).stored]
        except FileNotFoundError:
            return []

    def _open(self, stored: StoredObject) -> pa.NativeFile:
        return self._bucket.open(stored.name, stored, tail_bytes=FIRST_BYTES)


def open_files(url: str | Path, options: StorageOptions | None = None) -> SourceFiles:
    """Open a folder, one file or a pattern for listing; a bucket gets no request yet.

    A local path that exists is not a pattern, whatever its name is.
    """
    text = str(url)
    if is_object_store(text):
        return _open_bucket(text, options)
    path = local_path(url, what="source")
    try:
        if path.is_dir():
            return LocalFiles(text, path, "", None)
        if path.exists():
            return LocalFiles(text, path.parent, path.name, None)
        base, pattern = split_pattern(str(path))
        if pattern is not None and Path(base).is_dir():
            return LocalFiles(text, Path(base), "", pattern)
    except OSError as error:
        raise ConfigError(f"cannot open the source {text!r}: {error.strerror}.") from error
    missing = "such file or folder"
    if pattern is not None:
        missing = f"folder {base!r}"
    raise ConfigError(
        f"no catalog at {str(path.absolute())!r}: there is no {missing}. Check the path and "
        "whether it is mounted, or build one with `surge-dagster catalog demo --out DATA`."
    )


def _open_bucket(url: str, options: StorageOptions | None) -> SourceFiles:
    from surge_dagster.engine.store.object_store import open_object_store

    base, pattern = split_pattern(url)
    above = base.rstrip("/")
    name = ""
    if pattern is None and above.count("/") > 2:
        above, _, name = above.rpartition("/")
    return BucketFiles(url, open_object_store(above, options, what="source"), name, pattern)
