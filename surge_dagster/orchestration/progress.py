"""Progress of a run in its log: a line every ten seconds at most, whatever the number of partitions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from surge_dagster.engine.run.report import Event, Receipt, SuperBatchReport
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.support.counts import counted

_LINE_SECONDS = 10.0  # a line costs as much as an event


class Progress:
    def __init__(self, todo: Sequence[Partition], now: Callable[[], float] = time.monotonic) -> None:
        self._rows = {partition.key: partition.rows for partition in todo}
        known = [rows for rows in self._rows.values() if rows is not None]
        self._all_texts = sum(known) if len(known) == len(self._rows) else None
        self._partitions = self._texts = 0
        self._now = now
        self._begun = self._said = now()

    def after(self, event: Event) -> str | None:
        """Count an event of the engine; returns a line for the log when one is due."""
        match event:
            case SuperBatchReport():
                self._texts += event.texts
            case Receipt(action="encoded"):
                self._partitions += 1
                self._texts += event.texts_reused
            case Receipt():
                self._partitions += 1
                self._texts += event.rows
            case _:
                self._partitions += 1
                self._texts += self._rows.get(event.key) or 0
        now = self._now()
        if now - self._said < _LINE_SECONDS:
            return None
        self._said = now
        return self._line(now - self._begun)

    def _line(self, seconds: float) -> str:
        rate = self._texts / seconds
        of_texts = counted(self._texts, "text")
        left = ""
        if self._all_texts is not None:
            done = min(self._texts, self._all_texts)  # a text whose worker died is encoded, and counted, twice
            of_texts = f"{done:,} of {counted(self._all_texts, 'text')}"
            left = f", about {_duration((self._all_texts - done) / rate)} left" if rate else ""
        of_partitions = f"{self._partitions:,} of {counted(len(self._rows), 'partition')}"
        return f"Progress: {of_partitions}, {of_texts}, {rate:,.0f} texts/s{left}"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"
