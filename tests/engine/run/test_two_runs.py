"""Promise 9: of two concurrent runs that listed different versions of a partition, the one with the
newer source wins.

Each is a whole run in a thread, with its own pool, over the same catalog on disk. The run with the
old version is held at its last check of the source version: before it, or just after it, when the
version that it read is out of date. A writer puts, completes or renames a file only if the one that
it replaces has not changed since its last check. Takes seconds: two runs in each case.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store import open_store
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.tables.opening import open_source
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


class TwoRuns:
    """Two runs over one catalog; each lists its partitions when it begins."""

    def __init__(self, pools: list[EncoderPool], root: Path, rows: int) -> None:
        self.catalog = write_catalog(
            root / "catalog", {KEY: numbered_rows("old", rows), "stays": STAYS}
        )
        self.new_rows: Rows = numbered_rows("new", rows + 1)
        self.space = pools[0].space.name
        self._pools = iter(pools)
        self._threads = ThreadPoolExecutor(2)

    def change_source(self) -> None:
        write_partition(self.catalog, KEY, self.new_rows, version="v2")

    def prepare(
        self,
        store: Store,
        before: Callable[[], None] = no_door,
        after: Callable[[], None] = no_door,
    ) -> EmbeddingRun:
        """A run that calls `before` and `after` around its last check of the partition's source
        version."""

        def listed() -> Iterator[Partition]:
            for partition in open_source(self.catalog):
                yield self._between(partition, before, after) if partition.key == KEY else partition

        return make_run(next(self._pools), listed(), store, Thresholds(b_min=1, b_max=2_000))

    def begin(self, run: EmbeddingRun) -> Future[list[Any]]:
        return self._threads.submit(lambda: list(run.events()))

    def close(self) -> None:
        self._threads.shutdown()

    @staticmethod
    def _between(
        partition: Partition, before: Callable[[], None], after: Callable[[], None]
    ) -> Partition:
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
def two(
    request: pytest.FixtureRequest, pools: list[EncoderPool], tmp_path: Path
) -> Iterator[TwoRuns]:
    runs = TwoRuns(pools, tmp_path, request.param)
    yield runs
    runs.close()


def published(events: list[Any]) -> bool:
    """Whether a run reports that it published the partition; it always publishes the other one."""
    assert "stays" in keys_of(receipts(events))
    return KEY in keys_of(receipts(events))


def assert_refused(events: list[Any]) -> None:
    """The run discarded its result for the partition, reports why, and published the other
    partition."""
    [failure] = failures(events)
    assert (failure.key, failure.transient) == (KEY, True)
    assert "'v1' was read, it is 'v2' now" in failure.reason
    assert not published(events)


def assert_new_source_won(two: TwoRuns, output: Path) -> None:
    assert published_files(output, two.space) == {f"{KEY}.parquet", "stays.parquet"}
    assert assert_embedded(output, two.space, KEY, two.new_rows).source_version == "v2"
    assert assert_embedded(output, two.space, "stays", STAYS).source_version == "v1"


class Output:
    """A folder of the disk or of a bucket."""

    def __init__(self, folder: Path, server: ObjectServer | None) -> None:
        self._folder = folder
        self._server = server

    def open(self) -> Store:
        return (
            open_store(self._folder / "out") if self._server is None else open_bucket(self._server)
        )

    def copied(self) -> Path:
        """A folder of the disk with its files."""
        for key in self._server.objects() if self._server else ():
            path = self._folder / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self._server.content(key) if self._server else b"")
        return self._folder / "out"


@pytest.fixture(params=["disk", "bucket"])
def output(request: pytest.FixtureRequest, tmp_path: Path) -> Output:
    return Output(
        tmp_path, request.getfixturevalue("object_server") if request.param == "bucket" else None
    )


@pytest.mark.parametrize("has_checked", [False, True])
def test_run_with_the_old_source_that_publishes_second_discards_its_result(
    two: TwoRuns, output: Output, has_checked: bool
) -> None:
    door = Door()
    doors = {"after" if has_checked else "before": door}
    lost = two.begin(two.prepare(output.open(), **doors))
    assert door.reached.wait(SECONDS)
    two.change_source()
    assert published(two.begin(two.prepare(output.open())).result(SECONDS))
    door.open()
    assert_refused(lost.result(SECONDS))
    assert_new_source_won(two, output.copied())


def test_run_with_the_new_source_replaces_a_file_published_after_both_runs_checked(
    two: TwoRuns, output: Output
) -> None:
    old_checked, new_checked = Door(), Door()
    first = two.begin(two.prepare(output.open(), after=old_checked))
    assert old_checked.reached.wait(SECONDS)
    two.change_source()
    second = two.begin(two.prepare(output.open(), after=new_checked))
    assert new_checked.reached.wait(SECONDS)
    old_checked.open()
    assert published(first.result(SECONDS)), "its source version was current when it checked"
    new_checked.open()
    assert published(second.result(SECONDS))
    assert_new_source_won(two, output.copied())
