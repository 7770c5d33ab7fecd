"""The outcome of a run: what failed, what was published, and what the run's checks look at.

The checks `dimensions_match` and `row_counts_match` use what a run knows of each file anyway: it
reads the footer of each file to decide whether the partition is fresh, and has a receipt of each
file that it publishes. So they cover every partition that the run published or found fresh, and
read nothing of their own.

The rows are compared with the row count of the source, if the source knows it without reading, as
folders of Parquet files and tables do. Otherwise they are what the run has read; of a fresh file
`row_counts_match` then judges nothing.

A file with a fault is not valid: the run that finds it encodes the partition again, if its config
selects missing partitions. The check still fails in this run, and passes in the next one.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

from surge_dagster.cluster.machine import MachineWork
from surge_dagster.engine.files.facts import InvalidFile
from surge_dagster.engine.model.spec import Space
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
from surge_dagster.engine.tables.grouping import UNASSIGNED
from surge_dagster.orchestration.partition_keys import to_partition_key

_NAMED = 5  # failed partitions, in the line of a run
Violations = list[tuple[str, str]]  # partitions that violate a check: catalog key and reason


@dataclass(slots=True)
class FileChecks:
    """What both checks found in a run, by the catalog keys of the partitions that they judged.

    Attributes:
        dimensions: why `dimensions_match` fails; "" if the file is right.
        rows: the same for `row_counts_match`.
    """

    dimensions: dict[str, str] = field(default_factory=dict)
    rows: dict[str, str] = field(default_factory=dict)

    def record(self, partition: Partition, receipt: Receipt, space: Space) -> None:
        """Record whether a file is as its space and source demand."""
        wrong_dimension = ""
        if receipt.dimension != space.dimension:
            wrong_dimension = (
                f"its file has {receipt.dimension} numbers per row; the space has "
                f"{space.dimension}."
            )
        _record(self.dimensions, partition.key, wrong_dimension)

        wrong_rows = ""
        if partition.source_rows not in (None, receipt.source_rows):
            wrong_rows = (
                f"its file is made of {receipt.source_rows:,} rows; its source has "
                f"{partition.source_rows:,}."
            )
        if partition.source_rows is not None or receipt.action != "fresh":
            _record(self.rows, partition.key, wrong_rows)

    def record_invalid(self, key: str, invalid: InvalidFile) -> None:
        """Record what is wrong with a file that is not valid."""
        if invalid.flaw == "dimension":
            _record(self.dimensions, key, f"{invalid}.")
        if invalid.flaw == "rows":
            _record(self.rows, key, f"{invalid}.")

    def fault(self, key: str) -> str:
        """Return what is wrong with the file of a partition; "" if it is right."""
        return self.dimensions.get(key) or self.rows.get(key) or ""


def _record(faults: dict[str, str], key: str, fault: str) -> None:
    # A fault stays on record if the run encodes the partition again.
    faults[key] = faults.get(key) or fault


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
class SetAside:
    """Counts bad rows that were set aside, of files that a run published or found up to date."""

    max_share: float
    _counts: dict[str, tuple[int, int]] = field(default_factory=dict)  # by catalog key

    def add(self, key: str, rejected_rows: int, source_rows: int) -> None:
        """Record a file; what was recorded of an earlier one of the partition is forgotten."""
        self._counts[key] = (rejected_rows, source_rows)

    @property
    def partitions(self) -> int:
        return len(self._counts)

    @property
    def above(self) -> Violations:
        """Partitions with a larger share than allowed. Rows of a table that have no key are
        compared with all rows."""
        violations: Violations = []
        all_rows = sum(rows for _, rows in self._counts.values())
        for key, (rejected, rows) in self._counts.items():
            if key == UNASSIGNED:
                rows = all_rows
            if rejected > self.max_share * rows:
                share = f"{rejected:,} of {counted(rows, 'row')} ({rejected / max(1, rows):.1%})"
                violations.append((key, f"{share} were set aside because they are bad"))
        return violations

    def metrics(self) -> dict[str, Any]:
        rejected = sum(rejected for rejected, _ in self._counts.values())
        rows = sum(rows for _, rows in self._counts.values())
        return {
            "rejected_rows": rejected,
            "rejected_share": round(rejected / rows, 6) if rows else 0.0,
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
    set_aside: SetAside
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

    def sum_up(self) -> str:
        """Describe the run in one line, `summary`; each of its partitions is in one count."""
        rest = "not reached" if self.ended_by else "left out by select"
        failed = sorted({failure.key for failure in self.failures.values()})
        states = dict.fromkeys(self.partitions, rest)
        states |= dict.fromkeys(self.fresh, "up to date")
        states |= dict.fromkeys(self.published, "encoded")
        states |= dict.fromkeys(self.republished, "republished")
        states |= dict.fromkeys(self.removed, "removed from the source")
        states |= dict.fromkeys(failed, "failed")
        if self.ended_by is not None and not states:
            self.summary = f"failed before it began: {self.ended_by}"
            return self.summary

        counts = Counter(states.values())
        parts = [f"{counts['encoded']:,} encoded{self._texts()}"]
        parts.append(f"{counts['up to date']:,} up to date")
        for state in ("republished", "removed from the source", rest):
            if counts[state]:
                parts.append(f"{counts[state]:,} {state}")
        names = f" ({named(failed, _NAMED)})" if failed else ""
        parts.append(f"{len(failed):,} failed{names}")
        self.seconds = time.monotonic() - self.begun
        parts.append(f"{self.seconds:,.1f} s")
        self.summary = f"{counted(len(states), 'partition')}: {', '.join(parts)}"
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

    def table_of_machines(self) -> dg.TableMetadataValue:
        """Return a table of a cluster's machines: work, speed, and when a machine was lost."""
        rows: list[dg.TableRecord] = []
        for work in (self.machines or {}).values():
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
                if event.action != "encoded":
                    self.republished.add(event.key)
                elif event.key not in self.published:
                    self.truncation.add(event.key, event.rows, event.truncated)
                self.set_aside.add(event.key, event.rejected_rows, event.source_rows)
                self.published.add(event.key)
