"""The timeline of a run: when each stage worked, in a few kilobytes however long the run is.

The paper draws it as lanes over time (SURGE, figure 4): a gap in the encoding shows that something
held it up. In a run of tens of thousands of SuperBatches neighbours are joined, so that the entries
still cover all of its time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from surge_dagster.engine.support.timeline import Span

MOST_ENTRIES = 128


@dataclass(frozen=True, slots=True)
class Entry:
    """One SuperBatch of a timeline, or several neighbours as one; None where a stage was not
    observed."""

    superbatches: int
    texts: int
    encode_seconds: float
    encode: Span | None
    serialize: Span | None
    upload: Span | None

    def joined(self, other: Entry) -> Entry:
        return Entry(
            self.superbatches + other.superbatches,
            self.texts + other.texts,
            self.encode_seconds + other.encode_seconds,
            _joined(self.encode, other.encode),
            _joined(self.serialize, other.serialize),
            _joined(self.upload, other.upload),
        )


@dataclass(slots=True)
class Timeline:
    """The SuperBatches of a run in the order they were published; each entry stands for at most
    `per_entry` of them."""

    entries: list[Entry] = field(default_factory=list)
    per_entry: int = 1

    def add(self, entry: Entry) -> None:
        if self.entries and self.entries[-1].superbatches < self.per_entry:
            self.entries[-1] = self.entries[-1].joined(entry)
            return
        if len(self.entries) == MOST_ENTRIES:
            pairs = zip(self.entries[::2], self.entries[1::2], strict=True)
            self.entries = [first.joined(second) for first, second in pairs]
            self.per_entry *= 2
        self.entries.append(entry)


def _joined(one: Span | None, other: Span | None) -> Span | None:
    if one is None or other is None:
        return one or other
    return Span(
        min(one.begun, other.begun),
        max(one.ended, other.ended),
        one.busy_seconds + other.busy_seconds,
    )
