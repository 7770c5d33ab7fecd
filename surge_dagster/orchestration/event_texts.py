"""What Dagster stores of an event, for many events that are alike, made from what it stores of one of them.

Dagster turns an event into JSON object by object, which takes longer than everything else that storing it does. The
events of a catalog's partitions have the same shape and differ in some values. So an event with marks in place of
these values is turned into JSON by Dagster, once, and the text is cut at the marks; every other event of that shape is
its own values between the pieces. Events of other kinds are turned into JSON by Dagster as ever.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from surge_dagster.orchestration.partition_events import AnyEvent, FilePath, PartitionEvent

_Shape = tuple[object, ...]

_of_text = json.JSONEncoder().encode


def _of_float(value: float) -> str:
    return float.__repr__(value) if math.isfinite(value) else json.dumps(value)


# What `json.dumps` does with one, which it finds out every time anew.
_JSON: dict[type, Callable[[Any], str]] = {str: _of_text, FilePath: _of_text, int: int.__repr__, float: _of_float}


class EventTexts:
    """Events of partitions as the JSON that Dagster stores.

    Args:
        serialize: what Dagster makes of an event that is stored at a time (seconds since 1970).
    """

    def __init__(self, serialize: Callable[[AnyEvent, float], str]) -> None:
        self._serialize = serialize
        self._templates: dict[_Shape, _Template | None] = {}

    def text(self, event: AnyEvent, timestamp: float) -> str:
        """The JSON of an event, as `serialize` would make it."""
        if not isinstance(event, PartitionEvent):
            return self._serialize(event, timestamp)
        told = event.metadata.values()
        # What an event has in common with others: all but its values, and those of them that JSON has words for.
        kinds = [value if value is True or value is False else type(value) for value in told]
        shape = (event.kind, event.asset_key, *event.metadata, *kinds, *event.tags)
        values = (timestamp, event.partition, *told, *event.tags.values())
        if shape not in self._templates:
            self._templates[shape] = self._template(event, values)
        template = self._templates[shape]
        return template.fill(values) if template else self._serialize(event, timestamp)

    def _template(self, event: PartitionEvent, values: Sequence[Any]) -> _Template | None:
        if not all(type(value) in _JSON or type(value) is bool for value in values):
            return None
        marks = _marks(values)
        left = iter(marks[2:])
        marked = replace(
            event,
            partition=marks[1],
            metadata={label: next(left) for label in event.metadata},
            tags={key: next(left) for key in event.tags},
        )
        return _Template.cut(self._serialize(marked, marks[0]), marks)


@dataclass(frozen=True, slots=True)
class _Template:
    """A text with `%s` where values belong, and for each of these which value it is and how JSON writes it."""

    text: str
    places: Sequence[tuple[int, Callable[[Any], str]]]

    @staticmethod
    def cut(text: str, marks: Sequence[Any]) -> _Template:
        written = {json.dumps(mark): place for place, mark in enumerate(marks) if type(mark) is not bool}
        parts = re.split("(" + "|".join(map(re.escape, written)) + ")", text)
        places = [written[mark] for mark in parts[1::2]]
        pieces = [piece.replace("%", "%%") for piece in parts[::2]]
        return _Template("%s".join(pieces), [(place, _JSON[type(marks[place])]) for place in places])

    def fill(self, values: Sequence[Any]) -> str:
        return self.text % tuple([write(values[place]) for place, write in self.places])


def _marks(values: Sequence[Any]) -> list[Any]:
    """A value of the same type for each, that is found again in JSON: none is part of another one, or there already."""
    unlike_all = uuid4().hex

    def mark(place: int, value: Any) -> Any:
        if isinstance(value, bool):
            return value
        if isinstance(value, str):
            return type(value)(f"{unlike_all}-{place:03}")
        return type(value)(float(f"7.3164{place:03}7e15"))

    return [mark(place, value) for place, value in enumerate(values)]
