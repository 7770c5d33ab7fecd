"""What a machine has done, and whether all machines see its files."""

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

_JOINED_SECONDS = 1.0  # stretches of a machine with no longer pause are one span


@dataclass(slots=True)
class MachineWork:
    """What a machine has done so far.

    Attributes:
        stretches: those it has done.
        weight: of these, in bytes of text.
        failures: stretches that failed before it has done one.
        has_published: the driver has found a file of this machine.
        spans: when it was at work, in seconds since the run began, ascending and apart.
        lost_at: likewise, when stretches came back because it was lost.
    """

    facts: MachineFacts
    stretches: int = 0
    texts: int = 0
    weight: int = 0
    failures: int = 0
    has_published: bool = False
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


def require_shared(machine: str, receipt: Receipt) -> None:
    """Refuse a machine whose output is a folder that the driver does not see.

    Raises:
        ConfigError: the driver does not find the file of this receipt.
    """
    if is_object_store(receipt.path):
        return
    path = Path(receipt.path)

    try:
        facts = read_published_file(open_store(path.parent), path.name).facts
        is_older = facts.oldest_encoded_at < receipt.oldest_encoded_at
        if facts.source_version == receipt.source_version and not is_older:
            return
        found = "has another file there"
    except FileNotFoundError:
        found = "has no such file"
    except (OSError, SurgeError) as error:
        found = f"cannot read it ({error})"

    raise ConfigError(
        f"the machine {machine} published {path}, and this machine {found}. All machines need one "
        "output: name a bucket, or a folder that they share"
    )
