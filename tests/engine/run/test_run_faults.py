"""Failures outside the data: disks, folders, encoders and programming errors. No run hangs or
leaves partial files."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from surge_dagster.engine.encoder.arena import Slot
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.schedule import EncodeCall
from surge_dagster.engine.errors import ConfigError, EncoderError, StoreUnavailable, TransientError
from surge_dagster.engine.files.formats import file_name
from surge_dagster.engine.output.spaces import claim_space
from surge_dagster.engine.run.report import Event, Receipt
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.store.local_store import LocalStore, LocalUpload, storage_errors
from tests.engine.faulty_disk import FaultyStore
from tests.engine.runs import (
    DoorPool,
    busy_threads,
    failures,
    finish,
    in_memory,
    make_run,
    receipts,
    smallest_run_limit,
)
from tests.small_catalogs import (
    Rows,
    assert_embedded,
    keys_of,
    numbered_rows,
    published_files,
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
    hash_pool: EncoderPool, tmp_path: Path, step: str, key: str, happen: Callable[[], None]
) -> None:
    run = make_run(hash_pool, in_memory(CATALOG), FaultyStore(tmp_path, {key}, step, happen))

    [failure] = failures(finish(run))

    assert failure.key == key
    assert failure.transient
    assert "cannot write" in failure.reason
    others = CATALOG.keys() - {key}
    assert published_files(tmp_path, run.space.name) == {f"{other}.parquet" for other in others}
    again = make_run(hash_pool, in_memory(CATALOG), tmp_path)
    assert keys_of(receipts(finish(again), "encoded")) == [key]


@pytest.mark.parametrize("key", ["a", "big"])
def test_folder_at_the_name_of_a_file_fails_only_its_partition(
    hash_pool: EncoderPool, tmp_path: Path, key: str
) -> None:
    claim_space(LocalStore(tmp_path), hash_pool.space)
    run = make_run(hash_pool, in_memory(CATALOG), tmp_path)
    (tmp_path / file_name(run.space.name, key)).mkdir()
    [failure] = failures(finish(run))
    assert failure.key == key
    assert failure.transient
    assert "cannot write" in failure.reason
    assert published_files(tmp_path, run.space.name) == {f"{name}.parquet" for name in CATALOG}


def test_file_that_cannot_be_read_now_is_not_encoded_again(
    hash_pool: EncoderPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    source = list(in_memory(CATALOG))
    finish(make_run(hash_pool, source, output))
    path = output / file_name(hash_pool.space.name, "c")
    before = path.stat()
    opened = open

    def bad_sector(name: Any, *arguments: Any, **options: Any) -> Any:
        if str(name) == str(path):
            raise OSError(errno.EIO, "Input/output error", name)
        return opened(name, *arguments, **options)

    monkeypatch.setattr("builtins.open", bad_sector)
    run = make_run(hash_pool, source, output)
    events = finish(run)
    assert keys_of(failures(events)) == ["c"]
    assert failures(events)[0].transient
    assert str(path) in failures(events)[0].reason
    assert "Input/output error" in failures(events)[0].reason
    assert keys_of(receipts(events, "fresh")) == ["a", "big", "d"]
    assert run.report.texts_encoded == 0
    assert path.stat() == before


def test_folder_that_cannot_be_flushed_ends_the_run_without_receipts(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    claim_space(LocalStore(tmp_path), hash_pool.space)
    run = make_run(
        hash_pool, in_memory(CATALOG), FaultyStore(tmp_path, set(), "sync", file_too_large)
    )
    reported: list[Event] = []
    with pytest.raises(TransientError, match="cannot flush the folder"):
        reported.extend(run.events())
    assert not receipts(reported)
    assert not run.report.partitions_written


@pytest.mark.parametrize("step", ["create", "write", "publish", "published", "exit"])
@pytest.mark.parametrize("key", ["a", "big"])
def test_unexpected_error_while_publishing_ends_the_run(
    hash_pool: EncoderPool, tmp_path: Path, step: str, key: str
) -> None:
    before = busy_threads()
    many = CATALOG | {f"later {n}": numbered_rows(f"later{n}", 60) for n in range(20)}
    run = make_run(
        hash_pool, in_memory(many), FaultyStore(tmp_path, {key}, step, programming_error)
    )
    with pytest.raises(AssertionError, match="a programming error"):
        list(run.events())
    assert busy_threads() <= before
    assert all(name.endswith(".parquet") for name in published_files(tmp_path, run.space.name))
    finish(make_run(hash_pool, in_memory(many), tmp_path))
    for name, rows in many.items():
        assert_embedded(tmp_path, run.space.name, name, rows)


def test_unexpected_error_ends_the_run_though_no_slot_is_released(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    """All three SuperBatches wait to be flushed when the first one fails, so no fourth one can
    report the error."""
    claim_space(LocalStore(tmp_path), hash_pool.space)
    waiting = threading.Event()

    class LosingStore(LocalStore):
        def sync(self, folder: str) -> None:
            assert waiting.wait(60)
            raise AssertionError("a programming error")

    run = make_run(
        DoorPool(hash_pool, waiting.set),
        in_memory({f"p{n}": numbered_rows(f"p{n}", 100) for n in range(12)}),
        LosingStore(tmp_path),
    )
    with pytest.raises(AssertionError, match="a programming error"):
        list(run.events())


class FailingPool:
    """A pool that fails at the n-th SuperBatch."""

    def __init__(self, pool: EncoderPool, at: int) -> None:
        self._pool = pool
        self._left = at

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def submit(self, slot: Slot, borders: np.ndarray, rows: np.ndarray | None = None) -> EncodeCall:
        self._left -= 1
        if self._left < 0:
            raise EncoderError("worker 0 died three times in a row: out of memory")
        return self._pool.submit(slot, borders, rows)


@pytest.mark.parametrize("at", [0, 1, 3])
def test_encoder_failure_ends_the_run_after_publishing_what_is_encoded(
    hash_pool: EncoderPool, tmp_path: Path, at: int
) -> None:
    before = busy_threads()
    run = make_run(FailingPool(hash_pool, at), in_memory(CATALOG), tmp_path)
    with pytest.raises(EncoderError, match="out of memory"):
        list(run.events())
    assert busy_threads() <= before
    assert published_files(tmp_path, run.space.name) == ({"a.parquet"} if at else set())
    again = make_run(hash_pool, in_memory(CATALOG), tmp_path)
    assert keys_of(receipts(finish(again), "encoded")) == sorted(
        CATALOG.keys() - ({"a"} if at else set())
    )


def test_thresholds_and_limit_are_checked_before_anything_is_written(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="b_min"):
        list(make_run(hash_pool, in_memory(CATALOG), tmp_path / "o", Thresholds(b_min=10, b_max=5)))
    assert smallest_run_limit(hash_pool, tmp_path / "o") > 1
    assert not (tmp_path / "o").exists()


TINY: dict[str, Rows] = {f"p{n:02}": numbered_rows(f"p{n:02}", 3) for n in range(40)}


WHOLE_DISK = {
    "full": errno.ENOSPC,
    "quota": errno.EDQUOT,
    "read-only": errno.EROFS,
    "stale": errno.ESTALE,
}


@pytest.mark.parametrize("fault", WHOLE_DISK)
@pytest.mark.parametrize("rows", [3, 150])
def test_disk_that_refuses_every_write_ends_the_run(
    hash_pool: EncoderPool, tmp_path: Path, fault: str, rows: int
) -> None:
    """From the fifth file on: whole partitions and split ones."""
    catalog = {f"p{n:03}": numbered_rows(f"p{n:03}", rows) for n in range(100)}
    run = make_run(
        hash_pool,
        in_memory(catalog),
        RefusingStore(tmp_path / "o", fault),
        Thresholds(b_min=30, b_max=60),
    )
    written: list[str] = []
    with pytest.raises(
        StoreUnavailable,
        match=f"cannot write .*{os.strerror(WHOLE_DISK[fault])}.* published stays",
    ):
        for event in run.events():
            if isinstance(event, Receipt):
                written.append(event.key)
    assert run.report.texts_encoded < len(catalog) * rows / 2
    assert published_files(tmp_path / "o", run.space.name) == {f"{key}.parquet" for key in written}
    again = make_run(hash_pool, in_memory(catalog), tmp_path / "o")
    assert set(keys_of(receipts(finish(again), "encoded"))) == catalog.keys() - set(written)


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


def test_receipts_are_reported_after_the_folder_was_flushed(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    durable: set[str] = set()  # names that survive a power cut

    class Recording(LocalStore):
        def sync(self, folder: str) -> None:
            names = {stored.name for stored in self.list(folder)}
            super().sync(folder)
            durable.update(names)

        def until(self, over: threading.Event) -> Self:
            return self

    store = Recording(tmp_path)
    run = make_run(hash_pool, in_memory(TINY), store, Thresholds(b_min=30, b_max=60))
    reported = 0
    for event in run.events():
        if isinstance(event, Receipt):
            assert file_name(run.space.name, event.key) in durable
            reported += 1
    assert reported == len(TINY)
