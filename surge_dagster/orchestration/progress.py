"""Progress of a run in its log: a line every ten seconds, also while a SuperBatch takes minutes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from surge_dagster.cluster.cluster_run import ClusterRun
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.report import Event, OldVectorSample, Receipt, SuperBatchReport
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.support.counts import counted

LINE_SECONDS = 10.0  # a line costs as much as an event


class Progress:
    """Counts what a run has done; any thread may ask for the line.

    Args:
        todo: the partitions of the run.
        run: asked for each line.
    """

    def __init__(
        self,
        todo: Sequence[Partition],
        run: EmbeddingRun | ClusterRun[Any],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rows = {partition.key: partition.rows for partition in todo}
        known = [rows for rows in self._rows.values() if rows is not None]
        self._all_texts = sum(known) if len(known) == len(self._rows) else None
        self._partitions = self._not_encoded = 0
        self._run, self._now, self._begun = run, now, now()

    def count(self, event: Event) -> None:
        """Count an event of the engine."""
        match event:
            case SuperBatchReport() | OldVectorSample():
                return  # its texts were counted while they were encoded
            case Receipt(action="encoded"):
                self._not_encoded += event.texts_reused
            case Receipt():
                self._not_encoded += event.rows
            case _:
                self._not_encoded += self._rows.get(event.key) or 0
        self._partitions += 1

    def line(self) -> str:
        """What is done by now, and how long the rest takes."""
        seconds, in_flight = self._now() - self._begun, self._run.in_flight
        of_partitions = f"Progress: {self._partitions:,} of {counted(len(self._rows), 'partition')}"
        # by the machines of a cluster
        encoded = in_flight.encoded if in_flight else self._run.report.texts_encoded
        now = self._run.preparing if in_flight is None else f"{in_flight.texts:,} in flight"
        if in_flight is None and not encoded:
            return f"{of_partitions} in {_duration(seconds)}; {now}"
        texts = encoded + self._not_encoded
        rate = texts / seconds
        of_texts = counted(texts, "text")
        left = ""
        if self._all_texts is not None:
            # a refused partition may have been encoded in part, and counts as done
            done = min(texts, self._all_texts)
            of_texts = f"{done:,} of {counted(self._all_texts, 'text')}"
            left = f", about {_duration((self._all_texts - done) / rate)} left" if rate else ""
        pace = f", {rate:,.0f} texts/s{left}" if rate else ""
        return f"{of_partitions}, {of_texts}{pace}; {now}"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"
