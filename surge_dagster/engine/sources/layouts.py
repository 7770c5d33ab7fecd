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

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.sources.endings import ending_of
from surge_dagster.engine.sources.listing import UNREADABLE_FOLDER, NamePattern, SourceFile
from surge_dagster.engine.support.keys import decode_key, joined_key, printable

_LEVEL = re.compile(r"([^/=]+)=([^/]*)", re.DOTALL)
_decoded = lru_cache(maxsize=1 << 16)(decode_key)  # each listing asks for the same names


@dataclass(frozen=True, slots=True)
class _Place:
    """What the names of a file say: a column's name and a value as it is written, for each level."""

    scope: str
    levels: tuple[tuple[str, str], ...]
    begin: str = ""  # of names in the scope

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.levels)


@dataclass(slots=True)
class FileGroup:
    """The files of one partition.

    Attributes:
        hashed: the value in the names, where it is the hash of a long key that only the files declare.
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
        """The folders or files of the places, relative to the source, and how names in a folder begin."""
        return sorted({(place.scope, place.begin) for place in self.places})


def grouped(files: Sequence[SourceFile], pattern: NamePattern | None, url: str) -> list[FileGroup]:
    """The partitions of the listed files of a source, in the order of their first files."""
    if pattern is not None and pattern.names:
        matched = (pattern.names_in(file.relative) for file in files)
        places = [_Place(scope, tuple(levels.items()), begin) for scope, begin, levels in matched]
    else:
        places = [_in_folders(file) for file in files]
    expected = _usual_names(files, places)
    for file, place in zip(files, places, strict=True):
        if file.token == UNREADABLE_FOLDER and (not expected or place.names != expected):
            raise ConfigError(
                f"cannot list the source {url!r}: its folder {file.shown} could not be read, and nothing is known of "
                "the partitions in it. Make it readable, then run again."
            )
    if not expected:
        if pattern is None:
            _require_loose(files, url)
        places = [_Place(file.relative, (("", ending_of(file.relative)[0]),)) for file in files]
        expected = ("",)
    groups: dict[str, FileGroup] = {}
    for file, place in zip(files, places, strict=True):
        group = _group(place, expected, file)
        _add(groups.setdefault(group.key, group), group, place, file)
    return list(groups.values())


def _in_folders(file: SourceFile) -> _Place:
    parts = file.relative.split("/")
    folders = parts if file.refusal else parts[:-1]
    matched = [
        (number, match)
        for number, part in enumerate(folders, 1)
        if (match := _LEVEL.fullmatch(part))
    ]
    scope = "/".join(parts[: matched[-1][0]]) if matched else file.relative
    return _Place(scope, tuple((match[1], match[2]) for _, match in matched))


def _usual_names(files: Sequence[SourceFile], places: Sequence[_Place]) -> tuple[str, ...]:
    """The levels that most folders have, of those that can be read."""
    readable = (
        place for file, place in zip(files, places, strict=True) if file.token != UNREADABLE_FOLDER
    )
    scopes = {place.scope: place.names for place in readable if place.levels}
    return Counter(scopes.values()).most_common(1)[0][0] if scopes else ()


def _require_loose(files: Sequence[SourceFile], url: str) -> None:
    nested = next((file for file in files if "/" in file.relative), None)
    if nested is None:
        return
    depth = nested.relative.count("/")
    ending = ending_of(nested.relative)[1]
    pattern = f"{url.rstrip('/')}/{{name}}/{'**/' * (depth > 1)}*{ending}"
    raise ConfigError(
        f"the folders of {url!r} do not say what its partitions are: expected folders named by a column, such as "
        f"category=shoes, or one file per partition; found {nested.shown}. If each folder is a partition, give "
        f"{pattern!r} as source. If all files are one table, name with partition_by which column divides it: "
        f"`surge-dagster embed {url} OUTPUT --partition-by COLUMN`."
    )


def _group(place: _Place, expected: tuple[str, ...], file: SourceFile) -> FileGroup:
    if place.names != expected:
        usual_folders = "/".join(f"{name}=…" for name in expected)
        own_folders = "/".join(f"{name}=…" for name in place.names) or "none of them"
        return FileGroup(
            printable(file.relative),
            refusal=(
                f"{file.shown} lies in folders {own_folders}, and the others of this source in {usual_folders}",
                "Move it to such folders, or out of the source.",
            ),
        )
    values: dict[str, str] = {}
    for name, written in place.levels:
        try:
            value = _decoded(written)
        except ValueError as error:
            shown = "/".join(printable(each) for _, each in place.levels)
            return FileGroup(
                shown or place.scope,
                refusal=(str(error), "Rename it: percent-encode the key's UTF-8 bytes."),
            )
        if value is None and len(expected) == 1:
            return FileGroup(written, hashed=written)
        values[name] = written if value is None else value
    return FileGroup(joined_key(values))


def _add(group: FileGroup, new: FileGroup, place: _Place, file: SourceFile) -> None:
    group.files.append(file)
    group.places.add(place)
    group.refusal = group.refusal or new.refusal
    if len(group.places) > 1 and group.refusal is None:
        names = (
            "/".join(filter(None, (folder, begin and f"{begin}*")))
            for folder, begin in group.scopes
        )
        group.refusal = (
            f"{', '.join(map(printable, names))} all stand for this key",
            "Keep one of them.",
        )
