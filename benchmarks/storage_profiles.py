"""Storage profiles: stores of a known slowness, and runs that wait for them.

An object appears in a store in main memory after its profile's latency plus its bytes over the profile's bandwidth.
`OneAtATime` publishes a SuperBatch, object by object, before the next one is encoded; the engine has no such mode.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from surge_dagster.engine.encoder.arena import Slot
from surge_dagster.engine.encoder.calls import EncodeCall
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.run.report import Event, SuperBatchReport
from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.engine.store.local_upload import is_hidden
from surge_dagster.engine.store.store import StoredObject, Upload


@dataclass(frozen=True, slots=True)
class StorageProfile:
    """A store's latency per object in seconds and its bandwidth per object in bytes per second (None: no limit)."""

    name: str
    latency_seconds: float
    bytes_per_second: float | None


# The latencies of HDFS, GCS and cross-region, and the bandwidth of GCS, are the paper's; the others are chosen.
PROFILES = {
    profile.name: profile
    for profile in (
        StorageProfile("null", 0.0, None),
        StorageProfile("hdfs", 0.002, 1_000e6),
        StorageProfile("gcs", 0.010, 200e6),
        StorageProfile("s3", 0.020, 200e6),
        StorageProfile("cross-region", 0.050, 100e6),
    )
}


class DelayedStore(LocalStore):
    """A local store whose objects appear after the profile's delay.

    Args:
        scale: of the profile's bandwidth.
        keep: the content of published files; False leaves empty ones, so that a large output takes no memory.
    """

    def __init__(self, root: Path, profile: StorageProfile, scale: float = 1.0, *, keep: bool = True) -> None:
        super().__init__(root)
        self._keep = keep
        self._latency = profile.latency_seconds
        self._rate = profile.bytes_per_second and scale * profile.bytes_per_second

    def create(self, name: str) -> Upload:  # pyright: ignore[reportIncompatibleMethodOverride]
        upload = super().create(name)
        if name.endswith(".json"):
            return upload
        forgotten = None if self._keep or is_hidden(name) else self.root / name
        return _DelayedUpload(upload, self._latency, self._rate, forgotten)


class UploadFront(Upload):
    """An upload that passes everything on to another one."""

    def __init__(self, upload: Upload) -> None:
        self.sink = upload.sink
        self._upload = upload

    def publish(self, still_wanted: Callable[[], None]) -> StoredObject:
        return self._upload.publish(still_wanted)

    def __enter__(self) -> Self:
        self._upload.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._upload.__exit__(kind, error, trace)


class _DelayedUpload(UploadFront):
    def __init__(self, upload: Upload, latency: float, rate: float | None, forgotten: Path | None) -> None:
        super().__init__(upload)
        self._latency = latency
        self._rate = rate
        self._forgotten = forgotten

    def publish(self, still_wanted: Callable[[], None]) -> StoredObject:
        """Wait for the object's delay, then publish it."""
        size = self.sink.tell()
        time.sleep(self._latency + (size / self._rate if self._rate else 0.0))
        stored = super().publish(still_wanted)
        if self._forgotten is not None:
            os.truncate(self._forgotten, 0)
        return stored


class OneAtATime:
    """Wraps a pool and encodes a SuperBatch only after the one before is published."""

    def __init__(self, pool: EncoderPool) -> None:
        self._pool = pool
        self._may_encode = threading.Semaphore(1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def submit(self, slot: Slot, borders: np.ndarray | None = None, rows: np.ndarray | None = None) -> EncodeCall:
        """Wait until the previous SuperBatch is published, then encode; the returned call has ended."""
        self._may_encode.acquire()
        call = self._pool.submit(slot, borders, rows)
        call.result()
        return call

    def seen(self, event: Event) -> None:
        """Receive every event of the run."""
        if isinstance(event, SuperBatchReport):
            self._may_encode.release()
