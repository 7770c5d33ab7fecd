"""Reading published files back: many at once from a bucket, and nothing is told after the end."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from surge_dagster.assets import read_back
from surge_dagster.assets.read_back import Found, ReadBack
from surge_dagster.engine.catalog import Partition
from surge_dagster.engine.encoder.spec import Space
from surge_dagster.engine.errors import StoreUnavailable, TransientError
from surge_dagster.engine.output.store import Store
from surge_dagster.engine.telemetry import Failure
from tests.dagster.conftest import NAMES, Workbench
from tests.dagster.nights import Production
from tests.engine.output.object_server import ObjectServer
from tests.small_catalogs import numbered_rows, partition_of

SPACE = cast(Space, None)  # nothing here looks at it


class Bucket:
    """A store that is far away; which one does not matter, since reading is replaced."""

    is_remote = True

    def __init__(self) -> None:
        self.over: threading.Event | None = None

    def until(self, over: threading.Event) -> Bucket:
        self.over = over
        return self


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], Failure | None]], Store]:
    """Replaces the reading of a file by a function of the partition's key; gives a bucket to read from."""

    def replace(read: Callable[[str], Failure | None]) -> Store:
        monkeypatch.setattr(read_back, "file_failure", lambda partition, *_: read(partition.key))
        return cast(Store, Bucket())

    return replace


def partition(key: str) -> Partition:
    return partition_of(key, numbered_rows(key, 1))


def look_at_all(store: Store, keys: list[str], size: int = 1) -> dict[str, Found]:
    found: dict[str, Found] = {}
    with ReadBack(store, SPACE) as reader:
        for key in keys:
            reader.look(partition(key), size, lambda answer, key=key: found.__setitem__(key, answer))
    return found


def test_sixteen_files_of_a_bucket_are_read_at_once_and_each_is_told_of(reads: Any) -> None:
    together = threading.Barrier(16, timeout=60)
    failure, error = Failure("3", "damaged"), TransientError("no answer")

    def read(key: str) -> Failure | None:
        together.wait()
        if key == "4":
            raise error
        return failure if key == "3" else None

    keys = [str(number) for number in range(64)]
    assert look_at_all(reads(read), keys) == dict.fromkeys(keys) | {"3": failure, "4": error}


def test_large_files_are_read_one_at_a_time(reads: Any) -> None:
    alone = threading.Lock()

    def read(key: str) -> None:
        assert alone.acquire(blocking=False)
        together.wait(0.02)
        alone.release()

    together = threading.Event()
    keys = [str(number) for number in range(20)]
    assert look_at_all(reads(read), keys, size=1 << 30) == dict.fromkeys(keys)


def test_who_reads_faster_than_the_bucket_waits(reads: Any) -> None:
    opened, asked = threading.Event(), [0]

    def look() -> None:
        with ReadBack(store, SPACE) as reader:
            for number in range(100):
                reader.look(partition(str(number)), 1, lambda _: None)
                asked[0] += 1

    store = reads(lambda key: cast(None, not opened.wait(60) or None))
    thread = threading.Thread(target=look)
    thread.start()
    thread.join(0.5)
    assert thread.is_alive() and asked[0] <= 32
    opened.set()
    thread.join(60)
    assert asked[0] == 100


@pytest.mark.parametrize("remote", [True, False])
def test_a_bucket_that_is_down_ends_it(reads: Any, remote: bool) -> None:
    def read(key: str) -> None:
        raise StoreUnavailable("the store is down")

    store = reads(read)
    store.is_remote = remote
    with pytest.raises(StoreUnavailable, match="down"):
        look_at_all(store, [str(number) for number in range(1000)])


def test_what_telling_raises_is_raised(reads: Any) -> None:
    def refuse(found: Found) -> None:
        raise ValueError("the event log is full")

    with pytest.raises(ValueError, match="full"), ReadBack(reads(lambda key: None), SPACE) as reader:
        reader.look(partition("a"), 1, refuse)


def test_an_error_waits_for_nothing_and_nothing_is_told_after_it(reads: Any) -> None:
    opened, begun, told = threading.Event(), threading.Semaphore(0), []

    def read(key: str) -> None:
        begun.release()
        assert opened.wait(60)

    store = reads(read)
    with pytest.raises(KeyboardInterrupt), ReadBack(store, SPACE) as reader:
        for number in range(20):
            reader.look(partition(str(number)), 1, told.append)
        for _ in range(16):
            begun.acquire()
        raise KeyboardInterrupt
    assert store.over.is_set(), "nor does a request that failed wait to be tried again"
    opened.set()
    for thread in threading.enumerate():
        if thread.name.startswith("surge-read-back"):
            thread.join(60)
    assert told == []


def test_a_run_reads_its_files_of_a_bucket_back_together(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, object_server: ObjectServer
) -> None:
    """Those it published, and then those that are not on record."""
    monkeypatch.setenv("SURGE_CACHE_DIR", str(bench.root / "cache"))
    Production.begin(bench, object_server)
    for number in range(8):
        bench.write(f"p{number}", 5)
    together, waited = threading.Barrier(4, timeout=60), set[str]()
    lock = threading.Lock()

    def before(method: str, target: str) -> None:
        """The first request for each of four files waits until there is one for each."""
        key = re.search(r"/(p[0-3])[.]parquet", target)
        if method == "GET" and key:
            with lock:
                is_first = key[1] not in waited
                waited.add(key[1])
            if is_first:
                together.wait()

    for _ in range(2):
        object_server.before = before
        ran = bench.refresh()
        assert ran.success and len(ran.materialized()) == 8 and not together.broken
        assert len(waited) == 4
        waited.clear()
        bench.instance.wipe_assets([NAMES.embeddings])
