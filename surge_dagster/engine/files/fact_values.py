"""The facts of an output file as the bare values of its `surge.*` entries, in the order that they are written in.

A faster path than `FileFacts` and its dictionary, for reading the facts of tens of thousands of files.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from dataclasses import fields

from surge_dagster.engine.files.embedding_file import FORMAT, FileFacts, entry_names

_FACTS = fields(FileFacts)
_FORMAT = FORMAT.encode()
_OF = operator.attrgetter(*(fact.name for fact in _FACTS))
_NUMBERS = [place for place, fact in enumerate(_FACTS) if fact.type == "int"]
# What the digest, which is the last value, is taken of: the entries before it, by their names.
_GUARDED = entry_names(FileFacts)[:-1]
_SORTED = operator.itemgetter(*sorted(range(len(_GUARDED)), key=_GUARDED.__getitem__))
_TEMPLATE = b"".join(name + b"\0%b\n" for name in _SORTED(_GUARDED))


def values_of(facts: FileFacts) -> list[bytes]:
    """The values of `FileFacts.to_metadata`, in its order."""
    values = [_FORMAT, *[str(value).encode("utf-8", "surrogatepass") for value in _OF(facts)]]
    values.append(_digest(values))
    return values


def facts_of_values(values: Sequence[bytes]) -> FileFacts | None:
    """The facts of values; None when they are not of this format, or hold a zero byte."""
    if values[0] != _FORMAT or values[-1] != _digest(values):
        return None
    words: list[str | int] = [*b"\0".join(values[1:-1]).decode("utf-8", "replace").split("\0")]
    if len(words) != len(_FACTS):
        return None
    try:
        for place in _NUMBERS:
            words[place] = int(words[place])
    except ValueError:
        return None
    return FileFacts(*words)  # pyright: ignore[reportArgumentType]


def _digest(values: Sequence[bytes]) -> bytes:
    return hashlib.sha256(_TEMPLATE % _SORTED(values)).hexdigest()[:32].encode()
