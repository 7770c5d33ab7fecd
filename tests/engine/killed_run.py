"""Runs in processes of their own, which kill themselves with SIGKILL at their n-th step.

    python -m tests.engine.killed_run

Steps are calls of the pool and of the store, not instants, so that the same run dies at the same
place on every machine. Each line of standard input is a JSON list: catalog, output, endpoint of the
object store (empty for a folder), log, number of the step, and "START-STOP" for each range of every
partition. The program forks a process for each line, from one that has imported everything, and
prints its exit status as a line. `MortalRuns` is the other end.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa

from surge_dagster.engine.encoder.arena import Slot
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.schedule import EncodeCall
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.run.change_feed import ChangeFeed
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.report import Receipt
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources.partition import PartitionRange
from surge_dagster.engine.store import StorageOptions, open_store
from surge_dagster.engine.store.object_client import ClientLimits
from surge_dagster.engine.store.object_store import open_object_store
from surge_dagster.engine.store.store import Store, StoredObject
from surge_dagster.engine.tables.opening import open_source
from tests.engine.runs import Wrapped
from tests.small_catalogs import DIMENSION

THRESHOLDS = Thresholds(b_min=50, b_max=100)
PART_BYTES = 8 * 1024  # so that segments are sent in parts, too


class Reaper:
    """Counts steps, and kills its process at the chosen one."""

    def __init__(self, log: Path, step: int) -> None:
        self._log = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        self._left = step
        self._lock = threading.Lock()
        self.run: EmbeddingRun | None = None

    def say(self, *words: object) -> None:
        os.write(self._log, (" ".join(map(str, words)) + "\n").encode())

    def __call__(self) -> None:
        if self.run is None:
            return
        with self._lock:
            self._left -= 1
            if self._left == 0:
                memory = self.run._memory  # None before the first text was admitted
                self.say("died", 0 if memory is None else memory.in_flight.most)
                os.kill(os.getpid(), signal.SIGKILL)


class Mortal(Wrapped):
    def __init__(self, inner: Any, reaper: Reaper) -> None:
        super().__init__(inner)
        self._reaper = reaper


class MortalPool(Mortal):
    """A pool that takes three steps for each SuperBatch; at the second one a worker encodes."""

    def submit(self, slot: Slot, borders: np.ndarray, rows: np.ndarray | None = None) -> EncodeCall:
        self._reaper()
        self._reaper.say("encoded", len(slot) if rows is None else len(rows))
        call = self.inner.submit(slot, borders, rows)
        self._reaper()
        call.result()
        self._reaper()
        return call


class MortalStore(Mortal):
    """A store on which every operation that writes is two steps."""

    def until(self, over: threading.Event) -> MortalStore:
        return MortalStore(self.inner.until(over), self._reaper)

    def create(self, name: str) -> MortalUpload:
        upload = MortalUpload(self.inner.create(name), self._reaper)
        self._reaper()
        return upload

    def sync(self, folder: str) -> None:
        self._reaper()
        self.inner.sync(folder)
        self._reaper()

    def delete(self, name: str) -> None:
        self._reaper()
        self.inner.delete(name)
        self._reaper()


class MortalUpload(Mortal):
    """An object or a file on its way: begun, complete, checked for the last time, published."""

    def __enter__(self) -> Self:
        self.inner.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.inner.__exit__(*error)

    def publish(self, still_wanted: Callable[[], None]) -> StoredObject:
        def last_check() -> None:
            still_wanted()
            self._reaper()

        self._reaper()
        stored = self.inner.publish(last_check)
        self._reaper()
        return stored


def open_output(url: str, endpoint: str) -> Store:
    """A folder, or a bucket."""
    if not endpoint:
        return open_store(url)
    options = StorageOptions(
        endpoint=endpoint, access_key_id="AKIATESTKEY", secret_access_key="secret-of-the-test"
    )
    return open_object_store(url, options, limits=ClientLimits(part_bytes=PART_BYTES))


def main(catalog: str, output: str, endpoint: str, log: str, step: int, *rows: str) -> None:
    """Run until the step comes, or to the end."""
    reaper = Reaper(Path(log), step)
    ranges: list[PartitionRange] = []
    for partition in open_source(catalog):
        for each in rows:
            start, stop = map(int, each.split("-"))
            ranges.append(PartitionRange(partition.key, partition.source_version, start, stop))

    with EncoderPool(EncodingSpec(model=f"hash://{DIMENSION}")) as pool:
        pool.start()
        store: Any = MortalStore(open_output(output, endpoint), reaper)
        front: Any = MortalPool(pool, reaper)
        options: dict[str, Any] = {"change_feed": ChangeFeed(), "ranges": ranges}
        reaper.run = EmbeddingRun(open_source(catalog), store, front, THRESHOLDS, **options)
        for event in reaper.run.events():
            if isinstance(event, Receipt):
                reaper.say("receipt", event.key)
                reaper()


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


@dataclass
class Ended:
    """What is known of a run that has ended in its own process.

    Attributes:
        in_flight: the largest number of texts in flight, if it was killed.
        encoded: texts that it gave to the pool.
        receipts: keys of the partitions that it reported.
    """

    was_killed: bool
    in_flight: int = 0
    encoded: int = 0
    receipts: list[str] = field(default_factory=list)


class MortalRuns:
    """Runs each in its own process; `close` it."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._runs = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.engine.killed_run"],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, catalog: Path, url: str, endpoint: str, step: int, *rows: str) -> Ended:
        """Run until the step, or to the end if it has fewer."""
        assert self._process.stdin
        assert self._process.stdout
        self._runs += 1
        log = self._logs / str(self._runs)
        arguments = [str(catalog), url, endpoint, str(log), step, *rows]
        print(json.dumps(arguments), file=self._process.stdin, flush=True)
        status = int(self._process.stdout.readline())
        assert status in (0, -signal.SIGKILL)

        ended = Ended(was_killed=status != 0)
        for line in log.read_text().splitlines():
            word, value = line.split(" ", 1)
            if word == "receipt":
                ended.receipts.append(value)
            elif word == "encoded":
                ended.encoded += int(value)
            else:
                ended.in_flight = int(value)
        return ended

    def close(self) -> None:
        self._process.communicate()


if __name__ == "__main__":
    serve()
