"""What became of a run: over all of its attempts, since Dagster and whoever looks at it know one run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

from surge_dagster.check_policy import CheckPolicy
from surge_dagster.engine.report import Failure, RunReport
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.orchestration.run_findings import RunFindings


@dataclass(slots=True)
class Outcome:
    """What became of a run.

    Attributes:
        report: the engine's figures of this attempt.
        partitions: those the run was about, by catalog key.
        failures: what was refused or could not be published.
        unknown: those of the failures that are about a partition of Dagster's alone, by its key there.
        removed: keys that an unattended run was requested for and that were removed from the source since, without a
            file.
        findings: what the engine's events showed beside that.
        published: catalog keys of what any attempt has published.
        fresh: catalog keys of what any attempt found up to date.
        ended_by: the error that ended the run before its time, where no attempt follows.
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
    _untried: dict[str, Failure] = field(default_factory=dict)  # failed in the attempt before, and not tried since

    @classmethod
    def after(cls, before: Outcome | None, policy: CheckPolicy) -> Self:
        """That of an attempt: where one was before it, its figures and findings are added to."""
        if before is None:
            return cls(findings=RunFindings(policy))
        return cls(
            partitions=before.partitions,
            unknown=before.unknown,
            findings=RunFindings(policy, before.findings),
            published=before.published,
            fresh=before.fresh,
            _report_before=before.figures,
            _untried={failure.key: failure for failure in before.failures},
        )

    @property
    def figures(self) -> RunReport:
        """Those of all attempts; a partition that one of them published and another one found fresh was published."""
        report = self.report.after(self._report_before) if self._report_before else self.report
        skipped = len(self.fresh - self.published)
        return replace(report, partitions_written=len(self.published), partitions_skipped=skipped)

    @property
    def refused(self) -> list[Failure]:
        """Failures that are about the content of a partition of the catalog, so that it has to change."""
        return [failure for failure in self.failures if self._is_refusal(failure)]

    def begin(self, partitions: dict[str, Partition]) -> None:
        """Take what is listed now: what was refused and is as it was stays refused, since bad data is read once.

        Args:
            partitions: those the run is about, by key.
        """
        for failure in filter(self._is_refusal, list(self._untried.values())):
            del self._untried[failure.key]
            listed = partitions.get(failure.key)
            if listed is not None and listed.source_version == self.partitions[failure.key].source_version:
                self.failures.append(failure)
        self.partitions = partitions

    def fail(self, failure: Failure) -> None:
        """A partition was refused or could not be published."""
        self.tried(failure.key)
        self.failures.append(failure)

    def tried(self, key: str) -> None:
        """What an attempt before said of a partition is out of date."""
        self._untried.pop(key, None)

    def settle(self) -> None:
        """What failed in the attempt before and was not tried again, though it is in the catalog, has failed."""
        self.failures += [failure for key, failure in self._untried.items() if key in self.partitions]
        self._untried.clear()

    def give_up(self) -> None:
        """An error has ended the attempt: what it had still to try is as the one before left it.

        The engine may have found failures that nobody has heard of any more.
        """
        known = {failure.key for failure in self.failures}
        for failure in self.report.partitions_failed:
            if failure.key not in known:
                self.fail(failure)
        self.failures += self._untried.values()
        self._untried.clear()

    def _is_refusal(self, failure: Failure) -> bool:
        return failure.in_source and not failure.transient and failure.key in self.partitions
