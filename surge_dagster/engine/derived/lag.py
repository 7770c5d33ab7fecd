"""How far a derived space is behind its parent, from the footers of both: no row is read."""

from __future__ import annotations

from dataclasses import dataclass, field

from surge_dagster.engine.derived.parent_files import beside_parent
from surge_dagster.engine.model.derivation import DerivedDtype
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.output.spaces import list_spaces
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.counts import counted


@dataclass(slots=True)
class Lag:
    """What a derived space lacks of its parent.

    Attributes:
        space: its name; empty if the output does not have it.
        fresh: number of partitions whose file names the rows of the parent's file.
        missing: keys of partitions without a file.
        stale: keys of partitions whose file was derived from earlier rows.
        not_judged: keys of partitions with a file that cannot be read, and why.
    """

    space: str
    fresh: int = 0
    missing: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    not_judged: list[tuple[str, str]] = field(default_factory=list)

    @property
    def judged(self) -> int:
        return self.fresh + len(self.missing) + len(self.stale)

    def in_words(self) -> str:
        """Return the lag for people in a line."""
        counts = {
            "missing": len(self.missing),
            "derived from earlier rows": len(self.stale),
            "not judged, because a file cannot be read": len(self.not_judged),
        }
        total = counted(self.judged + len(self.not_judged), "partition")
        line = f"{self.fresh:,} of {total} up to date"
        for what, count in counts.items():
            if count:
                line += f", {count:,} {what}"
        return line


def find_derived(store: Store, wanted: Space) -> Space | None:
    """Return the derived space with the parent, dtype and dimension of `wanted`, if there is one.

    Its ranges may be other ones.
    """
    for space in list_spaces(store):
        if _conversion(space) == _conversion(wanted):
            return space
    return None


def _conversion(space: Space) -> tuple[str, str, int] | None:
    if space.derived is None:
        return None
    return space.derived.parent_sha256, space.dtype, space.dimension


def find_lag(store: Store, parent: Space, dtype: DerivedDtype, dimension: int | None) -> Lag:
    """Compare each file of the parent with the file that is derived from it."""
    wanted = parent.derive(dtype, dimension)
    space = find_derived(store, wanted)
    lag = Lag(space.name if space else "")
    parents = OutputState(store, parent.name).files()
    own = space or wanted
    derived = OutputState(store, own.name)
    derived.files()  # reads them concurrently from a bucket
    for judged in beside_parent(store, parent, parents, derived):
        if not isinstance(judged, tuple):
            lag.not_judged.append((judged.key or "?", str(judged)))
            continue
        file, freshness = judged
        if freshness.status == "fresh":
            lag.fresh += 1
        elif freshness.status == "stale":
            lag.stale.append(file.facts.partition_key)
        else:
            lag.missing.append(file.facts.partition_key)
    return lag
