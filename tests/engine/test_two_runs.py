"""Promise 9: of two concurrent runs that listed different versions of a partition, the one with the newer source wins.

Each is a whole run in a thread, with its own pool, over the same catalog on disk. The run with the old version is held
at its last check of the source version: before it, or just after it, when the version that it read is out of date.
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
    """Holds a thread, the first time one calls it, until the test opens it."""

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
    """A disk on which the complete file of one partition waits at a door before its writer takes the folder's lock."""

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
    """Two runs over one catalog; each lists its partitions when it begins."""

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
        """A run that calls `before` and `after` around its last check of the partition's source version."""

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
    """Whether a run reports that it published the partition; it always publishes the other one."""
    assert "stays" in keys_of(receipts(events))
    return KEY in keys_of(receipts(events))


def assert_refused(events: list[Any]) -> None:
    """The run discarded its result for the partition, reports why, and published the other partition."""
    [failure] = failures(events)
    assert (failure.key, failure.transient) == (KEY, True)
    assert "'v1' was read, it is 'v2' now" in failure.reason
    assert not published(events)


def assert_new_source_won(two: TwoRuns, output: Path) -> None:
    assert published_files(output, two.space) == {f"{KEY}.parquet", "stays.parquet"}
    assert assert_embedded(output, two.space, KEY, two.new_rows).source_version == "v2"
    assert assert_embedded(output, two.space, "stays", STAYS).source_version == "v1"


def copied(server: ObjectServer, folder: Path) -> Path:
    """A folder with a copy of the bucket's objects."""
    for key in server.objects():
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(server.content(key))
    return folder / "out"


class TestOnADisk:
    """A writer holds the folder's lock while it checks the source version for the last time and renames its file."""

    def test_run_with_the_old_source_that_publishes_second_discards_its_result(
        self, two: TwoRuns, tmp_path: Path
    ) -> None:
        output, door = tmp_path / "out", Door()
        lost = two.begin(two.prepare(HeldStore(output, door)))
        assert door.reached.wait(SECONDS)
        two.change_source()
        assert published(two.begin(two.prepare(open_store(output))).result(SECONDS))
        door.open()
        assert_refused(lost.result(SECONDS))
        assert_new_source_won(two, output)

    def test_run_with_the_new_source_waits_for_the_lock_and_replaces_the_older_file(
        self, two: TwoRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        output, checked, waits = tmp_path / "out", Door(), threading.Event()

        def watched(folder: Path) -> AbstractContextManager[None]:
            if checked.reached.is_set():
                waits.set()
            return folder_lock(folder)

        monkeypatch.setattr(local_upload, "folder_lock", watched)
        old, new = two.prepare(open_store(output), after=checked), two.prepare(open_store(output))
        first = two.begin(old)
        assert checked.reached.wait(SECONDS)
        two.change_source()
        second = two.begin(new)
        assert waits.wait(SECONDS)
        with (output / two.space / ".lock").open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # so the run with the new source cannot publish in between
        checked.open()
        assert published(first.result(SECONDS)), "its source version was current when it checked"
        assert published(second.result(SECONDS))
        assert_new_source_won(two, output)


class TestInABucket:
    """A writer puts or completes an object only if the one that it replaces has not changed since its last check."""

    @pytest.mark.parametrize("has_checked", [False, True])
    def test_run_with_the_old_source_that_publishes_second_discards_its_result(
        self, two: TwoRuns, object_server: ObjectServer, tmp_path: Path, has_checked: bool
    ) -> None:
        door = Door()
        doors = {"after" if has_checked else "before": door}
        lost = two.begin(two.prepare(open_bucket(object_server), **doors))
        assert door.reached.wait(SECONDS)
        two.change_source()
        assert published(two.begin(two.prepare(open_bucket(object_server))).result(SECONDS))
        door.open()
        assert_refused(lost.result(SECONDS))
        assert_new_source_won(two, copied(object_server, tmp_path))

    def test_run_with_the_new_source_replaces_an_object_put_after_both_runs_checked(
        self, two: TwoRuns, object_server: ObjectServer, tmp_path: Path
    ) -> None:
        old_checked, new_checked = Door(), Door()
        first = two.begin(two.prepare(open_bucket(object_server), after=old_checked))
        assert old_checked.reached.wait(SECONDS)
        two.change_source()
        second = two.begin(two.prepare(open_bucket(object_server), after=new_checked))
        assert new_checked.reached.wait(SECONDS)
        old_checked.open()
        assert published(first.result(SECONDS)), "its source version was current when it checked"
        new_checked.open()
        assert published(second.result(SECONDS))
        assert_new_source_won(two, copied(object_server, tmp_path))
