"""Reading published files back: many at once from a bucket, and nothing is told after the end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import StoreUnavailable, TransientError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.report import Failure
from surge_dagster.engine.sources.partition import Partition, RowBatch
from surge_dagster.engine.store.store import Store
from surge_dagster.orchestration import read_back
from surge_dagster.orchestration.read_back import Found, ReadBack
from tests.dagster.conftest import NAMES, Workbench
from tests.dagster.nights import Production
from tests.engine.runs import finish, make_run
from tests.engine.store.object_server import ObjectServer
from tests.signals import interrupted_in_another_thread
from tests.small_catalogs import FailingStore, numbered_rows, partition_of, row_batch_of

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


def test_a_file_that_its_disk_does_not_give_is_not_to_be_encoded_again(tmp_path: Path, hash_pool: EncoderPool) -> None:
    made = partition("k")
    run = make_run(hash_pool, [made], tmp_path)
    finish(run)
    with pytest.raises(
        TransientError, match=r"k\.parquet' could not be read: Input/output error\. Run again when"
    ) as error:
        read_back.file_failure(made, FailingStore(tmp_path, "k"), run.space)
    assert error.value.key == "k" and "checked again" not in str(error.value)


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


@pytest.mark.parametrize(("size", "together"), [(1 << 30, 1), (12 << 20, 2), (0, 16)])
def test_large_files_are_read_few_at_a_time(reads: Any, size: int, together: int) -> None:
    changed, most, now = threading.Condition(), [0], [0]

    def read(key: str) -> None:
        with changed:
            now[0] += 1
            most[0] = max(most[0], now[0])
            changed.notify_all()
            assert changed.wait_for(lambda: most[0] >= together, 60)
        threading.Event().wait(0.02)  # time for one too many
        with changed:
            now[0] -= 1

    keys = [str(number) for number in range(40 if size == 0 else 12)]
    assert look_at_all(reads(read), keys, size=size) == dict.fromkeys(keys)
    assert most[0] == together


def test_who_reads_faster_than_the_bucket_waits(reads: Any) -> None:
    opened, asked = threading.Event(), threading.Semaphore(0)

    def look() -> None:
        with ReadBack(store, SPACE) as reader:
            for number in range(100):
                reader.look(partition(str(number)), 1, lambda _: None)
                asked.release()

    store = reads(lambda key: cast(None, not opened.wait(60) or None))
    thread = threading.Thread(target=look)
    thread.start()
    for _ in range(32):
        assert asked.acquire(timeout=60)
    assert not asked.acquire(timeout=0.2) and thread.is_alive()
    opened.set()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize(("remote", "most"), [(True, 32), (False, 1)])
def test_a_bucket_that_is_down_ends_it(reads: Any, remote: bool, most: int) -> None:
    asked: list[str] = []

    def read(key: str) -> None:
        asked.append(key)
        raise StoreUnavailable("the store is down")

    store = reads(read)
    store.is_remote = remote
    with pytest.raises(StoreUnavailable, match="down"):
        look_at_all(store, [str(number) for number in range(1000)])
    assert 1 <= len(asked) <= most


def test_what_has_failed_is_seen_without_another_file(reads: Any) -> None:
    def read(key: str) -> None:
        raise StoreUnavailable("the store is down")

    with pytest.raises(StoreUnavailable), ReadBack(reads(read), SPACE) as reader:
        reader.look(partition("a"), 1, lambda _: None)
        for _ in range(600):
            reader.require_going_on()
            threading.Event().wait(0.1)


def test_what_telling_raises_is_raised(reads: Any) -> None:
    def refuse(found: Found) -> None:
        raise ValueError("the event log is full")

    with pytest.raises(ValueError, match="full"), ReadBack(reads(lambda key: None), SPACE) as reader:
        reader.look(partition("a"), 1, refuse)


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "surge-read-back"]


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
            assert begun.acquire(timeout=60)
        raise KeyboardInterrupt
    assert store.over.is_set(), "nor does a request that failed wait to be tried again"
    assert len(readers()) == 16 and all(thread.daemon for thread in readers()), "no process waits for them"
    opened.set()
    for thread in readers():
        thread.join(60)
    assert told == [] and not begun.acquire(blocking=False) and not readers()


@pytest.mark.timeout(60)
def test_who_waits_is_interrupted_by_a_signal_that_another_thread_was_given(reads: Any) -> None:
    opened = threading.Event()
    with interrupted_in_another_thread(), ReadBack(reads(lambda key: opened.wait() and None), SPACE) as reader:
        reader.look(partition("a"), 1, lambda _: None)
    opened.set()


def test_when_time_is_over_what_was_read_by_then_counts(reads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, begun, told, now = threading.Event(), threading.Event(), threading.Event(), [100.0]

    def read(key: str) -> None:
        if key == "1":
            begun.set()
            assert opened.wait(60)

    def tell(key: str, answer: Found) -> None:
        found[key] = answer
        told.set()

    monkeypatch.setattr(read_back, "time", SimpleNamespace(monotonic=lambda: now[0]))
    found: dict[str, Found] = {}
    with ReadBack(reads(read), SPACE, until=120.0) as reader:
        for key in ("0", "1"):
            reader.look(partition(key), 1, partial(tell, key))
        assert begun.wait(60) and told.wait(60)
        now[0] = 120.5
    assert found == {"0": None}
    opened.set()
    for thread in readers():
        thread.join(60)
    assert found == {"0": None}


def test_a_file_that_is_being_read_is_left_when_the_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    read, begun, ended = [0], threading.Event(), threading.Event()

    def source() -> Iterator[RowBatch]:
        try:
            for _ in range(100):
                read[0] += 1
                begun.set()
                assert interrupted.wait(60)
                yield row_batch_of([("id", "text")])
        finally:
            ended.set()

    def whole(partition: Partition, *_: object) -> None:
        assert not list(partition.read())

    interrupted = threading.Event()
    monkeypatch.setattr(read_back, "file_failure", whole)
    with pytest.raises(KeyboardInterrupt), ReadBack(cast(Store, Bucket()), SPACE) as reader:
        reader.look(Partition("a", "v1", source, lambda: "v1"), 1, lambda _: None)
        assert begun.wait(60)
        raise KeyboardInterrupt
    interrupted.set()
    assert ended.wait(60) and read[0] == 1


def test_a_run_reads_its_files_of_a_bucket_back_together(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, object_server: ObjectServer
) -> None:
    """Those it published, then those that are not on record, and the sensor those."""
    monkeypatch.setenv("SURGE_CACHE_DIR", str(bench.root / "cache"))
    Production.begin(bench, object_server)
    for number in range(4):
        bench.write(f"p{number}", 5)
    together, honest, times = threading.Barrier(4, timeout=60), read_back.file_failure, [0]

    def waits(*file: Any) -> Failure | None:
        together.wait()
        times[0] += 1
        return honest(*file)

    monkeypatch.setattr(read_back, "file_failure", waits)
    for known in (4, 8):
        ran = bench.refresh()
        assert ran.success and len(ran.materialized()) == 4 and times[0] == known
        bench.instance.wipe_assets([NAMES.embeddings])
    assert len(bench.tick().asset_events) == 4 and times[0] == 12
