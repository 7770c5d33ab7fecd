"""Promise 4: what a run holds never passes its budget, and the smallest budget that is offered really works."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from surge_dagster.engine import memory, run
from surge_dagster.engine.catalog import Partition, RowBatch
from surge_dagster.engine.encoder.arena import Arena
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.spec import EncodingSpec
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.machine_memory import memory_bytes
from surge_dagster.engine.memory import fit_memory, largest_pieces, plan_memory
from surge_dagster.engine.output.local_store import LocalStore, LocalUpload
from surge_dagster.engine.output.object_store import open_object_store
from surge_dagster.engine.output.object_upload import ObjectUpload
from surge_dagster.engine.output.storage_options import StorageOptions
from surge_dagster.engine.superbatch import Bounds, OpenPartition, Segment, SuperBatch, Thresholds
from surge_dagster.engine.telemetry import InFlight
from tests.engine.runs import DoorPool, finish, finish_receipts, in_memory, make_run
from tests.small_catalogs import DIMENSION, assert_embedded, keys_of, numbered_rows, partition_of

ROOT = Path(__file__).parents[2]
SPACE = EncodingSpec(model=f"hash://{DIMENSION}").resolve()


def smallest_limit(refused: Callable[[int], Any]) -> int:
    """The limit that the refusal of a smaller one names."""
    with pytest.raises(ConfigError, match="the smallest that works is") as error:
        refused(1)
    found = re.search(r"the smallest that works is ([\d,]+)", str(error.value))
    assert found
    return int(found[1].replace(",", ""))


class TestPlan:
    BOUNDS = Bounds(100, 1000, 100_000, 1_000_000)

    def test_a_limit_that_is_too_small_names_the_smallest_that_works(self) -> None:
        least = smallest_limit(lambda limit: plan_memory(self.BOUNDS, SPACE, 8, limit))
        assert plan_memory(self.BOUNDS, SPACE, 8, least).limit == least
        with pytest.raises(ConfigError):
            plan_memory(self.BOUNDS, SPACE, 8, least - 1)

    def test_without_a_limit_three_superbatches_may_be_alive(self) -> None:
        plan = plan_memory(self.BOUNDS, SPACE, 8, None)
        assert plan.slots == 3
        assert plan.keep_pages
        one = plan_memory(self.BOUNDS, SPACE, 8, None).result_bytes(1000, 0) + 2 * 1_000_000
        assert plan.limit >= 3 * one

    def test_what_a_limit_leaves_over_goes_to_the_ids(self) -> None:
        least = smallest_limit(lambda limit: plan_memory(self.BOUNDS, SPACE, 8, limit))
        small, large = (plan_memory(self.BOUNDS, SPACE, 8, limit) for limit in (least, least + 1_000_000))
        assert large.id_set == small.id_set + 1_000_000
        assert not small.keep_pages

    @given(
        st.lists(st.lists(st.integers(0, 200), max_size=30), min_size=1, max_size=12),
        st.integers(1, 9),
        st.sampled_from([1, 16, 384, 4096]),
        st.sampled_from(["float32", "float16"]),
    )
    def test_the_plan_covers_the_pieces_of_every_superbatch_within_the_bounds(
        self, partitions: list[list[int]], threads: int, dimension: int, dtype: str
    ) -> None:
        space = EncodingSpec(model=f"hash://{dimension}", dtype=dtype).resolve()
        texts = ["x" * size for sizes in partitions for size in sizes]
        ids = [pa.array(["i" * size for size in sizes], pa.string()) for sizes in partitions]
        held = sum(map(len, texts)) * 2
        bounds = Bounds(1, max(1, len(texts)), 1, max(1, held))
        with Arena(
            slots=1, max_texts=bounds.b_max, max_bytes=bounds.b_max_bytes, dimension=1, dtype="float32"
        ) as arena:
            slot = arena.acquire()
            slot.append(pa.array(texts, pa.large_string()))  # pyright: ignore[reportArgumentType]
            ends = np.cumsum([0, *map(len, partitions)]).tolist()
            segments = tuple(
                Segment(OpenPartition(partition_of("k", [])), start, stop, 0, (chunk,), True)
                for start, stop, chunk in zip(ends[:-1], ends[1:], ids, strict=True)
            )
            pieces = largest_pieces(SuperBatch(0, slot, segments, held), space, threads)
        least = smallest_limit(lambda limit: plan_memory(bounds, space, threads, limit))
        plan = plan_memory(bounds, space, threads, least)
        assert plan.reader + 2 * held + plan.result_bytes(len(texts), pieces) < least


class TestFit:
    """What a run may hold where nobody sets a limit."""

    GIB = 1024**3
    WIDE = EncodingSpec(model="hash://4096").resolve()

    def test_where_three_superbatches_fit_half_the_machine_nothing_shrinks(self) -> None:
        bounds, plan = fit_memory(Thresholds(), 20_000.0, SPACE, 8, None, machine_bytes=64 * self.GIB)
        assert bounds == Thresholds().resolve(20_000.0)
        assert plan == plan_memory(bounds, SPACE, 8, None)

    @pytest.mark.parametrize("upload_bytes", [0, 48 * 1024 * 1024])
    @pytest.mark.parametrize("texts_per_second", [10.0, 2_000.0, 1e6])
    @pytest.mark.parametrize("machine", [GIB // 2, GIB, 4 * GIB, 25 * GIB])
    def test_thresholds_that_are_derived_shrink_until_they_fit_half_the_machine(
        self, machine: int, texts_per_second: float, upload_bytes: int
    ) -> None:
        wished = Thresholds().resolve(texts_per_second)
        for space in (SPACE, self.WIDE):
            bounds, plan = fit_memory(
                Thresholds(), texts_per_second, space, 8, None, machine_bytes=machine, upload_bytes=upload_bytes
            )
            assert plan.limit <= machine // 2
            assert 1 <= bounds.b_min <= bounds.b_max <= wished.b_max
            assert bounds.b_max_bytes > 4 * 1024 * 1024, "a text of the usual maximum still finds room"
            if machine >= 4 * self.GIB:
                assert plan.limit == plan_memory(bounds, space, 8, None, upload_bytes).limit, "three of them fit"
            if machine == 25 * self.GIB and bounds != wished:
                assert plan.limit > 0.99 * (machine // 2), "no smaller than they have to be"

    @pytest.mark.parametrize("upload_bytes", [0, 48 * 1024 * 1024])
    @pytest.mark.parametrize("texts_per_second", [300.0, 20_000.0])
    def test_with_more_memory_superbatches_do_not_become_tiny(self, texts_per_second: float, upload_bytes: int) -> None:
        """There is one step, from the largest that fits once to the largest that fits three times."""
        largest = 0
        for machine in range(self.GIB // 2, 4 * self.GIB, self.GIB // 16):
            bounds, _ = fit_memory(
                Thresholds(), texts_per_second, SPACE, 8, None, machine_bytes=machine, upload_bytes=upload_bytes
            )
            assert 8 * bounds.b_max >= largest, machine
            largest = max(largest, bounds.b_max)

    def test_what_is_given_stays_as_it_is_and_the_rest_shrinks_around_it(self) -> None:
        asked = Thresholds(b_min=20_000, b_max_bytes=10**8)
        bounds, plan = fit_memory(asked, 1e6, self.WIDE, 8, None, machine_bytes=12 * self.GIB)
        assert (bounds.b_min, bounds.b_max_bytes) == (20_000, 10**8)
        assert 20_000 <= bounds.b_max < asked.resolve(1e6).b_max
        assert plan.limit <= 6 * self.GIB

    def test_one_superbatch_is_enough_where_three_that_were_asked_for_do_not_fit(self) -> None:
        asked = Thresholds(b_max=400_000, b_max_bytes=64 * 1024 * 1024)
        bounds, plan = fit_memory(asked, 1e6, self.WIDE, 8, None, machine_bytes=25 * self.GIB)
        assert bounds == asked.resolve(1e6)
        assert plan.limit == 25 * self.GIB // 2 < plan_memory(bounds, self.WIDE, 8, None).limit

    @pytest.mark.parametrize(
        "asked",
        [
            Thresholds(b_max=500_000),
            Thresholds(b_min=400_000),
            Thresholds(b_min=1_000, b_max=500_000),
            Thresholds(b_max_bytes=10**11),
            Thresholds(b_max=10**7, b_max_bytes=10**11, b_min_bytes=10**10),
        ],
    )
    def test_thresholds_that_cannot_be_held_are_refused_with_the_ones_that_can(self, asked: Thresholds) -> None:
        def fit(thresholds: Thresholds, limit: int | None = None) -> int:
            return fit_memory(thresholds, 1e6, self.WIDE, 8, limit, machine_bytes=8 * self.GIB)[1].limit

        with pytest.raises(ConfigError, match="half of this machine's or container's 8,589,934,592") as error:
            fit(asked)
        message = str(error.value)
        named = re.findall(r"(b_\w+) ([\d,]+)[,;] ", message[message.index("What works is") :])
        works = {name: int(value.replace(",", "")) for name, value in named}
        assert works and all(value < getattr(asked, name) for name, value in works.items())
        assert fit(replace(asked, **works)) <= 4 * self.GIB
        with pytest.raises(ConfigError):
            fit(replace(asked, **{name: value + value // 100 for name, value in works.items()}))
        found = re.search(r"memory_limit_bytes to at least ([\d,]+)", message)
        assert found
        assert fit(asked, int(found[1].replace(",", ""))) == int(found[1].replace(",", ""))

    def test_a_limit_that_is_set_is_not_measured_against_the_machine(self) -> None:
        bounds, plan = fit_memory(Thresholds(), 1e6, self.WIDE, 8, 40 * self.GIB, machine_bytes=self.GIB)
        assert bounds == Thresholds().resolve(1e6)
        assert plan.limit == 40 * self.GIB

    def test_a_run_asks_how_much_memory_there_is(
        self, hash_pool: EncoderPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(run, "memory_bytes", lambda: self.GIB)
        small = make_run(hash_pool, [partition_of("p", numbered_rows("p", 3))], tmp_path, Thresholds())
        assert small._ledger.limit <= self.GIB // 2
        assert keys_of(finish_receipts(small)) == ["p"]


@pytest.mark.parametrize(("workers", "threads"), [(1, 8), (2, 8), (3, 12), (8, 32)])
def test_four_pieces_for_each_worker_are_published_at_a_time_and_eight_at_least(
    hash_pool: EncoderPool, tmp_path: Path, workers: int, threads: int
) -> None:
    class Pool:
        worker_pids = tuple(range(workers))

        def __getattr__(self, name: str) -> Any:
            return getattr(hash_pool, name)

    chosen = make_run(Pool(), [], tmp_path, memory_limit=2**30)
    assert chosen._memory == plan_memory(chosen.bounds, SPACE, threads, 2**30)
    assert chosen._threads == threads


class TestMachineMemory:
    @staticmethod
    def cgroups(root: Path, membership: str, limits: dict[str, str]) -> int:
        (root / "membership").write_text(membership)
        for name, content in limits.items():
            (root / "mount" / name).parent.mkdir(parents=True, exist_ok=True)
            (root / "mount" / name).write_text(content)
        return memory_bytes(root / "membership", root / "mount")

    def test_without_a_limit_it_is_the_machine_s(self, tmp_path: Path) -> None:
        machine = psutil.virtual_memory().total
        assert memory_bytes(tmp_path / "none", tmp_path) == machine
        assert self.cgroups(tmp_path, "0::/\n", {"memory.max": "max\n"}) == machine
        assert (
            self.cgroups(tmp_path, "4:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}) == machine
        )
        assert memory_bytes() <= machine

    @pytest.mark.parametrize(
        ("membership", "limits"),
        [
            ("0::/\n", {"memory.max": "1000\n"}),
            ("0::/system.slice/surge.service\n", {"system.slice/surge.service/memory.max": "1000\n"}),
            ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "1000\n", "memory.max": "2000\n"}),
            ("0::/host/docker/1f\n", {"memory.max": "1000\n"}),
            ("5:cpu:/x\n4:memory:/x\n0::/\n", {"memory/x/memory.limit_in_bytes": "1000\n"}),
            ("4:blkio,memory:/docker/1f\n", {"memory/memory.limit_in_bytes": "1000\n", "cpu/memory.max": "1\n"}),
        ],
    )
    def test_the_lowest_limit_of_the_groups_above_counts(
        self, tmp_path: Path, membership: str, limits: dict[str, str]
    ) -> None:
        assert self.cgroups(tmp_path, membership, limits) == 1000


class TestPages:
    """Memory that a slot has touched counts, until it is given back."""

    def test_a_released_slot_gives_its_pages_back_when_asked(self) -> None:
        with Arena(slots=2, max_texts=1000, max_bytes=4_000_000, dimension=256, dtype="float32") as arena:
            for keep, left in ((True, 4_000_000), (False, 0)):
                slot = arena.acquire()
                slot.append(pa.array(["x" * 4000] * 1000, pa.large_string()))  # pyright: ignore[reportArgumentType]
                slot.matrix(0, 1000)[:] = 1
                slot.release(keep_pages=keep)
                assert (resident(arena) > left) == keep
            again = arena.acquire()
            again.append(pa.array(["fresh"], pa.large_string()))  # pyright: ignore[reportArgumentType]
            assert again.texts(0, 1).to_pylist() == ["fresh"]


def resident(arena: Arena) -> int:
    return os.fstat(arena.fd).st_blocks * 512


class WatchingPool:
    """Stands in front of a pool and keeps a run's shared memory, to look at it when the run is over."""

    def __init__(self, pool: EncoderPool) -> None:
        self._pool = pool
        self._kept = -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def arena(self, **size: int) -> Arena:
        arena = self._pool.arena(**size)
        self._kept = os.dup(arena.fd)
        return arena

    def resident(self) -> int:
        """Bytes of the arena that were touched and not given back."""
        size = os.fstat(self._kept).st_blocks * 512
        os.close(self._kept)
        return size


class SlowStore(LocalStore):
    """A local store that takes its time over some objects, by their place in the order of their beginning."""

    def __init__(self, root: Path, slow: set[int]) -> None:
        super().__init__(root)
        self._slow = slow
        self._begun = itertools.count()

    def create(self, name: str) -> LocalUpload:
        if next(self._begun) in self._slow:
            time.sleep(0.02)
        return super().create(name)


class HeldByUploads:
    """Counts what all uploads that live hold at a time, in bytes."""

    def __init__(self) -> None:
        self.most = 0
        self._lock = threading.Lock()
        self._uploads: weakref.WeakSet[ObjectUpload] = weakref.WeakSet()

    def counted(self, take: Callable[[ObjectUpload, memoryview], None]) -> Callable[[ObjectUpload, memoryview], None]:
        def taking(upload: ObjectUpload, content: memoryview) -> None:
            take(upload, content)
            with self._lock:
                self._uploads.add(upload)
                self.most = max(self.most, sum(len(one._buffer) for one in self._uploads))

        return taking


class TestRuns:
    def test_the_smallest_limit_really_works(self, hash_pool: EncoderPool, tmp_path: Path) -> None:
        thresholds = Thresholds(b_min=2_000, b_max=4_000, b_max_bytes=4_000_000)
        least = smallest_limit(lambda limit: make_run(hash_pool, [], tmp_path, thresholds, memory_limit=limit))
        catalog = {f"p{n}": numbered_rows(f"p{n}", size) for n, size in enumerate([3_900, 12_000, 10, 2_500, 0, 4_000])}
        run = make_run(hash_pool, in_memory(catalog), tmp_path, thresholds, memory_limit=least)
        assert keys_of(finish_receipts(run, "encoded")) == sorted(catalog)
        assert run.report.peak_resident_bytes <= least
        for key, rows in catalog.items():
            assert_embedded(tmp_path, run.space.name, key, rows)

    def test_texts_almost_as_large_as_a_superbatch_do_not_wait_for_themselves(
        self, hash_pool: EncoderPool, tmp_path: Path
    ) -> None:
        """Takes seconds: texts of tens of megabytes, so that they weigh something beside the reader's own share."""
        size = 24 * 1024 * 1024
        thresholds = Thresholds(b_min=10, b_max=10, b_min_bytes=size, b_max_bytes=size)
        least = smallest_limit(lambda limit: make_run(hash_pool, [], tmp_path, thresholds, memory_limit=limit))

        def partitions() -> Iterator[Partition]:
            for number in range(3):
                yield partition_of(f"p{number}", [(f"{number}", f"{number}" * (20 * 1024 * 1024))])

        run = make_run(hash_pool, partitions(), tmp_path, thresholds, memory_limit=least)
        assert keys_of(finish_receipts(run)) == ["p0", "p1", "p2"]
        assert run.report.truncated == 3

    @settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        sizes=st.lists(st.integers(0, 300), max_size=10),
        text_bytes=st.integers(0, 2_000),
        batch_rows=st.integers(1, 80),
        b_max=st.integers(1, 120),
        slow=st.sets(st.integers(0, 12), max_size=4),
    )
    def test_under_the_smallest_limit_every_catalog_comes_through_within_it_however_slow_the_store(
        self,
        hash_pool: EncoderPool,
        tmp_path_factory: pytest.TempPathFactory,
        sizes: list[int],
        text_bytes: int,
        batch_rows: int,
        b_max: int,
        slow: set[int],
    ) -> None:
        output = tmp_path_factory.mktemp("tight")
        rows = [[(f"{row}", f"{n}/{row}".ljust(text_bytes)) for row in range(size)] for n, size in enumerate(sizes)]
        thresholds = Thresholds(b_min=max(1, b_max // 2), b_max=b_max, b_max_bytes=20_000)
        with pytest.MonkeyPatch.context() as patch:
            # The shares of reader and ids are so large that small catalogs would never feel the limit.
            patch.setattr(memory, "_READER_BYTES", 2 * batch_rows * 2_100)
            patch.setattr(memory, "_LEAST_ID_SET_BYTES", 1024 * 8)
            least = smallest_limit(lambda limit: make_run(hash_pool, [], output, thresholds, memory_limit=limit))
            partitions = [partition_of(f"p{n}", found, batch_rows=batch_rows) for n, found in enumerate(rows)]
            store = SlowStore(output, slow)
            run = make_run(hash_pool, partitions, store, thresholds, memory_limit=least)
        assert keys_of(finish_receipts(run)) == sorted(f"p{n}" for n in range(len(rows)))
        assert run._ledger.peak <= least

    @settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        sizes=st.lists(st.integers(0, 300), max_size=10),
        text_bytes=st.integers(0, 2_000),
        batch_rows=st.integers(1, 80),
        b_max=st.integers(1, 120),
        part_bytes=st.sampled_from([2_000, 10_000, 100_000]),
    )
    def test_what_uploads_to_a_bucket_hold_is_within_the_smallest_limit_too(
        self,
        hash_pool: EncoderPool,
        sizes: list[int],
        text_bytes: int,
        batch_rows: int,
        b_max: int,
        part_bytes: int,
    ) -> None:
        rows = [[(f"{row}", f"{n}/{row}".ljust(text_bytes)) for row in range(size)] for n, size in enumerate(sizes)]
        thresholds = Thresholds(b_min=max(1, b_max // 2), b_max=b_max, b_max_bytes=20_000)
        store = open_object_store("memory://m/out", StorageOptions(part_bytes=part_bytes))
        held = HeldByUploads()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory, "_READER_BYTES", 2 * batch_rows * 2_100)
            patch.setattr(memory, "_LEAST_ID_SET_BYTES", 1024 * 8)
            patch.setattr(ObjectUpload, "_take", held.counted(ObjectUpload._take))
            least = smallest_limit(lambda limit: make_run(hash_pool, [], store, thresholds, memory_limit=limit))
            on_disk = smallest_limit(
                lambda limit: fit_memory(thresholds, 1.0, SPACE, 8, limit, machine_bytes=1)[1].limit
            )
            partitions = [partition_of(f"p{n}", found, batch_rows=batch_rows) for n, found in enumerate(rows)]
            run = make_run(hash_pool, partitions, store, thresholds, memory_limit=least)
            assert keys_of(finish_receipts(run)) == sorted(f"p{n}" for n in range(len(rows)))
        assert run._ledger.peak <= least
        assert held.most <= least - on_disk, "what a bucket's limit has beyond a disk's is for them"

    @pytest.mark.parametrize("tight", [True, False])
    def test_only_under_a_tight_limit_is_shared_memory_given_back_after_every_superbatch(
        self, hash_pool: EncoderPool, tmp_path: Path, tight: bool
    ) -> None:
        """What free slots keep is in no account, so they keep it only where all slots fit the limit at once."""
        thresholds = Thresholds(b_min=200, b_max=400, b_max_bytes=2_000_000)
        least = smallest_limit(lambda limit: make_run(hash_pool, [], tmp_path, thresholds, memory_limit=limit))
        catalog = {f"p{n}": numbered_rows(f"p{n}", 350, words=400) for n in range(6)}  # about 1.4 MB each
        pool = WatchingPool(hash_pool)
        finish(make_run(pool, in_memory(catalog), tmp_path, thresholds, memory_limit=least if tight else None))
        assert (pool.resident() == 0) == tight

    def test_a_storage_that_hangs_holds_up_the_reader(self, hash_pool: EncoderPool, tmp_path: Path) -> None:
        """Three SuperBatches are admitted, no matter how many wait at the door."""
        go_on = threading.Event()

        class HangingStore(LocalStore):
            def create(self, name: str) -> LocalUpload:
                assert name.endswith("space.json") or go_on.wait(60)
                return super().create(name)

        in_flight: list[int] = []

        def waiting() -> None:
            in_flight.append(run._in_flight.texts)
            go_on.set()

        catalog = {f"p{n}": numbered_rows(f"p{n}", 100) for n in range(12)}
        pool = DoorPool(hash_pool, waiting)
        run = make_run(pool, in_memory(catalog), HangingStore(tmp_path), Thresholds(b_min=100, b_max=100))
        assert keys_of(finish_receipts(run)) == sorted(catalog)
        assert in_flight[0] == 3 * 100 + 7, "three SuperBatches and the batch of rows that waits for a slot"
        assert run.report.max_in_flight_texts <= 3 * 100 + 7


class TestInFlight:
    def test_the_most_is_remembered(self) -> None:
        count = InFlight()
        count.add(5)
        count.add(6)
        count.remove(5)
        count.add(2)
        assert (count.texts, count.most) == (8, 11)

    def test_refused_partitions_are_no_longer_in_flight(self, hash_pool: EncoderPool, tmp_path: Path) -> None:
        bad = [partition_of(f"p{n}", numbered_rows("p", 250), fails_at=240) for n in range(5)]
        run = make_run(hash_pool, bad, tmp_path)
        finish(run)
        assert 0 < run.report.max_in_flight_texts <= 3 * 250


def test_batches_far_larger_than_a_superbatch_are_taken_piece_by_piece(hash_pool: EncoderPool, tmp_path: Path) -> None:
    rows = numbered_rows("k", 5_000)

    def read() -> Iterator[RowBatch]:
        yield from partition_of("k", rows, batch_rows=5_000).read()

    run = make_run(
        hash_pool,
        [Partition("k", "v1", read, lambda: "v1")],
        tmp_path,
        Thresholds(b_min=10, b_max=200, b_max_bytes=8_000),
    )
    finish(run)
    assert_embedded(tmp_path, run.space.name, "k", rows)


_GROWTH = """
import sys
from pathlib import Path
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.spec import EncodingSpec
from tests.engine.runs import in_memory, make_run
from surge_dagster.engine.superbatch import Thresholds
from tests.small_catalogs import numbered_rows, partition_of
texts, size = int(sys.argv[1]), 2_500
partitions = (partition_of(f"p{n:05d}", numbered_rows(f"p{n:05d}", size)) for n in range(texts // size))
with EncoderPool(EncodingSpec("hash://384"), devices="cpu") as pool:
    run = make_run(pool, partitions, Path(sys.argv[2]), Thresholds(b_min=20_000, b_max=100_000))
    written = sum(receipt.rows for receipt in run)
assert written == texts
# Not getrusage: its maximum begins with that of the process that started this one.
print(next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")))
"""


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_ten_times_the_texts_take_no_more_memory(tmp_path: Path) -> None:
    """Millions of texts take minutes; the most that the process ever held, in kB, with a pool of a null encoder."""
    most = {}
    for texts in (200_000, 2_000_000):
        command = [sys.executable, "-c", _GROWTH, str(texts), str(tmp_path / str(texts))]
        ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
        assert ran.returncode == 0, ran.stderr
        most[texts] = int(ran.stdout)
        shutil.rmtree(tmp_path / str(texts))
    print(f"peak RSS in kB: {most}")
    assert most[2_000_000] < 1.05 * most[200_000]
