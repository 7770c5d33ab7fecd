"""What Dagster stores of an event, for many events that are alike, made from what it stores of one of them.

Dagster turns an event into JSON object by object, which takes longer than everything else that storing it does. The
events of a catalog's partitions have the same shape and differ in some values. So an event with marks in place of
these values is turned into JSON by Dagster, once, and the text is cut at the marks; every other event of that shape is
its own values between the pieces. An event that does not lend itself to it is turned into JSON by Dagster as ever.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import dagster as dg

Event = dg.AssetMaterialization | dg.AssetObservation

_Shape = tuple[object, ...]
# Metadata that holds one plain value, and that another value can be put into.
_PLAIN = {dg.TextMetadataValue, dg.PathMetadataValue, dg.IntMetadataValue, dg.FloatMetadataValue}

# What `json.dumps` does with one, which it finds out every time anew.
_JSON: dict[type, Callable[[Any], str]] = {str: json.dumps, int: int.__repr__, float: json.dumps}


class EventTexts:
    """Events of partitions as the JSON that Dagster stores.

    Args:
        serialize: what Dagster makes of an event that is stored at a time (seconds since 1970).
    """

    def __init__(self, serialize: Callable[[Event, float], str]) -> None:
        self._serialize = serialize
        self._templates: dict[_Shape, _Template] = {}

    def text(self, event: Event, timestamp: float) -> str:
        """The JSON of an event, as `serialize` would make it."""
        taken = _take_apart(event)
        if taken is None:
            return self._serialize(event, timestamp)
        shape, values = taken
        if shape not in self._templates:
            marks = _marks([timestamp, *values])
            self._templates[shape] = _Template.cut(self._serialize(_with_values(event, marks[1:]), marks[0]), marks)
        return self._templates[shape].fill([timestamp, *values])


@dataclass(frozen=True, slots=True)
class _Template:
    """A text between whose pieces values belong; `places` says which value follows a piece."""

    pieces: Sequence[str]
    places: Sequence[int]

    @staticmethod
    def cut(text: str, marks: Sequence[Any]) -> _Template:
        written = {json.dumps(mark): place for place, mark in enumerate(marks)}
        parts = re.split("(" + "|".join(map(re.escape, written)) + ")", text)
        return _Template(parts[::2], [written[mark] for mark in parts[1::2]])

    def fill(self, values: Sequence[Any]) -> str:
        written = [_JSON[type(value)](value) for value in values]
        parts = [self.pieces[0]]
        for place, piece in zip(self.places, self.pieces[1:], strict=True):
            parts += (written[place], piece)
        return "".join(parts)


def _take_apart(event: Event) -> tuple[_Shape, list[Any]] | None:
    """What an event has in common with others, and its own values; None when it is unlike all others."""
    if type(event.partition) is not str or event.description is not None:
        return None
    tags = event.tags or {}
    shape: list[object] = [type(event), event.asset_key, *tags]
    values: list[Any] = [event.partition]
    for label, entry in event.metadata.items():
        value = entry.value
        shape += (label, type(entry), type(value))
        if type(entry) in _PLAIN and type(value) in _JSON:
            values.append(value)
        elif type(entry) is dg.BoolMetadataValue:
            shape.append(value)
        else:
            return None
    values += tags.values()
    return tuple(shape), values


def _with_values(event: Event, values: Sequence[Any]) -> Event:
    """An event like this one with other values, in the order in which it is taken apart."""
    left = iter(values)
    partition = next(left)
    metadata: Mapping[str, dg.MetadataValue] = {
        label: type(entry)(next(left)) if type(entry) in _PLAIN else entry  # pyright: ignore[reportCallIssue]
        for label, entry in event.metadata.items()
    }
    return type(event)(
        event.asset_key, partition=partition, metadata=metadata, tags={key: next(left) for key in event.tags or {}}
    )


def _marks(values: Sequence[Any]) -> list[Any]:
    """A value of the same type for each, that is found again in JSON: none is part of another one, or there already."""
    unlike_all = uuid4().hex
    return [
        f"{unlike_all}-{place:03}" if isinstance(value, str) else type(value)(float(f"7.3164{place:03}7e15"))
        for place, value in enumerate(values)
    ]
