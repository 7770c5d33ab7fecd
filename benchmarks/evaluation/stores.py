"""Stores of a known slowness: an object appears after its profile's latency plus its bytes over the
bandwidth."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from surge_dagster.engine.files.formats import SUFFIX
from surge_dagster.engine.store.local_store import LocalStore, is_hidden
from surge_dagster.engine.store.store import StoredObject, Upload


@dataclass(frozen=True, slots=True)
class StorageProfile:
    """A store's latency and bandwidth per object."""

    latency_seconds: float
    bytes_per_second: float


# The latencies of HDFS, GCS and cross-region, and the bandwidth of GCS, are the paper's; the others
# are chosen.
PROFILES = {
    "null": StorageProfile(0.0, math.inf),
    "hdfs": StorageProfile(0.002, 1_000e6),
    "gcs": StorageProfile(0.010, 200e6),
    "s3": StorageProfile(0.020, 200e6),
    "cross-region": StorageProfile(0.050, 100e6),
}


class SlowStore(LocalStore):
    """A local store whose objects appear after the profile's delay.

    Published files are emptied, so that a large output takes no memory.

    Args:
        scale: of the profile's bandwidth.

    Attributes:
        files: when each file was begun, and when it stood at its final name.
        published: when each file of a partition stood at its final name.
    """

    def __init__(self, root: Path, profile: StorageProfile, scale: float) -> None:
        super().__init__(root)
        self.files: list[tuple[float, float]] = []
        self.published: list[float] = []
        self._profile = profile
        self._scale = scale

    def create(self, name: str) -> Upload:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _SlowUpload(super().create(name), self, is_delayed=not name.endswith(".json"))

    def delay_seconds(self, size: int) -> float:
        """Return how long an object of this size takes."""
        transfer_seconds = size / self._profile.bytes_per_second / self._scale
        return self._profile.latency_seconds + transfer_seconds


class _SlowUpload(Upload):
    def __init__(self, upload: Upload, store: SlowStore, *, is_delayed: bool) -> None:
        self.sink = upload.sink
        self._upload = upload
        self._store = store
        self._is_delayed = is_delayed
        self._begun = time.perf_counter()

    def publish(self, still_wanted: Callable[[], None]) -> StoredObject:
        if self._is_delayed:
            time.sleep(self._store.delay_seconds(self.sink.tell()))
        stored = self._upload.publish(still_wanted)
        ended = time.perf_counter()
        self._store.files.append((self._begun, ended))
        # others describe or are parts
        if stored.name.endswith(SUFFIX) and not is_hidden(stored.name):
            self._store.published.append(ended)
            os.truncate(self._store.root / stored.name, 0)
        return stored

    def __enter__(self) -> Self:
        self._upload.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._upload.__exit__(*error)
