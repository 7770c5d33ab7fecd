"""Switching the current space: only to a space that is complete and verified.

First the footers are compared with the catalog, which takes seconds and finds what is missing. Then every file is read
side by side with its source, which takes as long as reading the whole catalog and output. The result holds for the
catalog as it was listed at the start. The switch itself replaces one small object; readers that have
opened a space stay with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from surge_dagster.engine.errors import ConfigError, SurgeError, TransientError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.current_space import CurrentSpace, read_current, write_current
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.sources.partition import Source
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.verify.verification import Kind, Verified, Violation, verify

_KEPT = 200
_NAMED = 10
_INCOMPLETE: dict[str, tuple[Kind, str, str]] = {
    "stale": ("stale", "its file was made from an earlier source version.", ""),
    "foreign": ("space", "its file holds vectors of another space.", "Move it away."),
    "missing": ("missing", "it has no valid file.", ""),
}


@dataclass(frozen=True, slots=True)
class Switched:
    """The result of a switch.

    Attributes:
        current: the current space of readers now.
        changed: False when the space was current already; it was not verified then.
        partitions, rows: of the space, as verified.
    """

    current: CurrentSpace
    changed: bool
    partitions: int = 0
    rows: int = 0


class SwitchRefused(SurgeError):
    """A space is incomplete or damaged; the current space did not change.

    Attributes:
        counts: violations by kind, such as "missing" and "stale".
        violations: the first of them.
    """

    def __init__(self, space: str, found: Iterable[Violation], partitions: int) -> None:
        kept: list[Violation] = []
        self.counts: Counter[str] = Counter()
        for violation in found:
            self.counts[violation.kind] += 1
            if len(kept) < _KEPT:
                kept.append(violation)
        self.violations = tuple(kept)
        what = ", ".join(f"{count:,} {kind}" for kind, count in sorted(self.counts.items()))
        named = ", ".join(f"{violation.key!r} ({violation.kind})" for violation in kept[:_NAMED])
        total = self.counts.total()
        more = f" and {total - _NAMED:,} more" if total > _NAMED else ""
        first = f" The first one: {kept[0].reason}" if kept else ""
        super().__init__(
            f"the space {space!r} does not become the current one: of {partitions:,} partitions, {what}: {named}{more}."
            f"{first} Embed into it what it lacks, then switch again."
        )


def missing_from(source: Source, store: Store, space: Space) -> tuple[list[Violation], int]:
    """Partitions without a fresh file in the space, from footers alone, and the number of all partitions."""
    outputs = OutputState(store, space.name, space.file_format)
    found: list[Violation] = []
    partitions = 0
    for partition in outputs.looked_at(source):
        partitions += 1
        freshness = outputs.freshness(partition)
        if freshness.error is not None:
            raise freshness.error
        if freshness.status in _INCOMPLETE:
            found.append(Violation(partition.key, *_INCOMPLETE[freshness.status]))
    return found, partitions


def switch_space(source: Source, store: Store, space: Space) -> Switched:
    """Make a space the one that readers use, if it is complete and every file in it is valid.

    Nothing is encoded, and no model is needed. Files of partitions that the source no longer has do not count.

    Raises:
        SwitchRefused: partitions are missing, stale, refused or damaged, or files are not what the source says.
        SwitchedMeanwhile: another switch took place during the verification.
        ConfigError: the source has no partitions, or cannot be listed.
        TransientError: the source or the store does not answer.
    """
    seen = read_current(store)
    if seen is not None and seen.space == space.name:
        return Switched(seen, changed=False)
    found, partitions = missing_from(source, store, space)
    if not partitions:
        raise ConfigError("the source has no partitions, so no space can be complete. Give the right source.")
    if found:
        raise SwitchRefused(space.name, found, partitions)
    verified = rows = 0
    for event in verify(source, store, space):
        if isinstance(event, Verified):
            verified, rows = verified + 1, rows + event.rows
        elif isinstance(event, Violation) and event.kind != "orphan":
            found.append(event)
    if found and all(violation.kind == "unread" for violation in found):
        raise TransientError(
            f"the space {space.name!r} could not be verified: {len(found):,} of {verified:,} partitions could not be "
            f"read. The first one: {found[0].reason} Then switch again."
        )
    if found:
        raise SwitchRefused(space.name, found, verified)
    return Switched(write_current(store, space.name, seen=seen), True, verified, rows)
