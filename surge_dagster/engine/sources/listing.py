"""The files of a source: a folder, one file or a pattern of names, on a local disk or in a bucket, listed alike.

    data/catalog                     every file below the folder
    data/products.parquet            one file
    products/*.parquet               `*` stands for any part of a name, `**` for any folders
    gs://shop/{category}/*.parquet   `{name}` is a `*` that has a name

Files come in bytewise order of their relative names, so that a place gives the same rows in the same order wherever it
lies. Nothing is opened. Names that begin with `_` or `.` are left out, of files and of folders.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa

from surge_dagster.engine.errors import ConfigError, StoreUnavailable, TransientError
from surge_dagster.engine.store.concurrent_reads import reads_ahead
from surge_dagster.engine.store.object_client import StorageOptions
from surge_dagster.engine.store.store import Store, StoredObject
from surge_dagster.engine.support.keys import is_text, printable
from surge_dagster.engine.support.unreadable import UNREADABLE, visible
from surge_dagster.engine.support.urls import is_object_store, local_path

if TYPE_CHECKING:
    from surge_dagster.engine.store.object_store import ObjectStore

T = TypeVar("T")
FIRST_BYTES = 1024 * 1024  # of the end of an object, that opening it brings
_NO_ETAG = "size-"
_SETTLED_NS = 2_000_000_000  # longer than the grain of any disk's clock: a younger file may change unnoticed
_MAX_DEPTH = 50  # of folders below the one that is listed
HIDDEN = ("_", ".")
NOT_REGULAR = "is a pipe, a socket or a device, not a regular file"
UNREADABLE_FOLDER = "unreadable folder"  # the token of a folder that the system does not show; its name ends in a slash
_NAME = re.compile(r"\{([^{}]*)\}")
_WILD = re.compile(r"(\*\*/?|\*|\{[^{}]*\})")


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file, as a listing showed it.

    Attributes:
        relative: name below the folder that was listed, with `/` between its parts; not valid text where a name on the
            disk is not UTF-8.
        size: bytes.
        token: changes when the content may have changed: the etag, or size and modification time on a disk.
        open: opens this version of the file for reading. Raises FileNotFoundError where it was removed or replaced,
            TransientError where a bucket does not answer, and OSError where a disk does not.
        refusal: why it must not be opened, as the end of a sentence that begins with its name.
    """

    relative: str
    size: int
    token: str
    open: Callable[[], pa.NativeFile]
    refusal: str | None = None

    @property
    def shown(self) -> str:
        """The name in messages."""
        return visible(printable(self.relative))


@dataclass(frozen=True, slots=True)
class NamePattern:
    """What the relative names of files have to match.

    Attributes:
        text: the pattern.
        names: that it gives to parts of a file's name.
    """

    text: str
    regex: re.Pattern[str]
    names: tuple[str, ...]

    def matches(self, relative: str) -> bool:
        """Whether a file counts."""
        return bool(self.regex.fullmatch(relative))

    def names_in(self, relative: str) -> tuple[str, str, dict[str, str]]:
        """Where all files of the same names lie, and these by name; of a file that counts.

        The first is a file, or a folder; of a folder, the second is how the names in it begin.
        """
        match = self.regex.fullmatch(relative)
        names = match.groupdict() if match else {}
        parts = self.text.split("/")
        fixed = next((number for number, part in enumerate(parts) if "*" in part), None)
        if fixed is None:
            return relative, "", names
        begin = _NAME.sub(lambda found: names[found[1]], parts[fixed].partition("*")[0])
        return "/".join(relative.split("/")[:fixed]), begin, names


class SourceFiles(ABC):
    """A place with files; each listing looks anew.

    Attributes:
        url: the place as it was given, for messages.
        pattern: what the relative names have to match; None where all count.
    """

    def __init__(self, url: str, pattern: NamePattern | None) -> None:
        self.url = url
        self.pattern = pattern

    def list(self, scope: str = "", begin: str = "") -> list[SourceFile]:
        """The files in bytewise order of their relative names.

        Args:
            scope: relative name of one file, or of a folder with all that lies below it; empty is all.
            begin: of a folder, those files alone whose names in it begin so.

        Raises:
            ConfigError: the folder cannot be listed.
            TransientError: the bucket does not answer.
        """
        found = [file for file in self._found(scope, begin) if self._counts(file)]
        return sorted(found, key=lambda file: os.fsencode(file.relative))

    def _counts(self, file: SourceFile) -> bool:
        return self.pattern is None or file.token == UNREADABLE_FOLDER or self.pattern.matches(file.relative)

    @property
    def is_remote(self) -> bool:
        """Whether opening a file is a request."""
        return False

    @property
    @abstractmethod
    def identity(self) -> str:
        """Distinguishes this place from every other one, without secrets."""

    @abstractmethod
    def is_settled(self, file: SourceFile) -> bool:
        """Whether the file's next version is sure to have another token."""

    def ends(self, files: Sequence[SourceFile], read: Callable[[pa.NativeFile], T]) -> Generator[T | Exception]:
        """What `read` finds at the end of each file, or its error; in a bucket the next ones are read ahead.

        Raises:
            StoreUnavailable: the bucket does not answer at all.
        """
        for file in files:
            yield _read_end(file.open, read)

    @abstractmethod
    def _found(self, scope: str, begin: str) -> Iterator[SourceFile]: ...


def open_files(
    url: str | Path, options: StorageOptions | None = None, is_wanted: Callable[[str], bool] = bool
) -> SourceFiles:
    """Open a place for listing; in a bucket nothing is requested yet.

    Args:
        url: a local path, `file://` URL or URL of a bucket: a folder, one file or a pattern. A local path that exists
            is no pattern, whatever its name is.
        options: how a bucket is reached.
        is_wanted: whether a file of this name counts.

    Raises:
        ConfigError: there is no such local path, the pattern is none, or there are no credentials.
    """
    text = str(url)
    if is_object_store(text):
        from surge_dagster.engine.store.object_store import open_object_store

        base, pattern = split_pattern(text)
        above, name = base.rstrip("/"), ""
        if pattern is None and above.count("/") > 2:
            above, _, name = above.rpartition("/")
        return _BucketFiles(text, open_object_store(above, options, what="source"), name, pattern, is_wanted)
    path = local_path(url, what="source")
    try:
        if path.is_dir():
            return _LocalFiles(text, path, "", None, is_wanted)
        if path.exists():
            return _LocalFiles(text, path.parent, path.name, None, is_wanted)
        base, pattern = split_pattern(str(path))
        if pattern is not None and Path(base).is_dir():
            return _LocalFiles(text, Path(base), "", pattern, is_wanted)
    except OSError as error:
        raise ConfigError(f"cannot open the source {text!r}: {error.strerror}.") from error
    missing = "such file or folder" if pattern is None else f"folder {base!r}"
    raise ConfigError(
        f"no catalog at {text!r}: there is no {missing}. Build one with `surge-dagster catalog demo --out DATA`, or "
        "give the path of your own."
    )


def split_pattern(url: str) -> tuple[str, NamePattern | None]:
    """The folder above the first part of a path or URL that has a wildcard, and what names below it have to match.

    Raises:
        ConfigError: a name in braces is none, or comes twice.
    """
    first = _WILD.search(url)
    if first is None:
        return url, None
    base, slash, begin = url[: first.start()].rpartition("/")
    text = begin + url[first.start() :]
    pieces, names = list[str](), list[str]()
    for piece in _WILD.split(text):
        if piece.startswith("{"):
            name = piece[1:-1]
            if not name.isidentifier() or name in names:
                problem = "comes twice" if name in names else "is no name"
                raise ConfigError(
                    f"the pattern {url!r} cannot be used: {name!r} in braces {problem}. Expected names such as "
                    "{category}, each once; * stands for any part of a name."
                )
            names.append(name)
            pieces.append(f"(?P<{name}>[^/]+)")
        else:
            pieces.append({"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*"}.get(piece) or re.escape(piece))
    return base or slash, NamePattern(text, re.compile("".join(pieces), re.DOTALL), tuple(names))


class _LocalFiles(SourceFiles):
    """Files of a disk.

    Args:
        root: the folder.
        name: of the one file in it that counts; empty where all do.
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
        return time.time_ns() - int(file.token.rpartition("-")[2]) > _SETTLED_NS

    def _found(self, scope: str, begin: str) -> Iterator[SourceFile]:
        scope = self._name or scope
        path = f"{self._root}/{scope}" if scope else self._root
        is_link = bool(scope) and not self._name and os.path.islink(path)  # noqa: PTH114
        if scope and (is_link or not os.path.isdir(path)):  # noqa: PTH112
            yield from self._file(scope, refused_link(self._root, path) if is_link else None)
            return
        prefix = f"{scope}/" if scope else ""
        try:
            for name, refusal in local_names(self._root, path, self._is_wanted, prefix):
                if name.startswith(prefix + begin):
                    yield from self._file(name, refusal)
        except OSError as error:
            raise ConfigError(f"cannot list the source {self.url!r}: {error.strerror}. Make it readable.") from error

    def _file(self, relative: str, refusal: str | OSError | None) -> Iterator[SourceFile]:
        path, size, mtime_ns = f"{self._root}/{relative}", 0, 0
        if isinstance(refusal, OSError):
            yield SourceFile(f"{relative}/", 0, UNREADABLE_FOLDER, partial(_raise, refusal))
            return
        try:
            if refusal is None:
                status = os.stat(path)  # noqa: PTH116, a Path for each file costs more than looking at it
                size, mtime_ns = status.st_size, status.st_mtime_ns
                if not stat.S_ISREG(status.st_mode):  # opening a pipe may never return
                    refusal = NOT_REGULAR
                elif not is_text(relative):
                    refusal = "has a name that is not UTF-8"
        except (FileNotFoundError, NotADirectoryError):
            return  # it was removed meanwhile
        except OSError as error:
            yield SourceFile(relative, 0, "unreadable", partial(_raise, error))
            return
        token = f"{size}-{mtime_ns}"
        yield SourceFile(relative, size, token, partial(_open_local, path, token), refusal)


class _BucketFiles(SourceFiles):
    """Objects of a bucket.

    Args:
        store: opened at the folder above the place.
        name: the place's name in that folder: a folder, or one object; empty for the whole bucket.
    """

    def __init__(
        self, url: str, store: ObjectStore, name: str, pattern: NamePattern | None, is_wanted: Callable[[str], bool]
    ) -> None:
        super().__init__(url, pattern)
        self._store = store
        self._name = name
        self._is_wanted = is_wanted

    def _found(self, scope: str, begin: str) -> Iterator[SourceFile]:
        above = f"{self._name}/" if self._name else ""
        place = f"{above}{scope}".rstrip("/")
        every = partial(self._all, begin)
        one = self._one if scope and self._is_wanted(scope) else every  # what is more likely is looked at first
        other = every if one == self._one else self._one
        found = one(place) or other(place)
        for stored in found:
            relative = stored.name.removeprefix(above) if stored.name != self._name else stored.name.rpartition("/")[2]
            if self._is_wanted(relative) and not any(part.startswith(HIDDEN) for part in relative.split("/")):
                token = stored.etag.strip('"') or f"{_NO_ETAG}{stored.size}"
                yield SourceFile(relative, stored.size, token, partial(self._open, stored))

    def _all(self, begin: str, folder: str) -> Sequence[StoredObject]:
        return list(self._store.list(folder, deep=True, begin=begin))

    def _one(self, name: str) -> Sequence[StoredObject]:
        try:
            return [self._store.read_end(name, 1).stored] if name else []
        except FileNotFoundError:
            return []

    @property
    def is_remote(self) -> bool:
        return True

    @property
    def identity(self) -> str:
        return f"{self._store.identity}/{self._name}"

    def is_settled(self, file: SourceFile) -> bool:
        return bool(_etag(file))

    def ends(self, files: Sequence[SourceFile], read: Callable[[pa.NativeFile], T]) -> Generator[T | Exception]:
        above = f"{self._name}/" if self._name else ""
        listed = {above + file.relative: file for file in files}

        def read_one(store: Store, name: str) -> T | Exception:
            file = listed[name]
            return _read_end(partial(store.open, name, StoredObject(name, file.size, _etag(file))), read)

        yield from reads_ahead(self._store, list(listed), read_one)

    def _open(self, stored: StoredObject) -> pa.NativeFile:
        return self._store.open(stored.name, stored, tail_bytes=FIRST_BYTES, ahead=True)


def local_names(
    root: str, folder: str, is_wanted: Callable[[str], bool], prefix: str = "", depth: int = 0
) -> Iterator[tuple[str, str | OSError | None]]:
    """Names of files below a folder, each with the reason to refuse it; links to folders inside the root are ignored.

    A folder below it that the system does not show comes with the system's error.

    Args:
        root: the source, which no link may leave.
        folder: full path of the folder.
        prefix: put before each name.

    Raises:
        OSError: the system does not show the folder itself.
    """
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return  # a folder without files is refused when it is read
    except NotADirectoryError:
        yield os.path.basename(folder), "is not a folder"  # noqa: PTH119
        return
    except OSError as error:
        if not depth:
            raise
        yield prefix.rstrip("/"), error
        return
    for entry in entries:
        name = entry.name
        if name.startswith(HIDDEN):
            continue
        relative, may_be_file = prefix + name, is_wanted(name)
        if entry.is_dir(follow_symlinks=False):
            if depth < _MAX_DEPTH:
                yield from local_names(root, entry.path, is_wanted, f"{relative}/", depth + 1)
            else:
                yield relative, f"lies below {_MAX_DEPTH} nested folders; no more are allowed"
        elif entry.is_symlink() and (refusal := refused_link(root, entry.path)):
            if may_be_file or os.path.isdir(entry.path):  # noqa: PTH112
                yield relative, refusal
        elif may_be_file and not entry.is_dir():
            yield relative, None


def refused_link(root: str, link: str) -> str | None:
    """Why a link is not followed; None for one that leads into the root.

    Raises:
        OSError: the system does not say where it leads.
    """
    try:
        catalog, target = os.path.realpath(root), os.path.realpath(link, strict=True)
    except (FileNotFoundError, NotADirectoryError):
        return "is a link to nothing"
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return "is one of several links that lead to each other"
    if target == catalog:
        return "is a link to the catalog itself"
    return None if os.path.commonpath((catalog, target)) == catalog else "is a link out of the catalog"


def _open_local(path: str, token: str) -> pa.NativeFile:
    file = pa.OSFile(path, "rb")
    status = os.fstat(file.fileno())
    if token == f"{status.st_size}-{status.st_mtime_ns}":
        return file
    file.close()
    raise FileNotFoundError(errno.ENOENT, "another file stands in its place now", path)


def _etag(file: SourceFile) -> str:
    return "" if file.token.startswith(_NO_ETAG) else file.token


def _read_end(open_file: Callable[[], pa.NativeFile], read: Callable[[pa.NativeFile], T]) -> T | Exception:
    """What is read, or why it cannot be; a store that is down raises."""
    try:
        with open_file() as file:
            return read(file)
    except StoreUnavailable:
        raise
    except (*UNREADABLE, TransientError) as error:
        return error.with_traceback(None)  # it may be kept for long, and frames with it


def _raise(error: OSError) -> pa.NativeFile:
    raise error
