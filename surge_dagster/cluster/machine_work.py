"""What a machine of a cluster has done."""

from __future__ import annotations

from dataclasses import dataclass, field

from surge_dagster.cluster.machine import MachineFacts


@dataclass(slots=True)
class MachineWork:
    """What a machine has done so far; times are in seconds since the run began.

    Attributes:
        begun: when it could encode first.
        ended: when it ended a stretch last.
        weight: of its stretches, in bytes of text.
        lost_at: when stretches came back because it was lost.
    """

    facts: MachineFacts
    begun: float
    ended: float = 0.0
    texts: int = 0
    weight: int = 0
    lost_at: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """From when it could encode until its last stretch ended."""
        return max(0.0, self.ended - self.begun)
