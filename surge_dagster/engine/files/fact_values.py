"""The facts of an output file as the bare values of its `surge.*` entries, in the order that they are written in.

What `FileFacts` and its dictionary do for one file, for whoever has tens of thousands of them: to build their footers,
or to decide from them what is fresh.
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
# What partitions have of their own; the number of rows is shared, by all that are as large.
_OWN = ("partition_key", "source_version", "content_digest", "desired_version", "truncated")
_OWN_WORDS = operator.attrgetter(*_OWN[:-1])
_OWN_PLACES = {1 + place for place, fact in enumerate(_FACTS) if fact.name in _OWN}
_OWN_SORTED = operator.itemgetter(*sorted(range(len(_OWN)), key=_OWN.__getitem__))
shared_facts = operator.attrgetter(*(fact.name for fact in _FACTS if fact.name not in _OWN))


def values_of(facts: FileFacts) -> list[bytes]:
    """The values of `FileFacts.to_metadata`, in its order."""
    values = [_FORMAT, *[str(value).encode("utf-8", "surrogatepass") for value in _OF(facts)]]
    values.append(_digest(values))
    return values


class SharedValues:
    """The values of facts that are alike but for what each partition has of its own: what they share is made once.

    Attributes:
        values: in the order of `values_of`; None in the place of each own value and of the digest, which is the last.
    """

    def __init__(self, facts: FileFacts) -> None:
        *values, _ = values_of(facts)
        self.values = [None if place in _OWN_PLACES else value for place, value in enumerate(values)] + [None]
        gaps = [b"%b" if value is None else value.replace(b"%", b"%%") for value in self.values]
        self._guarded = _TEMPLATE % _SORTED(gaps)

    def own(self, facts: FileFacts) -> list[bytes]:
        """The values in the places of None, of other facts that share the others."""
        own = [value.encode("utf-8", "surrogatepass") for value in _OWN_WORDS(facts)]
        own.append(b"%d" % facts.truncated)
        own.append(hashlib.sha256(self._guarded % _OWN_SORTED(own)).hexdigest()[:32].encode())
        return own


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
