"""A run that kills its own process, with SIGKILL, at the n-th time it comes to a given point.

    python -m tests.engine.killed_run CATALOG OUTPUT LOG POINT N

Points are steps of the run, not instants, so that the same command dies at the same place on every machine. What the
run did until then stands in LOG, one line each, written without a buffer.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from surge_dagster.engine.encoder.arena import Slot
from surge_dagster.engine.encoder.calls import EncodeCall
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.spec import EncodingSpec
from surge_dagster.engine.output.local_store import LocalStore, LocalUpload
from surge_dagster.engine.output.staging import STAGING
from surge_dagster.engine.output.store import StoredObject
from surge_dagster.engine.run import EmbeddingRun
from surge_dagster.engine.sources import open_source
from surge_dagster.engine.superbatch import Thresholds
from surge_dagster.engine.telemetry import Receipt
from tests.small_catalogs import DIMENSION

POINTS = ("encode", "encoded", "create", "publish", "still wanted", "published", "sync", "synced", "receipt")
# Of split partitions: a segment is begun, complete, durable; the file is begun, complete; a segment is removed.
SPLIT_POINTS = ("stage", "staged", "kept", "assemble", "assembled", "remove", "removed")
THRESHOLDS = Thresholds(b_min=50, b_max=100)


class Reaper:
    """Counts how often each point was passed, and dies at the chosen one."""

    def __init__(self, log: Path, point: str, count: int) -> None:
        self._log = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self._point = point
        self._left = count
        self.run: EmbeddingRun | None = None

    def say(self, *words: object) -> None:
        os.write(self._log, (" ".join(map(str, words)) + "\n").encode())

    def __call__(self, point: str) -> None:
        if point != self._point or self.run is None:
            return
        self._left -= 1
        if self._left == 0:
            self.say("died", point, self.run._in_flight.most)
            os.kill(os.getpid(), signal.SIGKILL)


class MortalPool:
    """A pool that passes two points at each SuperBatch."""

    def __init__(self, pool: EncoderPool, reaper: Reaper) -> None:
        self._pool = pool
        self._reaper = reaper

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def submit(self, slot: Slot, borders: np.ndarray) -> EncodeCall:
        self._reaper("encode")
        self._reaper.say("encoded", len(slot))
        call = self._pool.submit(slot, borders)
        call.result()
        self._reaper("encoded")
        return call


class MortalStore(LocalStore):
    """A local disk on which every step of publishing is a point."""

    def __init__(self, root: Path, reaper: Reaper) -> None:
        super().__init__(root)
        self._reaper = reaper

    def create(self, name: str) -> LocalUpload:
        upload = MortalUpload(self.root, name)
        upload.reaper = self._reaper
        self._reaper("create")
        if name.startswith(STAGING):
            self._reaper("stage")
        elif in_the_thread_for_split_files():
            self._reaper("assemble")
        return upload

    def sync(self, folder: str) -> None:
        self._reaper("sync")
        super().sync(folder)
        self._reaper("synced")
        if folder.startswith(STAGING) and any(self.list(folder)):
            self._reaper("kept")

    def delete(self, name: str) -> None:
        if in_the_thread_for_split_files():
            self._reaper("remove")
        super().delete(name)
        if in_the_thread_for_split_files():
            self._reaper("removed")


class MortalUpload(LocalUpload):
    reaper: Reaper

    def publish(self, still_wanted: Callable[[], None]) -> StoredObject:
        def look() -> None:
            still_wanted()
            self.reaper("still wanted")

        self.reaper("publish")
        stored = super().publish(look)
        self.reaper("published")
        if self._name.startswith(STAGING):
            self.reaper("staged")
        elif in_the_thread_for_split_files():
            self.reaper("assembled")
        return stored


def in_the_thread_for_split_files() -> bool:
    return threading.current_thread().name.startswith("surge-publish-split")


def main(catalog: str, output: str, log: str, point: str, count: str) -> None:
    """Run until the point comes, or to the end."""
    reaper = Reaper(Path(log), point, int(count))
    with EncoderPool(EncodingSpec(model=f"hash://{DIMENSION}")) as pool:
        reaper.say("workers", *pool.worker_pids)
        store: Any = MortalStore(Path(output), reaper)
        front: Any = MortalPool(pool, reaper)
        reaper.run = EmbeddingRun(open_source(catalog), store, front, THRESHOLDS)
        for event in reaper.run.events():
            if isinstance(event, Receipt):
                reaper.say("receipt", event.key)
                reaper("receipt")


if __name__ == "__main__":
    main(*sys.argv[1:])
