"""What is remembered of footers saves requests, and never changes which partitions are fresh."""

from __future__ import annotations

import pytest

from surge_dagster.engine.errors import StoreUnavailable
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.store.object_store import ObjectStore, open_object_store
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.footer_memory import FooterMemory, forget_all
from tests.engine.outputs import publish_two_rows as publish
from tests.engine.store.object_server import Fault, ObjectServer, always, open_bucket
from tests.small_catalogs import partition_of

KEYS = [f"partition {number}" for number in range(6)]


@pytest.fixture(autouse=True)
def _new_process() -> None:
    forget_all()


@pytest.fixture
def store(object_server: ObjectServer) -> ObjectStore:
    opened = open_bucket(object_server)
    for key in KEYS:
        publish(opened, key)
    object_server.log.clear()
    return opened


def decide(store: Store, version: str = "v1") -> list[str]:
    """The status of each partition, as the next run of this process finds it."""
    state = OutputState(store, "s")
    partitions = [partition_of(key, [], version=version) for key in KEYS]
    return [state.freshness(partition).status for partition in state.looked_at(partitions)]


def reads(server: ObjectServer) -> list[str]:
    """The objects that were requested since the last call, without listings."""
    targets = [target for target in server.requests("GET") if "list-type" not in target]
    server.log.clear()
    return targets


def test_second_run_sends_one_listing_and_reads_no_object(
    store: ObjectStore, object_server: ObjectServer
) -> None:
    assert decide(store) == ["fresh"] * len(KEYS)
    assert len(object_server.log) == 1 + len(KEYS)
    assert len(reads(object_server)) == len(KEYS)
    assert decide(store) == ["fresh"] * len(KEYS)
    assert len(object_server.log) == 1
    assert decide(store, version="v2") == ["stale"] * len(KEYS)
    assert reads(object_server) == []


def test_changed_object_is_read_again_and_no_other(
    store: ObjectStore, object_server: ObjectServer
) -> None:
    decide(store)
    publish(store, KEYS[2], "v2")
    object_server.log.clear()
    assert decide(store) == ["fresh", "fresh", "stale", "fresh", "fresh", "fresh"]
    assert [target.rpartition("/")[2].split("?")[0] for target in reads(object_server)] == [
        "partition%25202.parquet"
    ]
    assert decide(store)[2] == "stale"
    assert reads(object_server) == []


def test_object_replaced_after_the_listing_is_remembered_as_read(
    store: ObjectStore, object_server: ObjectServer
) -> None:
    state = OutputState(store, "s")
    stored = publish(store, KEYS[0], "v2")
    state.look_at(KEYS)
    found = state.freshness(partition_of(KEYS[0], [])).file
    assert found is not None and (found.stored, found.facts.source_version) == (stored, "v2")
    object_server.log.clear()
    assert decide(store)[0] == "stale"
    assert reads(object_server) == []


def test_footers_of_another_output_are_not_used(
    store: ObjectStore, object_server: ObjectServer
) -> None:
    decide(store)
    other = open_bucket(object_server, path="other")
    for key in KEYS:
        publish(other, key)  # the same names, sizes and etags
    object_server.log.clear()
    assert decide(other) == ["fresh"] * len(KEYS)
    assert len(reads(object_server)) == len(KEYS)


TAG = 1000, "abc"


def test_files_that_are_no_longer_listed_are_forgotten() -> None:
    first = FooterMemory[str]("this")
    for name in "ab":
        first.remember(name, TAG, name)
    assert FooterMemory[str]("this").known({"a": TAG, "b": (1000, "other"), "c": TAG}) == {"a": "a"}
    first.forget_others({"a"})
    assert FooterMemory[str]("this").known(dict.fromkeys("ab", TAG)) == {"a": "a"}


def test_two_memory_stores_do_not_share_a_cache() -> None:
    for version in ("v1", "v2"):  # the same names, sizes and etags
        store = open_object_store("memory://")
        publish(store, "k", version)
        state = OutputState(store, "s")
        state.look_at(["k"])
        assert state.freshness(partition_of("k", [], version=version)).status == "fresh"


def test_store_that_is_down_raises_store_unavailable(
    store: ObjectStore, object_server: ObjectServer
) -> None:
    state = OutputState(store, "s")
    object_server.plan = always(Fault("status", 503), "GET")
    with pytest.raises(StoreUnavailable):
        state.look_at(KEYS)
