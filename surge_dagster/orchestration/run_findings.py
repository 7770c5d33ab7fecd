"""What a run's events show beside receipts and failures: for its pictures, and for checks that only warn.

Everything is counted as the events come by and stays small, whatever the number of partitions and SuperBatches.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from surge_dagster.check_policy import MIN_PREVIOUS_COSINE, CheckPolicy
from surge_dagster.engine.report import Failure, Receipt, SuperBatchReport
from surge_dagster.engine.support.timeline import Entry, Timeline

_LISTED = 200


@dataclass(slots=True)
class Listed:
    """Partitions for which something does not hold: all are counted, the first ones listed with the reason."""

    count: int = 0
    rows: list[tuple[str, str]] = field(default_factory=list)

    def add(self, key: str, reason: str) -> None:
        """Add a partition."""
        self.count += 1
        if len(self.rows) < _LISTED:
            self.rows.append((key, reason))

    def join(self, other: Listed) -> None:
        """Add those of another list, which are not in this one."""
        self.count += other.count
        self.rows += other.rows[: max(0, _LISTED - len(self.rows))]


@dataclass(slots=True)
class Truncation:
    """Texts of which the model saw only the first tokens.

    Attributes:
        above: partitions with more of them than the policy allows.
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
        """Of all texts counted."""
        return self.truncated / self.rows if self.rows else 0.0


@dataclass(slots=True)
class PreviousVectors:
    """Vectors of texts that were encoded again, beside those that they had.

    Attributes:
        partitions, rows: that were compared.
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
        """Over all rows compared."""
        return self._cosines / self.rows if self.rows else None


class RunFindings:
    """Looks at the engine's events.

    Args:
        policy: of the checks.
        before: of the attempt before this one: checks are about the whole run, pictures about one attempt.
    """

    def __init__(self, policy: CheckPolicy | None = None, before: RunFindings | None = None) -> None:
        policy = policy or CheckPolicy()
        self.timeline = Timeline()
        self.sizes: Counter[int] = Counter()  # partitions by the bits that their number of rows takes
        self.truncation = before.truncation if before else Truncation(policy)
        self.previous = before.previous if before else PreviousVectors()
        self._counted = before._counted if before else set[str]()  # keys; what is encoded twice counts once

    def see(self, event: SuperBatchReport | Receipt | Failure) -> None:
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
