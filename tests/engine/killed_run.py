"""A run that kills its own process with SIGKILL when it passes a given point for the n-th time.

    python -m tests.engine.killed_run CATALOG OUTPUT ENDPOINT LOG POINT N [START-STOP …]
    python -m tests.engine.killed_run

Points are steps of the run, not instants, so that the same command dies at the same place on every
machine; the point "any" is each of them. The run writes each of its steps to LOG as a line, without
a buffer. ENDPOINT is that of the object store, or empty where the output is a folder. START-STOP is
a range of every partition. Without arguments, each line of standard input is a JSON list of
arguments. The program runs each in its own process, forked from one that has imported everything,
and prints its exit status as a line.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa

from surge_dagster.engine.encoder.arena import Slot
from surge_dagster.engine.encoder.calls import EncodeCall
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.feed.change_files import ChangeFeed
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.report import Receipt
from surge_dagster.engine.run.staging import STAGING
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources.partition import PartitionRange
from surge_dagster.engine.store import StorageOptions, open_store
from surge_dagster.engine.store.object_client import ClientLimits
from surge_dagster.engine.store.object_store import open_object_store
from surge_dagster.engine.store.object_upload import ObjectUpload
from surge_dagster.engine.store.store import Store, StoredObject, Upload
from surge_dagster.engine.tables.opening import open_source
from tests.engine.paused_backend import PAUSE_VARIABLE, reached
from tests.small_catalogs import DIMENSION

POINTS = (
    "encode",
    "encoded",
    "create",
    "publish",
    "still wanted",
    "published",
    "sync",
    "synced",
    "receipt",
)
# Of split partitions: a segment is begun, complete, durable; the file is begun, complete; a segment
# is removed.
SPLIT_POINTS = ("stage", "staged", "kept", "assemble", "assembled", "remove", "removed")
# Of objects that are uploaded in parts: one is begun, a part is stored, the upload is completed.
PART_POINTS = ("begun", "part", "complete", "completed")
# A worker is in the middle of a SuperBatch. Not part of "any": the worker is made to stop there.
ENCODING = "encoding"
THRESHOLDS = Thresholds(b_min=50, b_max=100)
PART_BYTES = 8 * 1024  # so that segments are sent in parts, too


class Reaper:
    """Counts how often each point was passed, and dies at the chosen one."""

    def __init__(self, log: Path, point: str, count: int) -> None:
        self._log = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self._point = point
        self._left = count
        self._lock = threading.Lock()
        self.passed = 0
        self.run: EmbeddingRun | None = None

    def say(self, *words: object) -> None:
        os.write(self._log, (" ".join(map(str, words)) + "\n").encode())

    def dies_next(self, point: str) -> bool:
        """Whether the process dies when this very point is passed next."""
        return self._point == point and self._left == 1

    def __call__(self, point: str) -> None:
        if self.run is None:
            return
        with self._lock:
            self.passed += point != ENCODING
            self._left -= self._point == point or (self._point == "any" and point != ENCODING)
            if self._left == 0:
                memory = self.run._memory  # None before the first text was admitted
                self.say("died", point, 0 if memory is None else memory.in_flight.most)
                os.kill(os.getpid(), signal.SIGKILL)


class MortalPool:
    """A pool that passes three points at each SuperBatch."""

    def __init__(self, pool: EncoderPool, reaper: Reaper, pause: Path) -> None:
        self._pool = pool
        self._reaper = reaper
        self._pause = pause

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def submit(self, slot: Slot, borders: np.ndarray, rows: np.ndarray | None = None) -> EncodeCall:
        self._reaper("encode")
        self._reaper.say("encoded", len(slot) if rows is None else len(rows))
        if self._reaper.dies_next(ENCODING):
            self._pause.touch()
        call = self._pool.submit(slot, borders, rows)
        while self._pause.exists() and not reached(self._pause).exists():
            threading.Event().wait(0.01)
        self._reaper(ENCODING)
        call.result()
        self._reaper("encoded")
        return call


class MortalStore:
    """A store on which every step of publishing is a point."""

    def __init__(self, store: Store, reaper: Reaper) -> None:
        self._store = store
        self._reaper = reaper

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def until(self, over: threading.Event) -> MortalStore:
        return MortalStore(self._store.until(over), self._reaper)

    def create(self, name: str) -> MortalUpload:
        upload = MortalUpload(self._store.create(name), name, self._reaper)
        self._reaper("create")
        if name.startswith(STAGING):
            self._reaper("stage")
        elif in_the_thread_for_split_files():
            self._reaper("assemble")
        return upload

    def sync(self, folder: str) -> None:
        self._reaper("sync")
        self._store.sync(folder)
        self._reaper("synced")
        if folder.startswith(STAGING) and any(self._store.list(folder)):
            self._reaper("kept")

    def delete(self, name: str) -> None:
        if in_the_thread_for_split_files():
            self._reaper("remove")
        self._store.delete(name)
        if in_the_thread_for_split_files():
            self._reaper("removed")


class MortalUpload:
    """An object or a file on which every step of publishing is a point."""

    def __init__(self, upload: Upload, name: str, reaper: Reaper) -> None:
        self._upload = upload
        self._name = name
        self._reaper = reaper

    def __getattr__(self, name: str) -> Any:
        return getattr(self._upload, name)

    def __enter__(self) -> Self:
        self._upload.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._upload.__exit__(kind, error, trace)

    def publish(self, still_wanted: Callable[[], None]) -> StoredObject:
        def last_check() -> None:
            still_wanted()
            self._reaper("still wanted")

        self._reaper("publish")
        stored = self._upload.publish(last_check)
        self._reaper("published")
        if self._name.startswith(STAGING):
            self._reaper("staged")
        elif in_the_thread_for_split_files():
            self._reaper("assembled")
        return stored


def mark_parts(reaper: Reaper) -> None:
    """Make every step of an upload in parts a point."""

    def passing(method: Callable[..., Any], before: str | None, after: str) -> Callable[..., Any]:
        def step(*given: Any) -> Any:
            if before is not None:
                reaper(before)
            result = method(*given)
            reaper(after)
            return result

        return step

    ObjectUpload._begin = passing(ObjectUpload._begin, None, "begun")
    ObjectUpload._send = passing(ObjectUpload._send, None, "part")
    ObjectUpload._complete = passing(ObjectUpload._complete, "complete", "completed")


def in_the_thread_for_split_files() -> bool:
    return threading.current_thread().name.startswith("surge-publish-split")


def open_output(url: str, endpoint: str) -> Store:
    """A folder, or a bucket."""
    if not endpoint:
        return open_store(url)
    options = StorageOptions(
        endpoint=endpoint, access_key_id="AKIATESTKEY", secret_access_key="secret-of-the-test"
    )
    return open_object_store(url, options, limits=ClientLimits(part_bytes=PART_BYTES))


def main(
    catalog: str, output: str, endpoint: str, log: str, point: str, count: str, *rows: str
) -> None:
    """Run until the point comes, or to the end."""
    reaper = Reaper(Path(log), point, int(count))
    pause = Path(f"{log}.pause")
    os.environ |= {PAUSE_VARIABLE: str(pause), "PYTHONPATH": str(Path(__file__).parents[2])}
    backend = "tests.engine.paused_backend:PausedBackend" if point == ENCODING else "auto"
    with EncoderPool(EncodingSpec(model=f"hash://{DIMENSION}"), backend=backend) as pool:
        pool.start()
        reaper.say("workers", *pool.worker_pids)
        opened = open_output(output, endpoint)
        mark_parts(reaper)
        store: Any = MortalStore(opened, reaper)
        front: Any = MortalPool(pool, reaper, pause)
        ranges = [
            PartitionRange(partition.key, partition.source_version, *map(int, each.split("-")))
            for partition in open_source(catalog)
            for each in rows
        ]
        options: dict[str, Any] = {"observer": ChangeFeed(), "ranges": ranges}
        reaper.run = EmbeddingRun(open_source(catalog), store, front, THRESHOLDS, **options)
        for event in reaper.run.events():
            if isinstance(event, Receipt):
                reaper.say("receipt", event.key)
                reaper("receipt")
        reaper.say("passed", reaper.passed)


def serve() -> None:
    """Run each line of standard input in a process of its own."""
    # imports pandas where that is installed, which would take a third of each process
    pa.array(np.zeros(1))
    for line in sys.stdin:
        child = os.fork()
        if not child:
            status = 1
            try:
                main(*json.loads(line))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    if sys.argv[1:]:
        main(*sys.argv[1:])  # pyright: ignore[reportArgumentType]
    else:
        serve()
