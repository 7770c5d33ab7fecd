"""The outcome of a run: what failed, what was published, and what the run's checks look at."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import dagster as dg

from surge_dagster.cluster.machine_work import MachineWork
from surge_dagster.engine.run.report import (
    Event,
    Failure,
    OldVectorSample,
    Receipt,
    RunReport,
    SuperBatchReport,
)
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.support.counts import counted, named
from surge_dagster.orchestration.file_checks import FileChecks
from surge_dagster.orchestration.partition_keys import to_partition_key

_MOST_MACHINES = 100  # in the table of machines
_NAMED = 5  # failed partitions, in the line of a run
Violations = list[tuple[str, str]]  # partitions that violate a check: catalog key and reason


@dataclass(slots=True)
class Truncation:
    """Counts texts that are longer than the model reads; `above` are partitions with a larger share
    than allowed."""

    max_share: float
    partitions: int = 0
    rows: int = 0
    truncated: int = 0
    above: Violations = field(default_factory=list)

    def add(self, key: str, rows: int, truncated: int) -> None:
        self.partitions += 1
        self.rows += rows
        self.truncated += truncated
        if rows and truncated / rows > self.max_share:
            share = f"{truncated:,} of {rows:,} texts ({truncated / rows:.1%})"
            self.above.append((key, f"{share} are longer than the model reads"))

    def metrics(self) -> dict[str, Any]:
        share = self.truncated / self.rows if self.rows else 0.0
        return {
            "truncated": self.truncated,
            "truncated_share": round(share, 4),
            "allowed_share": self.max_share,
        }


@dataclass(slots=True)
class Drift:
    """The vectors of a sample of old rows, compared with new ones before the run reused any."""

    rows: int = 0
    lowest_cosine: float = 0.0  # that the precision promises
    below: Violations = field(default_factory=list)
    _cosines: float = 0.0

    def add(self, sample: OldVectorSample) -> None:
        self.rows += len(sample.cosines)
        self.lowest_cosine = sample.lowest_cosine
        self._cosines += sum(sample.cosines.values())
        for key, cosine in sample.drifted.items():
            reason = (
                f"a row with a cosine of {cosine:.6f} to its old vector; expected at least "
                f"{sample.lowest_cosine:g}. The run reused no old vectors"
            )
            self.below.append((key, reason))

    def metrics(self) -> dict[str, Any]:
        """Return metadata of its check; nothing to plot without a comparison."""
        if not self.rows:
            return {}
        return {
            "compared_rows": self.rows,
            "mean_cosine": round(self._cosines / self.rows, 6),
            "least_cosine_due": self.lowest_cosine,
        }


@dataclass(slots=True)
class PaceOfRun:
    """How long the encode calls of a run took, compared with the calls like them before.

    Attributes:
        judged: SuperBatches that could be compared.
        slowest: the highest `pace_ratio`.
        slow: messages of the SuperBatches that are slow.
    """

    judged: int = 0
    slowest: float = 0.0
    slow: list[str] = field(default_factory=list)

    def add(self, superbatch: SuperBatchReport) -> None:
        if superbatch.pace_ratio is None:
            return
        self.judged += 1
        self.slowest = max(self.slowest, superbatch.pace_ratio)
        if superbatch.is_slow:
            self.slow.append(superbatch.slow_message)


@dataclass(slots=True)
class Outcome:
    truncation: Truncation
    asset: dg.AssetKey  # that shows the files of the run's space
    drift: Drift = field(default_factory=Drift)
    files: FileChecks = field(default_factory=FileChecks)
    pace: PaceOfRun = field(default_factory=PaceOfRun)
    report: RunReport = field(default_factory=RunReport)
    machines: Mapping[str, MachineWork] | None = None  # over a cluster
    partitions: dict[str, Partition] = field(default_factory=dict)  # of the run, by catalog key
    # refused or not published, by partition key
    failures: dict[str, Failure] = field(default_factory=dict)
    # catalog keys that were removed from the source
    removed: list[str] = field(default_factory=list)
    published: set[str] = field(default_factory=set)  # catalog keys
    # not encoded, because only the source version had moved
    republished: set[str] = field(default_factory=set)
    fresh: set[str] = field(default_factory=set)  # catalog keys that were found up to date
    ended_by: BaseException | None = None  # what ended the run early
    begun: float = field(default_factory=time.monotonic)
    seconds: float = 0.0  # that the run took, when it has ended
    summary: str = ""  # the run in one line, when it has ended

    @property
    def metrics(self) -> RunReport:
        """Return the metrics of the run, with the partitions that its worklist found fresh."""
        up_to_date = len(self.fresh - self.published)
        return replace(
            self.report, partitions_written=len(self.published), partitions_skipped=up_to_date
        )

    def sum_up(self) -> str:
        """Describe the run in one line, `summary`; each of its partitions is in one count."""
        failed = {failure.key for failure in self.failures.values()}
        removed = set(self.removed) - failed
        republished = self.republished - failed
        encoded = self.published - republished - failed
        fresh = self.fresh - self.published - removed - failed
        counted_keys = failed | removed | republished | encoded | fresh
        all_keys = counted_keys | self.partitions.keys()
        if self.ended_by is not None and not all_keys:
            self.summary = f"failed before it began: {self.ended_by}"
            return self.summary

        parts = [f"{len(encoded):,} encoded{self._texts()}", f"{len(fresh):,} up to date"]
        others = {
            "republished": len(republished),
            "removed from the source": len(removed),
            "not reached" if self.ended_by else "left out by select": len(all_keys - counted_keys),
        }
        parts += [f"{count:,} {what}" for what, count in others.items() if count]
        names = f" ({named(sorted(failed), _NAMED)})" if failed else ""
        parts.append(f"{len(failed):,} failed{names}")
        self.seconds = time.monotonic() - self.begun
        parts.append(f"{self.seconds:,.1f} s")
        self.summary = f"{counted(len(all_keys), 'partition')}: {', '.join(parts)}"
        if isinstance(self.ended_by, Exception):  # not one that an operator terminated
            self.summary += f"; ended by {type(self.ended_by).__name__}: {self.ended_by}"
        return self.summary

    def _texts(self) -> str:
        encoded = self.report.texts_encoded
        reused = self.report.costs.rows_reused
        if not encoded and not reused:
            return ""
        kept = f", {reused:,} others kept their vectors" if reused else ""
        return f" ({counted(encoded, 'text')}{kept})"

    @property
    def refused(self) -> dict[str, Failure]:
        """Return failures that lie in the content of a partition, by partition key."""
        return {
            key: failure
            for key, failure in self.failures.items()
            if failure.in_source and not failure.transient and failure.key in self.partitions
        }

    def table_of_machines(self) -> dg.TableMetadataValue:
        """Return a table of a cluster's machines: work, speed, and when a machine was lost."""
        rows: list[dg.TableRecord] = []
        for work in islice((self.machines or {}).values(), _MOST_MACHINES):
            row = {
                "machine": work.facts.host,
                "texts": work.texts,
                "texts_per_second": round(work.texts / work.seconds) if work.seconds else 0,
                "seconds_at_work": round(work.seconds, 1),
                "lost_after_seconds": ", ".join(f"{seconds:,.0f}" for seconds in work.lost_at),
            }
            rows.append(dg.TableRecord(row))
        return dg.MetadataValue.table(rows)

    def fail(self, failure: Failure) -> None:
        self.failures[to_partition_key(failure.key)] = failure

    def count(self, event: Event) -> None:
        """Count one event of the engine for the run's checks; a partition that is encoded twice
        counts once."""
        match event:
            case SuperBatchReport():
                self.pace.add(event)
            case OldVectorSample():
                self.drift.add(event)
            case Receipt(action="fresh"):
                self.fresh.add(event.key)
            case Receipt():
                if event.action == "encoded":
                    self._count_encoded(event)
                else:
                    self.republished.add(event.key)
                self.published.add(event.key)

    def _count_encoded(self, receipt: Receipt) -> None:
        if receipt.key not in self.published:
            self.truncation.add(receipt.key, receipt.rows, receipt.truncated)
