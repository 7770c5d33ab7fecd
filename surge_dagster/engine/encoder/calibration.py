"""What a first start measures and later starts reuse: the lowest cosine, the best token budget, the costs of a run.

One document on disk per vector space, backend, precision, machine and set of library versions; it can be deleted at any
time. Workers write the cosine and the token budget, the pool writes the encode calls that it timed, and each run adds
its SuperBatches and its B_min: the next B_min and the planner's predictions follow from these.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from surge_dagster.engine.encoder.devices import library_versions
from surge_dagster.engine.model.digest import canonical_json
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.support import disk_cache

MEASURING_LOCK = "calibration/.measuring"
# Increased when the way this package drives a backend, the parity texts or the rows of observations change, so that
# older cached answers are not used.
_REVISION = 9
OBSERVATIONS = 256  # kept of each kind


class Calibration:
    def __init__(self, name: str) -> None:
        self.name = name

    def read(self, value: str) -> Any:
        """A measurement; None when it was not made yet."""
        return (disk_cache.read_json(self.name) or {}).get(value)

    def write(self, **values: Any) -> None:
        with disk_cache.lock("calibration/.lock"):
            disk_cache.write_json(self.name, (disk_cache.read_json(self.name) or {}) | values)

    def observations(self, name: str) -> list[list[float]]:
        """The rows of numbers kept under a name, oldest first."""
        return self.read(name) or []

    def observe(self, name: str, rows: Iterable[Iterable[float]], *, anew: bool = False) -> None:
        """Adds rows of numbers to those kept under a name, or puts them in their place; the newest stay."""
        with disk_cache.lock("calibration/.lock"):
            document = disk_cache.read_json(self.name) or {}
            before = [] if anew else document.get(name, [])
            document[name] = [*before, *([float(f"{value:.6g}") for value in row] for row in rows)][
                -OBSERVATIONS:
            ]
            disk_cache.write_json(self.name, document)


def cache_key(*facts: object) -> str:
    """32 hex digits over `facts`, the library versions and the revision of this package's backends."""
    document = [_REVISION, library_versions(), [str(fact) for fact in facts]]
    return hashlib.sha256(canonical_json(document)).hexdigest()[:32]


def calibration_name(
    space: Space, *, backend: str, detail: str, precision: str, machine: str
) -> str:
    """`machine` is the kind of device and the threads of a worker."""
    key = cache_key(space.vectors_key, backend, detail, precision, machine)
    return f"calibration/{key}.json"
