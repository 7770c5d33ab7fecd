"""Promise 9: of two runs side by side, one that listed a partition's old version and one the new, the new source wins.

Each is a whole run in a thread, with a pool of its own, over the same catalog on disk. The one with the old version is
stopped where it matters, at its last look at the source: before it, or just after it, with what it saw no longer true.
Takes seconds: two runs in each case.
"""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.run import EmbeddingRun
from surge_dagster.engine.sources import open_source
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store import local_upload, open_store
from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.engine.store.local_upload import LocalUpload, folder_lock
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.thresholds import Thresholds
from tests.engine.runs import failures, make_run, receipts
from tests.engine.store.object_server import open_bucket
from tests.small_catalogs import (
    DIMENSION,
    Rows,
    assert_embedded,
    keys_of,
    numbered_rows,
    published_files,
    write_catalog,
    write_partition,
)

if TYPE_CHECKING:
    from tests.engine.store.object_server import ObjectServer

KEY = "moves"
SIZES = [5, 900]  # the larger one is sent to a bucket in parts
STAYS = numbered_rows("stays", 5)
SECONDS = 60


class Door:
    """Where a thread waits, the first time it comes by, until somebody lets it pass."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def __call__(self) -> None:
        if not self.reached.is_set():
            self.reached.set()
            assert self._open.wait(SECONDS)

    def open(self) -> None:
        self._open.set()


def no_door() -> None:
    pass


class HeldStore(LocalStore):
    """A disk on which the file of one partition, complete, waits at a door before it asks for the folder's lock."""

    def __init__(self, root: Path, door: Callable[[], None]) -> None:
        super().__init__(root)
        self._door = door

    def create(self, name: str) -> LocalUpload:
        upload = HeldUpload(self.root, name)
        upload.door = self._door if name.endswith(f"/{KEY}.parquet") else no_door
        return upload


class HeldUpload(LocalUpload):
    door: Callable[[], None]

    def flush(self) -> None:
        super().flush()
        self.door()


class TwoRuns:
    """Two runs over one catalog; each lists its partitions when it is begun."""

    def __init__(self, pools: list[EncoderPool], root: Path, rows: int) -> None:
        self.catalog = write_catalog(root / "catalog", {KEY: numbered_rows("old", rows), "stays": STAYS})
        self.new_rows: Rows = numbered_rows("new", rows + 1)
        self.space = pools[0].space.name
        self._pools = iter(pools)
        self._threads = ThreadPoolExecutor(2)

    def change_source(self) -> None:
        write_partition(self.catalog, KEY, self.new_rows, version="v2")

    def prepare(
        self, store: Store, before: Callable[[], None] = no_door, after: Callable[[], None] = no_door
    ) -> EmbeddingRun:
        """A run whose look at the partition's present version is between two doors."""

        def listed() -> Iterator[Partition]:
            for partition in open_source(self.catalog):
                yield self._between(partition, before, after) if partition.key == KEY else partition

        return make_run(next(self._pools), listed(), store, Thresholds(b_min=1, b_max=2_000))

    def begin(self, run: EmbeddingRun) -> Future[list[Any]]:
        return self._threads.submit(lambda: list(run.events()))

    def close(self) -> None:
        self._threads.shutdown()

    @staticmethod
    def _between(partition: Partition, before: Callable[[], None], after: Callable[[], None]) -> Partition:
        def look() -> str | None:
            before()
            found = partition.current_source_version()
            after()
            return found

        return replace(partition, current_source_version=look)


@pytest.fixture(scope="module")
def pools(hash_pool: EncoderPool) -> Iterator[list[EncoderPool]]:
    with EncoderPool(EncodingSpec(model=f"hash://{DIMENSION}")) as another:
        yield [hash_pool, another]


@pytest.fixture(params=SIZES, ids=lambda rows: f"{rows} rows")
def two(request: pytest.FixtureRequest, pools: list[EncoderPool], tmp_path: Path) -> Iterator[TwoRuns]:
    runs = TwoRuns(pools, tmp_path, request.param)
    yield runs
    runs.close()


def published(events: list[Any]) -> bool:
    """Whether a run says that it published the partition; the other one it always has."""
    assert "stays" in keys_of(receipts(events))
    return KEY in keys_of(receipts(events))


def assert_refused(events: list[Any]) -> None:
    """The run lost its partition, says why, and published the other one."""
    [failure] = failures(events)
    assert (failure.key, failure.transient) == (KEY, True)
    assert "'v1' was read, it is 'v2' now" in failure.reason
    assert not published(events)


def assert_the_new_one_won(two: TwoRuns, output: Path) -> None:
    assert published_files(output, two.space) == {f"{KEY}.parquet", "stays.parquet"}
    assert assert_embedded(output, two.space, KEY, two.new_rows).source_version == "v2"
    assert assert_embedded(output, two.space, "stays", STAYS).source_version == "v1"


def copied(server: ObjectServer, folder: Path) -> Path:
    """A folder with what lies in the bucket."""
    for key in server.objects():
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(server.content(key))
    return folder / "out"


class TestOnADisk:
    """A file takes its name under the folder's lock, and the last look is taken under it too."""

    def test_the_old_one_that_comes_second_throws_its_result_away(self, two: TwoRuns, tmp_path: Path) -> None:
        output, door = tmp_path / "out", Door()
        lost = two.begin(two.prepare(HeldStore(output, door)))
        assert door.reached.wait(SECONDS)
        two.change_source()
        assert published(two.begin(two.prepare(open_store(output))).result(SECONDS))
        door.open()
        assert_refused(lost.result(SECONDS))
        assert_the_new_one_won(two, output)

    def test_the_new_one_waits_for_an_old_one_that_has_looked_and_then_replaces_its_file(
        self, two: TwoRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        output, looked, waits = tmp_path / "out", Door(), threading.Event()

        def watched(folder: Path) -> AbstractContextManager[None]:
            if looked.reached.is_set():
                waits.set()
            return folder_lock(folder)

        monkeypatch.setattr(local_upload, "folder_lock", watched)
        old, new = two.prepare(open_store(output), after=looked), two.prepare(open_store(output))
        first = two.begin(old)
        assert looked.reached.wait(SECONDS)
        two.change_source()
        second = two.begin(new)
        assert waits.wait(SECONDS)
        with (output / two.space / ".lock").open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # so the new one cannot come in between
        looked.open()
        assert published(first.result(SECONDS)), "what it saw was true when it looked"
        assert published(second.result(SECONDS))
        assert_the_new_one_won(two, output)


class TestInABucket:
    """An object is put, or completed, on the condition that what stood there has not changed since the last look."""

    @pytest.mark.parametrize("has_looked", [False, True])
    def test_the_old_one_that_comes_second_throws_its_result_away(
        self, two: TwoRuns, object_server: ObjectServer, tmp_path: Path, has_looked: bool
    ) -> None:
        door = Door()
        doors = {"after" if has_looked else "before": door}
        lost = two.begin(two.prepare(open_bucket(object_server), **doors))
        assert door.reached.wait(SECONDS)
        two.change_source()
        assert published(two.begin(two.prepare(open_bucket(object_server))).result(SECONDS))
        door.open()
        assert_refused(lost.result(SECONDS))
        assert_the_new_one_won(two, copied(object_server, tmp_path))

    def test_the_new_one_replaces_what_an_old_one_put_after_both_had_looked(
        self, two: TwoRuns, object_server: ObjectServer, tmp_path: Path
    ) -> None:
        old_looked, new_looked = Door(), Door()
        first = two.begin(two.prepare(open_bucket(object_server), after=old_looked))
        assert old_looked.reached.wait(SECONDS)
        two.change_source()
        second = two.begin(two.prepare(open_bucket(object_server), after=new_looked))
        assert new_looked.reached.wait(SECONDS)
        old_looked.open()
        assert published(first.result(SECONDS)), "what it saw was true when it looked"
        new_looked.open()
        assert published(second.result(SECONDS))
        assert_the_new_one_won(two, copied(object_server, tmp_path))
