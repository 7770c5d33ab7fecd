"""What the driver knows of a machine: what it has done, how fast, and whether its files are those that all see."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from surge_dagster.cluster.machine import MachineFacts
from surge_dagster.engine.errors import ConfigError, SurgeError
from surge_dagster.engine.files.formats import read_published_file
from surge_dagster.engine.run.report import Receipt
from surge_dagster.engine.store import open_store
from surge_dagster.engine.support.timeline import Span
from surge_dagster.engine.support.urls import is_object_store

IN_VAIN = 2  # stretches of which every partition failed, after which a machine that has done nothing has to wait
_WAIT_SECONDS = 60.0  # for its next one: it may be that the partitions were bad, and not the machine
_JOINED_SECONDS = 1.0  # stretches of a machine with no longer pause are one span


@dataclass(slots=True)
class MachineWork:
    """What a machine has done so far.

    Attributes:
        weight: of its sound stretches, in bytes of text.
        in_vain: stretches of which every partition failed.
        has_published: a file, which the driver has found.
        spans: when it was at work, in seconds since the run began, ascending and apart.
        lost_at: likewise, when stretches came back because it was lost.
    """

    facts: MachineFacts
    stretches: int = 0
    texts: int = 0
    weight: int = 0
    in_vain: int = 0
    has_published: bool = False
    spans: list[Span] = field(default_factory=list)
    lost_at: list[float] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(span.busy_seconds for span in self.spans)

    @property
    def bytes_per_second(self) -> float | None:
        return self.weight / self.seconds if self.spans and self.weight else None

    def is_useless(self, now: float) -> bool:
        """Whether it has done nothing, not even in its last trial, and gets no more while another machine does."""
        return self.in_vain >= IN_VAIN and not self.weight and now < self.spans[-1].ended + _WAIT_SECONDS

    def was_at_work(self, begun: float, ended: float) -> None:
        """Enter the time of a stretch, in the order of their ends; that of two at once counts once."""
        last = self.spans[-1] if self.spans else Span(begun, begun, 0.0)
        if begun <= last.ended + _JOINED_SECONDS:
            self.spans[-1:] = [Span(last.begun, ended, last.busy_seconds + ended - max(begun, last.ended))]
        else:
            self.spans.append(Span(begun, ended, ended - begun))


def require_shared(machine: str, receipt: Receipt) -> None:
    """Refuse a machine whose files only itself has."""
    if is_object_store(receipt.path):
        return
    path, found = Path(receipt.path), "has another file there"
    try:
        facts = read_published_file(open_store(path.parent), path.name).facts
        # A copy of its stretch may have replaced it, and is newer.
        is_old = facts.oldest_encoded_at < receipt.oldest_encoded_at
        if facts.source_version == receipt.source_version and not is_old:
            return
    except (OSError, SurgeError) as error:
        found = "has no such file" if isinstance(error, FileNotFoundError) else f"cannot read it ({error})"
    raise ConfigError(
        f"the machine {machine} published {path}, and this machine {found}. All machines need one output: name a "
        "bucket, or a folder that they share"
    )
