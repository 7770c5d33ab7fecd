"""What a machine of a cluster has done."""

from __future__ import annotations

from dataclasses import dataclass, field

from surge_dagster.cluster.machine import MachineFacts
from surge_dagster.engine.support.timeline import Span

_JOINED_SECONDS = 1.0  # stretches of a machine with no longer pause are one span


@dataclass(slots=True)
class MachineWork:
    """What a machine has done so far.

    Attributes:
        weight: of its stretches, in bytes of text.
        spans: when it was at work, in seconds since the run began, ascending and apart.
        lost_at: likewise, when stretches came back because it was lost.
    """

    facts: MachineFacts
    texts: int = 0
    weight: int = 0
    spans: list[Span] = field(default_factory=list)
    lost_at: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(span.busy_seconds for span in self.spans)

    def was_at_work(self, begun: float, ended: float) -> None:
        """Record the time of a stretch, in the order of their ends; that of two counts once."""
        last = self.spans[-1] if self.spans else None
        if last is None or begun > last.ended + _JOINED_SECONDS:
            self.spans.append(Span(begun, ended, ended - begun))
            return
        busy_seconds = last.busy_seconds + ended - max(begun, last.ended)
        self.spans[-1] = Span(last.begun, ended, busy_seconds)
