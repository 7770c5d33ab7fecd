"""What a first start measures and later starts reuse: the lowest cosine, the best token budget, the pool's speed.

One document on disk per vector space, backend, precision, machine and set of library versions; it can be deleted at any
time. Workers write the cosine and the token budget, the pool writes its speed: B_min and the planner's forecasts start
from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from surge_dagster.engine.encoder.devices import library_versions
from surge_dagster.engine.model.digest import canonical_json
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.support import disk_cache

MEASURING_LOCK = "calibration/.measuring"
# Increased when the way this package drives a backend or the parity texts change, so that older cached answers are not
# used.
_REVISION = 5
_TEXTS = 256
_TEXTS_OF_FAST_POOLS = 16_384
_FAST_TEXTS_PER_SECOND = 10_000
_WORDS = (
    "steel bottle cotton shirt lamp oak table garden hose travel mug wool scarf desk chair ceramic bowl running shoe "
    "phone case glass jar bath towel ink pen leather belt camping stove rain jacket bread knife"
)


class Calibration:
    """The cached measurements of one space on one kind of device.

    Args:
        name: file name in the disk cache, see `calibration_name`.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def read(self, value: str) -> Any:
        """A measurement by its name; None when it was not made yet."""
        return (disk_cache.read_json(self.name) or {}).get(value)

    def write(self, **values: Any) -> None:
        """Adds measurements to the document."""
        with disk_cache.lock("calibration/.lock"):
            disk_cache.write_json(self.name, (disk_cache.read_json(self.name) or {}) | values)


def cache_key(*facts: object) -> str:
    """32 hex digits over `facts`, the library versions and the revision of this package's backends."""
    document = [_REVISION, library_versions(), [str(fact) for fact in facts]]
    return hashlib.sha256(canonical_json(document)).hexdigest()[:32]


def calibration_name(space: Space, *, backend: str, detail: str, precision: str, machine: str) -> str:
    """The file name of a calibration.

    Args:
        backend: name of the backend.
        detail: the backend's library and settings.
        machine: kind of device and the threads of a worker.
    """
    key = cache_key(space.vectors_key, backend, detail, precision, machine)
    return f"calibration/{key}.json"


def pool_speed(calibration: Calibration, devices: str, time_rounds: Callable[[list[str]], list[float]]) -> float:
    """Texts of about 50 bytes, the size of a product title, that a pool encodes per second; measured once.

    Args:
        devices: the pool's devices; each combination has its own speed.
        time_rounds: encodes the texts several times and returns the seconds of each round after the first, which only
            warms up; the fastest round counts.
    """
    speeds = calibration.read("texts_per_second") or {}
    if isinstance(speeds.get(devices), int | float):
        return float(speeds[devices])
    rate = _TEXTS / min(time_rounds(_speed_texts(_TEXTS)))
    if rate > _FAST_TEXTS_PER_SECOND:
        # A fast pool encodes a few hundred texts before all of its workers have work.
        rate = _TEXTS_OF_FAST_POOLS / min(time_rounds(_speed_texts(_TEXTS_OF_FAST_POOLS)))
    calibration.write(texts_per_second={**speeds, devices: round(rate, 1)})
    return round(rate, 1)


def _speed_texts(count: int) -> list[str]:
    words = _WORDS.split()
    texts = []
    for row in range(count):
        # Six to ten words in an order that depends on the row.
        step, size = 1 + row % 31, 6 + row % 5
        texts.append(" ".join(words[(row + step * place) % len(words)] for place in range(size)))
    return texts
