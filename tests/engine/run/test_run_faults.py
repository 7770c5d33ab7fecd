"""Failures outside the data: disks, folders, encoders and programming errors. No run hangs or
leaves partial files."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

import numpy as np
import pytest

from surge_dagster.engine.encoder.arena import Slot
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.schedule import EncodeCall
from surge_dagster.engine.errors import ConfigError, EncoderError, StoreUnavailable, TransientError
from surge_dagster.engine.files.formats import file_name
from surge_dagster.engine.output.spaces import claim_space
from surge_dagster.engine.run.report import Event
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.store.local_store import LocalStore, LocalUpload, storage_errors
from tests.engine.faulty_disk import FaultyStore
from tests.engine.runs import (
    DoorPool,
    Output,
    Wrapped,
    busy_threads,
    failures,
    finish,
    in_memory,
    receipts,
    smallest_run_limit,
)
from tests.small_catalogs import (
    Rows,
    keys_of,
    make_unreadable,
    numbered_catalog,
    numbered_rows,
)

CATALOG: dict[str, Rows] = {
    "a": numbered_rows("a", 60),
    "big": numbered_rows("big", 350),
    "c": numbered_rows("c", 60),
    "d": numbered_rows("d", 60),
}


def file_too_large() -> None:
    raise OSError(errno.EFBIG, "File too large")


def no_permission() -> None:
    raise OSError(errno.EACCES, "Permission denied")


def bad_sector() -> None:
    raise OSError(errno.EIO, "Input/output error")


def folder_is_gone() -> None:
    raise OSError(errno.ENOENT, "No such file or directory")


def programming_error() -> None:
    raise AssertionError("a programming error")


@pytest.mark.parametrize("step", ["create", "write", "publish"])
@pytest.mark.parametrize("key", ["a", "big"])
@pytest.mark.parametrize("happen", [file_too_large, no_permission, bad_sector, folder_is_gone])
def test_one_unwritable_file_of_several_fails_only_its_partition(
    output: Output, step: str, key: str, happen: Callable[[], None]
) -> None:
    failure = output.failure(
        in_memory(CATALOG), store=FaultyStore(output.root, {key}, step, happen)
    )

    assert failure.key == key
    assert failure.transient
    assert "cannot write" in failure.reason
    assert output.keys() == CATALOG.keys() - {key}
    again = output.events(in_memory(CATALOG))
    assert keys_of(receipts(again, "encoded")) == [key]


def test_folder_at_the_name_of_a_file_fails_only_its_partition(output: Output) -> None:
    claim_space(output.store, output.pool.space)
    output.path("big").mkdir()
    failure = output.failure(in_memory(CATALOG))
    assert failure.key == "big"
    assert failure.transient
    assert "cannot write" in failure.reason


def test_file_that_cannot_be_read_now_is_not_encoded_again(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = list(in_memory(CATALOG))
    output.events(source)
    path = output.path("c")
    before = path.stat()
    make_unreadable(monkeypatch, str(path))
    run = output.run(source)
    events = finish(run)
    [failure] = failures(events)
    assert failure.key == "c"
    assert failure.transient
    assert str(path) in failure.reason
    assert "Permission denied" in failure.reason
    assert keys_of(receipts(events, "fresh")) == ["a", "big", "d"]
    assert run.report.texts_encoded == 0
    assert path.stat() == before


def test_folder_that_cannot_be_flushed_ends_the_run_without_receipts(output: Output) -> None:
    claim_space(output.store, output.pool.space)
    run = output.run(
        in_memory(CATALOG), store=FaultyStore(output.root, set(), "sync", file_too_large)
    )
    reported: list[Event] = []
    with pytest.raises(TransientError, match="cannot flush the folder"):
        reported.extend(run.events())
    assert not receipts(reported)
    assert not run.report.partitions_written


@pytest.mark.parametrize("step", ["create", "write", "publish", "published", "exit"])
@pytest.mark.parametrize("key", ["a", "big"])
def test_unexpected_error_while_publishing_ends_the_run(
    output: Output, step: str, key: str
) -> None:
    before = busy_threads()
    many = CATALOG | numbered_catalog([60] * 20)
    run = output.run(
        in_memory(many), store=FaultyStore(output.root, {key}, step, programming_error)
    )
    with pytest.raises(AssertionError, match="a programming error"):
        list(run.events())
    assert busy_threads() <= before
    assert output.keys() <= many.keys(), "no other file is left"
    output.events(in_memory(many))
    output.check_all(many)


def test_unexpected_error_ends_the_run_though_no_slot_is_released(output: Output) -> None:
    """All three SuperBatches wait to be flushed when the first one fails, so no fourth one can
    report the error."""
    claim_space(output.store, output.pool.space)
    waiting = threading.Event()

    class LosingStore(LocalStore):
        def sync(self, folder: str) -> None:
            assert waiting.wait(60)
            raise AssertionError("a programming error")

    run = output.run(
        in_memory(numbered_catalog([100] * 12)),
        pool=DoorPool(output.pool, waiting.set),
        store=LosingStore(output.root),
    )
    with pytest.raises(AssertionError, match="a programming error"):
        list(run.events())


class FailingPool(Wrapped):
    """A pool that fails at the n-th SuperBatch."""

    def __init__(self, pool: EncoderPool, at: int) -> None:
        super().__init__(pool)
        self._left = at

    def submit(self, slot: Slot, borders: np.ndarray, rows: np.ndarray | None = None) -> EncodeCall:
        self._left -= 1
        if self._left < 0:
            raise EncoderError("worker 0 died three times in a row: out of memory")
        return self.inner.submit(slot, borders, rows)


@pytest.mark.parametrize("at", [0, 1, 3])
def test_encoder_failure_ends_the_run_after_publishing_what_is_encoded(
    output: Output, at: int
) -> None:
    before = busy_threads()
    run = output.run(in_memory(CATALOG), pool=FailingPool(output.pool, at))
    with pytest.raises(EncoderError, match="out of memory"):
        list(run.events())
    assert busy_threads() <= before
    published = output.keys()
    assert published == ({"a"} if at else set())
    again = output.events(in_memory(CATALOG))
    assert set(keys_of(receipts(again, "encoded"))) == CATALOG.keys() - published


def test_thresholds_and_limit_are_checked_before_anything_is_written(output: Output) -> None:
    with pytest.raises(ConfigError, match="b_min"):
        list(output.run(in_memory(CATALOG), Thresholds(b_min=10, b_max=5)))
    assert smallest_run_limit(output) > 1
    assert not output.root.exists()


WHOLE_DISK = {
    "full": errno.ENOSPC,
    "quota": errno.EDQUOT,
    "read-only": errno.EROFS,
    "stale": errno.ESTALE,
}


@pytest.mark.parametrize("fault", WHOLE_DISK)
@pytest.mark.parametrize("rows", [3, 150])
def test_disk_that_refuses_every_write_ends_the_run(output: Output, fault: str, rows: int) -> None:
    """From the fifth file on: whole partitions and split ones."""
    catalog = numbered_catalog([rows] * 100)
    run = output.run(
        in_memory(catalog), Thresholds(b_min=30, b_max=60), store=RefusingStore(output.root, fault)
    )
    written: list[str] = []
    refusal = f"cannot write .*{os.strerror(WHOLE_DISK[fault])}.* published stays"
    with pytest.raises(StoreUnavailable, match=refusal):
        for receipt in run:
            written.append(receipt.key)
    assert run.report.texts_encoded < len(catalog) * rows / 2
    assert output.keys() == set(written)
    again = output.events(in_memory(catalog))
    assert set(keys_of(receipts(again, "encoded"))) == catalog.keys() - set(written)


class RefusingStore(LocalStore):
    """A local disk that takes no file after the fourth."""

    def __init__(self, root: Path, fault: str) -> None:
        super().__init__(root)
        self._fault = fault
        self._files = 0

    def create(self, name: str) -> LocalUpload:
        self._files += name.endswith(".parquet")
        if self._files <= 4:
            return super().create(name)
        with storage_errors(self.root / name):
            raise OSError(WHOLE_DISK[self._fault], "")


def test_receipts_are_reported_after_the_folder_was_flushed(output: Output) -> None:
    durable: set[str] = set()  # names that survive a power cut

    class Recording(LocalStore):
        def sync(self, folder: str) -> None:
            listed = list(self.list(folder))
            super().sync(folder)
            for stored in listed:
                durable.add(stored.name)

        def until(self, over: threading.Event) -> Self:
            return self

    store = Recording(output.root)
    catalog = numbered_catalog([3] * 40)
    run = output.run(in_memory(catalog), Thresholds(b_min=30, b_max=60), store=store)
    reported: set[str] = set()
    for receipt in run:
        assert file_name(output.space, receipt.key) in durable
        reported.add(receipt.key)
    assert reported == catalog.keys()
