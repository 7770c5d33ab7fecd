"""Reading published files back: those of a bucket together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from surge_dagster.engine.errors import StoreUnavailable, TransientError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.run.report import Failure
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.store import Store
from surge_dagster.orchestration import worklist as module
from surge_dagster.orchestration.worklist import read_back
from tests.small_catalogs import numbered_rows, partition_of

SPACE = cast(Space, None)  # nothing here looks at it


class Bucket:
    """A remote store; which one does not matter, since reading is replaced."""

    is_remote = True

    def until(self, over: threading.Event) -> Bucket:
        return self


def partition(key: str) -> Partition:
    return partition_of(key, numbered_rows(key, 1))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], str | None]], Store]:
    """Replaces the reading of a file by a function of the partition's key; gives a bucket to read
    from."""

    def replace(read: Callable[[str], str | None]) -> Store:
        monkeypatch.setattr(module, "difference", lambda partition, *_: read(partition.key))
        return cast(Store, Bucket())

    return replace


def test_files_of_a_bucket_are_read_together_and_each_has_its_answer(reads: Any) -> None:
    together = threading.Barrier(16, timeout=60)

    def read(key: str) -> str | None:
        if int(key) < 16:
            together.wait()
        if key == "4":
            raise TransientError("no answer")
        return "damaged" if key == "3" else None

    keys = [str(number) for number in range(64)]

    found = list(read_back([partition(key) for key in keys], reads(read), SPACE))

    failure = Failure("4", "no answer", transient=True)
    assert found == [None] * 3 + ["damaged", failure] + [None] * 59


@pytest.mark.parametrize("remote", [True, False])
def test_store_that_is_down_ends_the_reading(reads: Any, remote: bool) -> None:
    tried: list[str] = []

    def read(key: str) -> None:
        tried.append(key)
        if remote:
            threading.Event().wait(0.1)  # a bucket is tried several times
        raise StoreUnavailable("the store is down")

    store = reads(read)
    store.is_remote = remote
    with pytest.raises(StoreUnavailable, match="down"):
        list(read_back([partition(str(number)) for number in range(1_000)], store, SPACE))

    assert 1 <= len(tried) <= 64
