"""Switching the current space: only to a space that is complete and verified.

First the footers are compared with the catalog, which takes seconds and finds what is missing. Then
every file is compared with its source, which takes as long as reading the catalog and the output.
The switch itself replaces one small object; readers that have opened a space stay with it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from surge_dagster.engine.errors import ConfigError, SurgeError, TransientError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.current_space import CurrentSpace, read_current, write_current
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.sources.partition import Source
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.counts import named
from surge_dagster.engine.verify.verification import Compared, Kind, Verified, Violation, verify

_INCOMPLETE: dict[str, tuple[Kind, str, str]] = {
    "stale": ("stale", "its file was made from an earlier source version.", ""),
    "foreign": ("space", "its file holds vectors of another space.", "Move it away."),
    "missing": ("missing", "it has no valid file.", ""),
}


@dataclass(frozen=True, slots=True)
class Switched:
    """The result of a switch; a space that was already current is not verified or `changed`."""

    current: CurrentSpace
    changed: bool
    partitions: int = 0
    rows: int = 0


class SwitchRefused(SurgeError):
    """A space is incomplete or damaged; the current space did not change.

    Attributes:
        counts: violations by kind, such as "missing" and "stale".
    """

    def __init__(self, space: str, violations: list[Violation], partitions: int) -> None:
        self.violations = violations
        self.counts = Counter(violation.kind for violation in violations)
        what = ", ".join(f"{count:,} {kind}" for kind, count in sorted(self.counts.items()))
        which = named((f"{violation.key!r} ({violation.kind})" for violation in violations), 10)
        super().__init__(
            f"the space {space!r} does not become the current one: of {partitions:,} partitions, "
            f"{what}: {which}. The first one: {violations[0].reason} Remove damaged files, embed "
            "what is missing then, and switch again."
        )


def switch_space(source: Source, store: Store, space: Space) -> Switched:
    """Make a space the one that readers use, if it is complete and every file in it is valid.

    No model is needed. Valid files of partitions that were removed from the source are ignored, and
    partitions that the current space lacks, too, such as those with bad data.

    Raises:
        SwitchRefused: partitions are missing, stale, refused or damaged, or differ from the source.
        SwitchedMeanwhile: another switch took place during the verification.
    """
    seen = read_current(store)
    if seen is not None and seen.space == space.name:
        return Switched(seen, changed=False)
    lacking = _require_complete(source, store, space, seen)

    violations: list[Violation] = []
    verified = 0
    rows = 0
    for event in verify(source, store, space):
        if isinstance(event, Compared) or event.key in lacking:
            continue
        if isinstance(event, Verified):
            verified += 1
            rows += event.rows
        elif event.kind not in ("orphan", "unused"):
            violations.append(event)
    if violations and all(violation.kind == "unread" for violation in violations):
        raise TransientError(
            f"the space {space.name!r} could not be verified: {len(violations):,} of {verified:,} "
            f"partitions could not be read. The first one: {violations[0].reason} Then switch "
            "again."
        )
    if violations:
        raise SwitchRefused(space.name, violations, verified)
    return Switched(write_current(store, space.name, seen=seen), True, verified, rows)


def _require_complete(
    source: Source, store: Store, space: Space, current: CurrentSpace | None
) -> set[str]:
    """Compare the footers of a space with the catalog; return the keys that the current space
    lacks, too."""
    outputs = OutputState(store, space.name)
    readers_files = OutputState(store, current.space) if current is not None else None
    lacking: set[str] = set()
    violations: list[Violation] = []
    partitions = 0
    for partition in outputs.looked_at(source):
        partitions += 1
        freshness = outputs.freshness(partition)
        if freshness.error is not None:
            raise freshness.error
        is_missing = freshness.status == "missing" and freshness.invalid is None
        if is_missing and readers_files and readers_files.freshness(partition).status == "missing":
            lacking.add(partition.key)
        elif freshness.status in _INCOMPLETE:
            violations.append(Violation(partition.key, *_INCOMPLETE[freshness.status]))
    if not partitions:
        raise ConfigError(
            "the source has no partitions, so no space can be complete. Give the right source."
        )
    if violations:
        raise SwitchRefused(space.name, violations, partitions)
    return lacking
