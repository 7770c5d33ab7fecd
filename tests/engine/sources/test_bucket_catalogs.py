"""Catalogs in a bucket behind a proxy that breaks requests: rows are whole or the partition's error
is transient."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import pytest

from surge_dagster.engine.errors import StoreUnavailable, TransientError
from surge_dagster.engine.sources.ahead import AHEAD_BYTES
from surge_dagster.engine.sources.listing import FIRST_BYTES
from surge_dagster.engine.store import object_store
from surge_dagster.engine.store.object_client import ClientLimits
from surge_dagster.engine.store.store import CONCURRENT_READS
from surge_dagster.engine.support.footer_memory import forget_all
from tests.engine.runs import Output
from tests.engine.sources.reading import rows_of
from tests.engine.sources.shops import Shop
from tests.engine.sources.tables import contents
from tests.engine.store.object_server import Fault, ObjectServer, RandomFaults, always
from tests.small_catalogs import Rows, numbered_rows

# A file that takes several requests: random letters, which do not compress.
LARGE_ROWS = 4_000


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts follow each other without a pause, and nothing is known of other tests' files."""
    limits = partial(ClientLimits, first_backoff_seconds=0.001)
    monkeypatch.setattr(object_store, "ClientLimits", limits)
    forget_all()


@pytest.fixture
def bucket(object_server: ObjectServer, tmp_path: Path) -> Shop:
    return Shop(tmp_path / "files", object_server)


def large_rows() -> Rows:
    return [(str(number), f"{number:06d}" * 200) for number in range(LARGE_ROWS)]  # about 5 MB


def test_footers_of_unchanged_objects_are_not_read_again(
    bucket: Shop, object_server: ObjectServer
) -> None:
    for number in range(5):
        bucket.write(f"category={number}/0.parquet", numbered_rows("k", 3 + number))
    first = list(bucket.open())
    bucket.write("category=2/0.parquet", numbered_rows("k", 50))
    object_server.log.clear()
    second = list(bucket.open())
    gets = object_server.requests("GET")
    assert len(gets) == 3
    assert object_server.requests("GET", "list-type") == gets[:2]
    changed: list[str] = []
    for old, new in zip(first, second, strict=True):
        if (old.source_version, old.rows) != (new.source_version, new.rows):
            changed.append(new.key)
    assert changed == ["2"]


def test_rows_stay_whole_while_every_fifth_request_fails(
    bucket: Shop, object_server: ObjectServer
) -> None:
    rows: dict[str, Rows] = {str(n): numbered_rows(str(n), 20) for n in range(20)}
    rows["large"] = large_rows()
    for key, each in rows.items():
        bucket.write(f"category={key}/0.parquet", each)
    object_server.plan = RandomFaults(0.2, seed=3, stalls=0)
    assert contents(bucket.open()) == rows
    assert sum(object_server.injected.values()) > 5


def test_object_replaced_during_reading_is_a_transient_error_of_its_partition(bucket: Shop) -> None:
    bucket.write("category=a/0.parquet", [*large_rows(), *large_rows()])
    (a,) = bucket.open()
    reading = iter(a.read())
    next(reading)
    bucket.write("category=a/0.parquet", [*large_rows(), *large_rows()][::-1])
    with pytest.raises(
        TransientError, match=r"partition 'a': .*was replaced or removed while it was read"
    ) as failed:
        list(reading)
    assert failed.value.key == "a"


def test_object_that_is_never_given_fails_its_partition_alone(
    bucket: Shop, object_server: ObjectServer
) -> None:
    for key in "ab":
        bucket.write(f"category={key}/0.parquet", numbered_rows(key, 5))
    a, b = bucket.open()
    object_server.plan = always(Fault("status", 403), "GET", "category%3Da/0.parquet")
    with pytest.raises(TransientError, match=r"partition 'a': .*403") as failed:
        rows_of(a)
    assert failed.value.key == "a" and not isinstance(failed.value, StoreUnavailable)
    assert rows_of(b) == numbered_rows("b", 5)


def test_bucket_that_is_down_ends_a_listing(bucket: Shop, object_server: ObjectServer) -> None:
    bucket.write("category=a/0.parquet", numbered_rows("a", 5))
    object_server.plan = always(Fault("status", 503))
    with pytest.raises(TransientError, match=r"LIST cat/\S* failed \(503"):
        list(bucket.open())


def test_run_sends_two_listings_and_three_requests_for_each_partition(
    bucket: Shop, object_server: ObjectServer, output: Output
) -> None:
    """Its footer, its content, and a look at its folder alone before it is published."""
    for number in range(40):
        bucket.write(f"category={number}/0.parquet", numbered_rows(str(number), 3))
    output.embed(bucket.open())
    assert len(output.keys()) == 40
    listings = object_server.requests("GET", "list-type")
    assert len(listings) == len(set(listings)) == 42
    assert sum("category" in target for target in listings) == 40
    assert (len(object_server.log), object_server.requests("HEAD")) == (2 + 3 * 40, [])


class TestReadingAhead:
    def test_first_partition_is_read_before_the_footers_of_most_others(
        self, bucket: Shop, object_server: ObjectServer
    ) -> None:
        for number in range(100):
            bucket.write(f"category={number:02d}/0.parquet", numbered_rows(str(number), 3))
        first = next(iter(bucket.open()))
        assert rows_of(first) == numbered_rows("0", 3)
        object_server.settle()
        assert len(object_server.log) < 2 + 2 * CONCURRENT_READS

    def test_small_objects_are_read_once_and_ahead_of_their_turn(
        self, bucket: Shop, object_server: ObjectServer
    ) -> None:
        for number in range(40):
            bucket.write(f"category={number:02d}/0.parquet", numbered_rows(str(number), 3))
        partitions = list(bucket.open())
        object_server.log.clear()
        waiting = threading.Event()
        object_server.before = lambda _, target: waiting.set() if "D20" in target else None
        for number, partition in enumerate(partitions):
            assert rows_of(partition) == numbered_rows(str(number), 3)
            if number == 12:
                assert waiting.wait(30), (
                    "the object of partition 20 is requested before partition 13 is read"
                )
        assert len(object_server.requests("GET")) == len(set(object_server.requests("GET"))) == 40

    def test_objects_opened_ahead_stay_within_the_booked_memory(
        self, bucket: Shop, object_server: ObjectServer
    ) -> None:
        for number in range(12):
            bucket.write(f"category={number:02d}/0.parquet", large_rows())
        partitions = list(bucket.open())
        for partition in partitions:
            assert partition.page_bytes >= 4 * FIRST_BYTES + AHEAD_BYTES
        object_server.log.clear()
        for partition in partitions[:6]:
            next(iter(partition.read()))
        object_server.settle()
        touched = set(object_server.requests("GET"))
        assert len(touched) <= 6 + AHEAD_BYTES // FIRST_BYTES
