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

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import pyarrow as pa

from surge_dagster.engine.errors import ConfigError, StoreUnavailable, TransientError
from surge_dagster.engine.store.store import Store, StoredObject
from surge_dagster.engine.support.keys import printable
from surge_dagster.engine.support.unreadable import UNREADABLE, visible

T = TypeVar("T")
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
class SourceFile:
    """One file, as it was listed.

    Attributes:
        relative: not valid text if a name on the disk is not UTF-8.
        stored: what was listed in the source's store.
        token: changes when the content may have changed: the etag, or size and modification time.
        open: opens this version of the file; FileNotFoundError if it was removed or replaced.
        refusal: why it must not be opened, as the end of a sentence that begins with its name.
    """

    relative: str
    stored: StoredObject
    token: str
    open: Callable[[], pa.NativeFile]
    refusal: str | None = None

    @property
    def size(self) -> int:
        return self.stored.size

    @property
    def shown(self) -> str:
        return visible(printable(self.relative))


@dataclass(frozen=True, slots=True)
class NamePattern:
    """What relative names of files must match, and the names that it gives to parts of them."""

    text: str
    regex: re.Pattern[str]
    names: tuple[str, ...]

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

    def list(self, scope: str = "", begin: str = "") -> list[SourceFile]:
        """Return the files in bytewise order of their relative names.

        Args:
            scope: one file, or a folder with all that lies below it; empty is all.
            begin: of a folder, only files whose names in it begin like this.
        """
        files: Iterable[SourceFile] = self._found(scope, begin)
        if (pattern := self.pattern) is not None:
            files = (file for file in files if pattern.regex.fullmatch(file.relative))
        return sorted(files, key=lambda file: os.fsencode(file.relative))

    def ends(
        self, files: Sequence[SourceFile], read: Callable[[pa.NativeFile], T]
    ) -> Generator[T | Exception]:
        """Yield what `read` finds at the end of each file, or its error."""
        listed = {file.stored.name: file.stored for file in files}

        def read_one(store: Store, name: str) -> T | Exception:
            return _read_end(partial(store.open, name, listed[name]), read)

        yield from self._store.reads_ahead(list(listed), read_one)

    @abstractmethod
    def _found(self, scope: str, begin: str) -> Iterator[SourceFile]: ...


def require_no_table(url: str, relative: str) -> None:
    """Raise `ConfigError` if a name in a source's listing belongs to a table."""
    found = _OF_TABLES.search(relative)
    if found is None:
        return
    place = visible(printable(relative[: found.start()])) or "."
    kind = found.lastgroup
    remedy = "Give a query's result or a copy of it as files."
    if kind == "Delta":
        remedy = "Give the folder of the table as the source."
    raise ConfigError(
        f"the source {url!r} has a table of {kind} in {place!r}, whose files are not its rows: "
        f"deleted and old ones are among them. {remedy}"
    )


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


def _read_end(
    open_file: Callable[[], pa.NativeFile], read: Callable[[pa.NativeFile], T]
) -> T | Exception:
    """Return what is read, or why it cannot be; a store that does not answer raises."""
    try:
        with open_file() as file:
            return read(file)
    except StoreUnavailable:
        raise
    except (*UNREADABLE, TransientError) as error:
        return error.with_traceback(None)  # it may be kept for long, and frames with it
