"""The outcome of a run over all of its attempts: what failed, what was published, and what the run's checks look at.

Dagster and its users see one run, however many attempts it takes. Findings are counted while the engine's events come
in and stay small, whatever the number of partitions and SuperBatches.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Self

from surge_dagster.check_policy import MIN_PREVIOUS_COSINE, CheckPolicy
from surge_dagster.engine.report import Failure, Receipt, RunReport, SuperBatchReport
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.support.timeline import Entry, Timeline

_LISTED = 200


@dataclass(slots=True)
class Listed:
    """Partitions that violate a check: all are counted, the first ones are listed with the reason."""

    count: int = 0
    rows: list[tuple[str, str]] = field(default_factory=list)

    def add(self, key: str, reason: str) -> None:
        """Add a partition."""
        self.count += 1
        if len(self.rows) < _LISTED:
            self.rows.append((key, reason))

    def join(self, other: Listed) -> None:
        """Add the partitions of another list, which has none of this one."""
        self.count += other.count
        self.rows += other.rows[: max(0, _LISTED - len(self.rows))]


@dataclass(slots=True)
class Truncation:
    """Counts texts that are longer than the model reads.

    Attributes:
        above: partitions with a larger share of them than the policy allows.
    """

    policy: CheckPolicy
    rows: int = 0
    truncated: int = 0
    above: Listed = field(default_factory=Listed)

    def add(self, key: str, rows: int, truncated: int) -> None:
        """Count a partition."""
        self.rows += rows
        self.truncated += truncated
        if rows and truncated / rows > self.policy.max_truncated_share:
            self.above.add(
                key, f"{truncated:,} of {rows:,} texts ({truncated / rows:.1%}) are longer than the model reads"
            )

    @property
    def share(self) -> float:
        """Of all counted texts."""
        return self.truncated / self.rows if self.rows else 0.0


@dataclass(slots=True)
class PreviousVectors:
    """Compares the vectors of texts that were encoded again with their previous vectors.

    Attributes:
        partitions, rows: how many were compared.
        below: partitions whose mean cosine is below `MIN_PREVIOUS_COSINE`.
    """

    partitions: int = 0
    rows: int = 0
    below: Listed = field(default_factory=Listed)
    _cosines: float = 0.0

    def add(self, key: str, rows: int, mean_cosine: float) -> None:
        """Count a partition."""
        self.partitions += 1
        self.rows += rows
        self._cosines += rows * mean_cosine
        if mean_cosine < MIN_PREVIOUS_COSINE:
            reason = f"{rows:,} unchanged texts have a mean cosine of {mean_cosine:.4f} to their old vectors"
            self.below.add(key, f"{reason}; expected at least {MIN_PREVIOUS_COSINE}")

    @property
    def mean_cosine(self) -> float | None:
        """Over all compared rows."""
        return self._cosines / self.rows if self.rows else None


class RunFindings:
    """What the engine's events show beside receipts and failures, for charts and for the checks that only warn.

    Args:
        policy: of the checks.
        before: of the previous attempt: checks cover the whole run, charts one attempt.
    """

    def __init__(self, policy: CheckPolicy | None = None, before: RunFindings | None = None) -> None:
        policy = policy or CheckPolicy()
        self.timeline = Timeline()
        self.sizes: Counter[int] = Counter()  # partitions by the bits that their number of rows takes
        self.truncation = before.truncation if before else Truncation(policy)
        self.previous = before.previous if before else PreviousVectors()
        self._counted = before._counted if before else set[str]()  # a partition that is encoded twice counts once

    def add(self, event: SuperBatchReport | Receipt | Failure) -> None:
        """Count one event."""
        match event:
            case SuperBatchReport():
                spans = event.encode_span, event.serialize_span, event.upload_span
                self.timeline.add(Entry(1, event.texts, event.encode_seconds, *spans))
            case Receipt(action="encoded"):
                self.sizes[event.rows.bit_length()] += 1
                if event.key in self._counted:
                    return
                self._counted.add(event.key)
                self.truncation.add(event.key, event.rows, event.truncated)
                if event.previous_cosine is not None:
                    self.previous.add(event.key, event.compared_rows, event.previous_cosine)


@dataclass(slots=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        report: the engine's metrics of this attempt.
        partitions: the partitions of the run, by catalog key.
        failures: partitions that were refused or could not be published.
        unknown: failures of partitions that only Dagster has, by its partition key.
        removed: keys that an unattended run was launched for and that were removed from the source since, without a
            file.
        findings: what the engine's events showed beside that.
        published: catalog keys that any attempt has published.
        fresh: catalog keys that any attempt found up to date.
        ended_by: the error that ended the run early, where no attempt follows.
    """

    report: RunReport = field(default_factory=RunReport)
    partitions: dict[str, Partition] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    unknown: set[Failure] = field(default_factory=set)
    removed: list[str] = field(default_factory=list)
    findings: RunFindings = field(default_factory=RunFindings)
    published: set[str] = field(default_factory=set)
    fresh: set[str] = field(default_factory=set)
    ended_by: Exception | None = None
    _report_before: RunReport | None = None
    _untried: dict[str, Failure] = field(default_factory=dict)  # failures of the previous attempt, not tried since

    @classmethod
    def after(cls, before: Outcome | None, policy: CheckPolicy) -> Self:
        """The outcome of a new attempt; it continues the metrics and findings of the previous attempt."""
        if before is None:
            return cls(findings=RunFindings(policy))
        return cls(
            partitions=before.partitions,
            unknown=before.unknown,
            findings=RunFindings(policy, before.findings),
            published=before.published,
            fresh=before.fresh,
            _report_before=before.metrics,
            _untried={failure.key: failure for failure in before.failures},
        )

    @property
    def metrics(self) -> RunReport:
        """The metrics of all attempts; a partition that one published and another found fresh counts as published."""
        report = self.report.after(self._report_before) if self._report_before else self.report
        skipped = len(self.fresh - self.published)
        return replace(report, partitions_written=len(self.published), partitions_skipped=skipped)

    @property
    def refused(self) -> list[Failure]:
        """Failures that lie in the content of a partition of the catalog, which has to change."""
        return [failure for failure in self.failures if self._is_refusal(failure)]

    def begin(self, partitions: dict[str, Partition]) -> None:
        """Enter the partitions of this attempt; what the previous one refused and has not changed stays refused.

        Args:
            partitions: as they are listed now, by key.
        """
        for failure in filter(self._is_refusal, list(self._untried.values())):
            del self._untried[failure.key]
            listed = partitions.get(failure.key)
            if listed is not None and listed.source_version == self.partitions[failure.key].source_version:
                self.failures.append(failure)
        self.partitions = partitions

    def fail(self, failure: Failure) -> None:
        """Enter a partition that was refused or could not be published."""
        self.tried(failure.key)
        self.failures.append(failure)

    def tried(self, key: str) -> None:
        """Forget that a partition failed in the previous attempt: this attempt has its own result."""
        self._untried.pop(key, None)

    def settle(self) -> None:
        """End the attempt: partitions that failed in the previous one and were not tried again have failed."""
        self.failures += [failure for key, failure in self._untried.items() if key in self.partitions]
        self._untried.clear()

    def give_up(self) -> None:
        """End an attempt that an error ended: partitions that it did not try keep their previous failure.

        The engine may have found failures whose events nobody has received.
        """
        known = {failure.key for failure in self.failures}
        for failure in self.report.partitions_failed:
            if failure.key not in known:
                self.fail(failure)
        self.failures += self._untried.values()
        self._untried.clear()

    def _is_refusal(self, failure: Failure) -> bool:
        return failure.in_source and not failure.transient and failure.key in self.partitions
