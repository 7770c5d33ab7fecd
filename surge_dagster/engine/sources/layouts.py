"""Which partition a file belongs to, read from the names of its folders or from its own.

    category=shoes/part-0.parquet         folders named by a column: the key is `shoes`
    lang=de/category=shoes/0.parquet      several of them: `lang=de/category=shoes`
    {category}/*.parquet                  a pattern with names, like folders named by a column
    shoes.parquet                         one file per partition: `shoes`

Values are percent-decoded.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.sources.file_read import SourceFile
from surge_dagster.engine.sources.formats import ending_of
from surge_dagster.engine.sources.listing import NamePattern
from surge_dagster.engine.support.keys import decode_key, joined_key, printable

_LEVEL = re.compile(r"([^/=]+)=([^/]*)", re.DOTALL)
_decoded = lru_cache(maxsize=1 << 16)(decode_key)  # each listing decodes the same names


class _Place(NamedTuple):  # a listing makes and compares tens of thousands of them
    """What the names of a file say: for each level a column's name, and its value as written."""

    scope: str
    names: tuple[str, ...]
    values: tuple[str, ...]
    begin: str = ""  # of names in the scope


@dataclass(slots=True)
class FileGroup:
    """The files of one partition.

    Attributes:
        hashed: the value in the names, if it is the hash of a long key that only files declare.
        refusal: what is wrong with the names, and what to do.
        places: where its files lie; more than one is refused.
    """

    key: str
    files: list[SourceFile] = field(default_factory=list)
    hashed: str | None = None
    refusal: tuple[str, str] | None = None
    places: set[_Place] = field(default_factory=set)

    @property
    def scopes(self) -> list[tuple[str, str]]:
        """The folders or files of the places, and how names in a folder begin."""
        return sorted({(place.scope, place.begin) for place in self.places})


def grouped(files: Sequence[SourceFile], pattern: NamePattern | None, url: str) -> list[FileGroup]:
    """Return the partitions of a source's files, in the order of their first files."""
    places = [_place(file, pattern) for file in files]
    expected = _usual_names(places)
    if not expected:
        if pattern is None:
            _require_loose(files, url)
        places = [_Place(file.relative, ("",), (_stem(file),)) for file in files]
        expected = ("",)
    groups: dict[str, FileGroup] = {}
    for file, place in zip(files, places, strict=True):
        group = _group(place, expected, file)
        _add(groups.setdefault(group.key, group), group, place, file)
    return list(groups.values())


def _stem(file: SourceFile) -> str:
    return file.relative.removesuffix(ending_of(file.relative))


def _place(file: SourceFile, pattern: NamePattern | None) -> _Place:
    if pattern is not None and pattern.names:
        scope, begin, named = pattern.names_in(file.relative)
        return _Place(scope, tuple(named), tuple(named.values()), begin)
    parts = file.relative.split("/")
    folders = parts if file.refusal else parts[:-1]  # a refused link may be a folder
    scope = file.relative
    names: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    for number, part in enumerate(folders, 1):
        if (match := _LEVEL.fullmatch(part)) is not None:
            names += (match[1],)
            values += (match[2],)
            scope = "/".join(parts[:number])
    return _Place(scope, names, values)


def _usual_names(places: Sequence[_Place]) -> tuple[str, ...]:
    """Return the levels that most folders have; none if files are not in such folders."""
    scopes = {place.scope: place.names for place in places if place.names}
    if not scopes:
        return ()
    return Counter(scopes.values()).most_common(1)[0][0]


def _require_loose(files: Sequence[SourceFile], url: str) -> None:
    nested = next((file for file in files if "/" in file.relative), None)
    if nested is None:
        return
    deeper = "**/" if nested.relative.count("/") > 1 else ""
    pattern = f"{url.rstrip('/')}/{{name}}/{deeper}*{ending_of(nested.relative)}"
    raise ConfigError(
        f"the folders of {url!r} do not name partitions: expected folders named by a column, such "
        f"as category=shoes, or one file per partition; found {nested.shown}. If each folder is a "
        f"partition, give {pattern!r} as source. If all files are one table, name the column that "
        f"divides it: `surge-dagster embed {url} OUTPUT --partition-by COLUMN`."
    )


def _group(place: _Place, expected: tuple[str, ...], file: SourceFile) -> FileGroup:
    if place.names != expected:
        usual = "/".join(f"{name}=…" for name in expected)
        own = "/".join(f"{name}=…" for name in place.names) or "without a column's name"
        reason = f"{file.shown} is in folders {own}, and the others of this source in {usual}"
        remedy = "Move it to such folders, or out of the source."
        return FileGroup(printable(file.relative), refusal=(reason, remedy))
    values: dict[str, str] = {}
    for name, written in zip(place.names, place.values, strict=True):
        try:
            value = _decoded(written)
        except ValueError as error:
            key = "/".join(map(printable, place.values)) or place.scope
            remedy = "Rename it: percent-encode the key's UTF-8 bytes."
            return FileGroup(key, refusal=(str(error), remedy))
        if value is None and len(expected) == 1:
            return FileGroup(written, hashed=written)
        values[name] = written if value is None else value
    return FileGroup(joined_key(values))


def _add(group: FileGroup, new: FileGroup, place: _Place, file: SourceFile) -> None:
    group.files.append(file)
    group.places.add(place)
    group.refusal = group.refusal or new.refusal
    if len(group.places) > 1 and group.refusal is None:
        names: list[str] = []
        for folder, begin in group.scopes:
            parts = [folder, f"{begin}*"] if begin else [folder]
            names.append(printable("/".join(filter(None, parts))))
        group.refusal = (f"{', '.join(names)} all stand for this key", "Keep one of them.")
