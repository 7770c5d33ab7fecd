"""What a file of the output states about itself: entries named `surge.*` in its metadata, guarded by a digest.

Checksums of pages or record batches do not cover a file's metadata, so the digest does. The facts of an output file are
`FileFacts`; staged segments have facts of their own kind. A run reads the facts of every file before it begins, so what
is the same for all facts of one kind is computed once.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, ClassVar, Protocol, TypeVar

from surge_dagster import __version__

WRITER = f"surge-dagster {__version__}"


class InvalidFile(Exception):
    """A file in the output is not a complete, valid file of its format; the text says what is wrong with it."""


class Facts(Protocol):
    """A frozen dataclass of strings and whole numbers."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def rows(self) -> int: ...


AnyFacts = TypeVar("AnyFacts", bound=Facts)


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What an output file states about itself.

    Attributes:
        precision: arithmetic the vectors were made in, such as "fp32".
        source_version: the source's token when the partition was read.
        content_digest: over the canonical (id, text) rows.
        desired_version: hash of content digest and space; Dagster's data version of the partition.
        truncated: texts of which the model saw only the first tokens.
    """

    partition_key: str
    space: str
    model: str
    precision: str
    source_version: str
    content_digest: str
    desired_version: str
    rows: int
    dimension: int
    truncated: int
    writer: str = WRITER


def desired_version(content: str, space: str) -> str:
    """Hash of a content digest (or, until that is known, a source version) and a space name, 32 hex digits."""
    return hashlib.sha256(f"surge.desired.1\0{content}\0{space}".encode()).hexdigest()[:32]


def guarded_metadata(facts: Facts, file_format: str) -> dict[bytes, bytes]:
    """The metadata entries of a file with these facts: its format, the facts, and the digest over all of them."""
    return dict(zip(entry_names(type(facts)), values_of(facts, file_format), strict=True))


def facts_of(metadata: Mapping[bytes, bytes] | None, kind: type[AnyFacts], file_format: str) -> AnyFacts:
    """The facts in a file's metadata.

    Raises:
        InvalidFile: the file has another format, or its metadata were changed after it was written.
    """
    found = metadata or {}
    return facts_of_values([found.get(name, b"") for name in entry_names(kind)], kind, file_format)


def entry_names(kind: type[Facts]) -> tuple[bytes, ...]:
    """Names of the entries that a file with facts of this kind has, in the order in which they are written."""
    return _layout(kind).names


def values_of(facts: Facts, file_format: str) -> list[bytes]:
    """The values of `guarded_metadata`, in the order of `entry_names`."""
    layout = _layout(type(facts))
    values = [file_format.encode()]
    values += [str(value).encode("utf-8", "surrogatepass") for value in layout.getter(facts)]
    return [*values, layout.digest(values)]


def facts_of_values(values: Sequence[bytes], kind: type[AnyFacts], file_format: str) -> AnyFacts:
    """The facts of values in the order of `entry_names`.

    Raises:
        InvalidFile: see `facts_of`.
    """
    layout = _layout(kind)
    if values[0] != file_format.encode():
        found = values[0].decode("utf-8", "replace") or None
        raise InvalidFile(f"its metadata name the format {found!r}; expected {file_format!r}")
    if values[-1] != layout.digest(values[:-1]):
        raise InvalidFile("its metadata do not match their own digest: they were changed after the file was written")
    try:
        return kind(*[read(value) for read, value in zip(layout.readers, values[1:-1], strict=True)])
    except ValueError as error:
        raise InvalidFile(f"its metadata cannot be read ({error})") from error


@dataclass(frozen=True, slots=True)
class _Layout:
    """What all facts of one kind have in common.

    Attributes:
        names: of the entries.
        readers: for each fact the function that makes its value from bytes.
        getter: gives the values of all facts.
        template, sort: the digest is over "name, zero byte, value, line feed" of each entry, sorted by name.
    """

    names: tuple[bytes, ...]
    readers: tuple[Callable[[bytes], Any], ...]
    getter: Callable[[Any], tuple[Any, ...]]
    template: bytes
    sort: Callable[[Sequence[bytes]], tuple[bytes, ...]]

    def digest(self, values: Sequence[bytes]) -> bytes:
        """Of all values but the last one, which is the digest itself."""
        return hashlib.sha256(self.template % self.sort(values)).hexdigest()[:32].encode()


@cache
def _layout(kind: type[Facts]) -> _Layout:
    facts = fields(kind)
    guarded = [b"surge.format", *(f"surge.{fact.name}".encode() for fact in facts)]
    order = sorted(range(len(guarded)), key=guarded.__getitem__)
    return _Layout(
        names=(*guarded, b"surge.metadata_digest"),
        readers=tuple(int if fact.type == "int" else _text for fact in facts),
        getter=operator.attrgetter(*(fact.name for fact in facts)),
        template=b"".join(guarded[place] + b"\0%b\n" for place in order),
        sort=operator.itemgetter(*order),
    )


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")
