"""Promise 4: a run never holds more than its limit, and the smallest limit that an error names
works."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_dagster.engine.encoder.arena import Arena
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.run import memory
from surge_dagster.engine.run import thresholds as thresholds_module
from surge_dagster.engine.run.embedding_run import publishing_threads
from surge_dagster.engine.run.memory import fit_memory
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.local_store import LocalStore, LocalUpload
from surge_dagster.engine.store.object_client import ClientLimits
from surge_dagster.engine.store.object_store import ObjectUpload, open_object_store
from tests.engine.runs import (
    DoorPool,
    Output,
    Wrapped,
    finish,
    in_memory,
    limit_bytes,
    receipts,
    smallest_limit,
    smallest_run_limit,
)
from tests.small_catalogs import DIMENSION, keys_of, numbered_catalog, partition_of

ROOT = Path(__file__).parents[3]
SPACE = EncodingSpec(model=f"hash://{DIMENSION}").resolve()


@pytest.mark.parametrize(("workers", "threads"), [(1, 8), (2, 8), (3, 12), (8, 32)])
def test_bucket_gets_four_concurrent_files_per_worker_and_at_least_eight(
    workers: int, threads: int
) -> None:
    store = open_object_store("memory://m/out")
    assert publishing_threads(store, workers) == threads


def test_released_slot_gives_its_pages_back() -> None:
    with Arena(
        slots=2, max_texts=1000, max_bytes=4_000_000, dimension=256, dtype="float32"
    ) as arena:
        slot = arena.acquire()
        slot.append(pa.array(["x" * 4000] * 1000, pa.large_string()))  # pyright: ignore[reportArgumentType]
        slot.matrix(0, 1000)[:] = 1
        assert resident(arena.fd) > 4_000_000
        slot.release()
        assert resident(arena.fd) == 0
        again = arena.acquire()
        again.append(pa.array(["fresh"], pa.large_string()))  # pyright: ignore[reportArgumentType]
        assert again.texts(0, 1).to_pylist() == ["fresh"]


def resident(descriptor: int) -> int:
    """Bytes of shared memory that were touched and not given back."""
    return os.fstat(descriptor).st_blocks * 512


class WatchingPool(Wrapped):
    """A pool that keeps the run's shared memory open, so that a test can measure it after the
    run."""

    kept = -1

    def arena(self, **size: int) -> Arena:
        arena = self.inner.arena(**size)
        self.kept = os.dup(arena.fd)
        return arena


class SlowStore(LocalStore):
    """A local store that delays some objects, given by their place in the order of creation."""

    def __init__(self, root: Path, slow: set[int]) -> None:
        super().__init__(root)
        self._slow = slow
        self._begun = itertools.count()

    def create(self, name: str) -> LocalUpload:
        if next(self._begun) in self._slow:
            time.sleep(0.02)
        return super().create(name)


class HeldByUploads:
    """Remembers the most bytes that all open uploads held together."""

    def __init__(self) -> None:
        self.most = 0
        self._lock = threading.Lock()
        self._uploads: weakref.WeakSet[ObjectUpload] = weakref.WeakSet()

    def counted(
        self, take: Callable[[ObjectUpload, memoryview], None]
    ) -> Callable[[ObjectUpload, memoryview], None]:
        def taking(upload: ObjectUpload, content: memoryview) -> None:
            take(upload, content)
            with self._lock:
                self._uploads.add(upload)
                self.most = max(self.most, sum(len(one._buffer) for one in self._uploads))

        return taking


def shrink_shares(patch: pytest.MonkeyPatch, batch_rows: int) -> None:
    """Make SuperBatches, and the shares of reader and ids, so small that small catalogs feel the
    limit."""
    limit_bytes(patch, 20_000)
    patch.setattr(memory, "_READER_BYTES", 2 * batch_rows * 2_100)
    patch.setattr(memory, "_LEAST_ID_SET_BYTES", 1024 * 8)


def test_texts_almost_as_large_as_a_superbatch_do_not_block_the_run(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Takes seconds: texts of tens of megabytes, so that they weigh something beside the reader's
    own share."""
    limit_bytes(monkeypatch, 24 * 1024 * 1024)
    monkeypatch.setattr(thresholds_module, "_B_MAX_FACTOR", 1)
    thresholds = Thresholds(b_min=10, b_max=10)
    least = smallest_run_limit(output, thresholds)

    def partitions() -> Iterator[Partition]:
        for number in range(3):
            yield partition_of(f"p{number}", [(f"{number}", f"{number}" * (20 * 1024 * 1024))])

    run = output.embed(partitions(), thresholds, memory_limit_bytes=least)
    assert output.keys() == {"p0", "p1", "p2"}
    assert run.report.truncated == 3


@dataclass(frozen=True)
class Tight:
    """A catalog and thresholds, with such bounds that small catalogs feel the limit."""

    partitions: list[Partition]
    thresholds: Thresholds
    batch_rows: int

    def run(self, output: Output, least: int, **options: Any) -> None:
        """Run within the smallest limit."""
        run = output.run(self.partitions, self.thresholds, memory_limit_bytes=least, **options)
        assert keys_of(receipts(finish(run))) == keys_of(self.partitions)
        assert run.report.peak_resident_bytes <= least


@st.composite
def tight(draw: st.DrawFn) -> Tight:
    sizes = draw(st.lists(st.integers(0, 300), max_size=10))
    text_bytes = draw(st.integers(0, 2_000))
    batch_rows = draw(st.integers(1, 80))
    b_max = draw(st.integers(1, 120))
    partitions: list[Partition] = []
    for number, size in enumerate(sizes):
        rows = [(f"{row}", f"{number}/{row}".ljust(text_bytes)) for row in range(size)]
        partitions.append(partition_of(f"p{number}", rows, batch_rows=batch_rows))
    return Tight(partitions, Thresholds(b_min=max(1, b_max // 2), b_max=b_max), batch_rows)


@settings(max_examples=15)
@given(tight(), st.sets(st.integers(0, 12), max_size=4))
def test_any_catalog_is_embedded_within_the_smallest_limit_on_any_store(
    hash_pool: EncoderPool,
    tmp_path_factory: pytest.TempPathFactory,
    catalog: Tight,
    slow: set[int],
) -> None:
    output = Output(hash_pool, tmp_path_factory.mktemp("tight"))
    with pytest.MonkeyPatch.context() as patch:
        shrink_shares(patch, catalog.batch_rows)
        least = smallest_run_limit(output, catalog.thresholds)
        catalog.run(output, least, store=SlowStore(output.root, slow))


@settings(max_examples=8)
@given(tight(), st.sampled_from([2_000, 10_000, 100_000]))
def test_memory_of_uploads_to_a_bucket_stays_within_the_smallest_limit(
    hash_pool: EncoderPool,
    tmp_path_factory: pytest.TempPathFactory,
    catalog: Tight,
    part_bytes: int,
) -> None:
    output = Output(hash_pool, tmp_path_factory.mktemp("unused"))
    store = open_object_store("memory://m/out", limits=ClientLimits(part_bytes=part_bytes))
    held = HeldByUploads()
    with pytest.MonkeyPatch.context() as patch:
        shrink_shares(patch, catalog.batch_rows)
        patch.setattr(ObjectUpload, "_take", held.counted(ObjectUpload._take))
        least = smallest_run_limit(output, catalog.thresholds, store=store)
        on_disk = smallest_limit(
            lambda limit: (
                fit_memory(catalog.thresholds, 1, SPACE, 8, limit, machine_bytes=1)[1].limit
            )
        )
        catalog.run(output, least, store=store)
    assert held.most <= least - on_disk, "what a bucket's limit has beyond a disk's is for them"


def test_shared_memory_is_given_back_after_every_superbatch(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger does not count memory of free slots."""
    limit_bytes(monkeypatch, 2_000_000)
    thresholds = Thresholds(b_min=200, b_max=400)
    # about 1.4 MB each
    catalog = numbered_catalog([350] * 6, words=400)
    pool = WatchingPool(output.pool)
    output.embed(in_memory(catalog), thresholds, pool=pool)
    assert resident(pool.kept) == 0
    os.close(pool.kept)


def test_hanging_store_makes_the_reader_wait(output: Output) -> None:
    """Only three SuperBatches are admitted."""
    go_on = threading.Event()

    class HangingStore(LocalStore):
        def create(self, name: str) -> LocalUpload:
            assert name.endswith("space.json") or go_on.wait(60)
            return super().create(name)

    in_flight: list[int] = []

    def waiting() -> None:
        in_flight.append(run.memory.in_flight.texts)
        go_on.set()

    catalog = numbered_catalog([100] * 12)
    run = output.run(
        in_memory(catalog),
        Thresholds(b_min=100, b_max=100),
        pool=DoorPool(output.pool, waiting),
        store=HangingStore(output.root),
    )
    finish(run)
    assert output.keys() == catalog.keys()
    assert in_flight[0] == 3 * 100 + 7, (
        "three SuperBatches and the batch of rows that waits for a slot"
    )
    assert run.report.max_in_flight_texts <= 3 * 100 + 7


_GROWTH = """
import sys
from pathlib import Path
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from tests.engine.runs import make_run
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources.partition import Partition
from tests.small_catalogs import numbered_rows, partition_of
texts, size = int(sys.argv[1]), 2_500
keys = [f"p{n:05d}" for n in range(texts // size)]
def partition(key):
    def read():  # rows exist only while they are read, as those of a file
        return partition_of(key, numbered_rows(key, size)).read()
    return Partition(key, "v1", read, lambda: "v1")
partitions = map(partition, keys)
with EncoderPool(EncodingSpec("hash://384"), devices="cpu") as pool:
    run = make_run(pool, partitions, Path(sys.argv[2]), Thresholds(b_min=50_000, b_max=50_000))
    written = sum(receipt.rows for receipt in run)
assert written == texts
# Not getrusage: its maximum begins with that of the process that started this one.
status = Path("/proc/self/status").read_text().splitlines()
print(next(line.split()[1] for line in status if line.startswith("VmHWM")))
"""


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_ten_times_the_texts_take_no_more_memory(tmp_path: Path) -> None:
    """Millions of texts take minutes; the most that the process ever held, in kB, with a pool of a
    null encoder.

    SuperBatches are of one size, so that the short run fills every slot that the long one does. How
    many are resident together, within the bound, is a matter of who gets the processor: the most of
    three is what short runs take.
    """
    most: dict[int, int] = {}
    for texts in (200_000, 200_000, 200_000, 2_000_000):
        command = [sys.executable, "-c", _GROWTH, str(texts), str(tmp_path / str(texts))]
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
        assert ran.returncode == 0, ran.stderr
        most[texts] = max(most.get(texts, 0), int(ran.stdout))
        shutil.rmtree(tmp_path / str(texts))
    print(f"peak RSS in kB: {most}")
    assert most[2_000_000] < 1.05 * most[200_000]
