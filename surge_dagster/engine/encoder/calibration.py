"""What a first start measures and later starts reuse: lowest cosine, token budget, and speed.

One document on disk per vector space, backend, precision, machine and set of library versions; it
can be deleted at any time. Workers write the cosine and the token budget. The pool writes its speed
(`speed.py`), and each run what reading and publishing took.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from surge_dagster.engine.encoder.devices import library_versions
from surge_dagster.engine.model.digest import json_sha256
from surge_dagster.engine.support import disk_cache

# Increased when the way this package drives a backend, the parity texts or the rows of observations
# change, so that older cached answers are not used.
_REVISION = 14
OBSERVATIONS = 256  # kept of each kind


class Calibration:
    def __init__(self, name: str) -> None:
        self.name = name

    def read(self, value: str) -> Any:
        """Return a measurement; None if it was not made yet."""
        return (disk_cache.read_json(self.name) or {}).get(value)

    def write(self, **values: Any) -> None:
        with disk_cache.lock("calibration/.lock"):
            disk_cache.write_json(self.name, (disk_cache.read_json(self.name) or {}) | values)

    def observations(self, name: str) -> list[list[float]]:
        """Return the rows of numbers kept under a name, oldest first."""
        return self.read(name) or []

    def observe(self, name: str, rows: Iterable[Iterable[float]]) -> None:
        """Add rows of numbers to those kept under a name; the newest stay."""
        added = [list(row) for row in rows]
        self.write(**{name: [*self.observations(name), *added][-OBSERVATIONS:]})


def cache_key(*facts: object) -> str:
    """Return 32 hex digits over `facts`, the libraries' versions and this package's revision."""
    return json_sha256([_REVISION, library_versions(), [str(fact) for fact in facts]])[:32]
