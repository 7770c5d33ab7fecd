"""Which partitions need work, decided from the files alone."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.files.facts import FileFacts
from surge_dagster.engine.files.formats import file_name
from surge_dagster.engine.output.freshness import OutputState, status_of
from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.engine.store.store import Store
from tests.engine.outputs import publish_two_rows
from tests.small_catalogs import partition_of


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    opened = LocalStore(tmp_path / "out")
    opened.prepare("s")
    return opened


def publish(store: LocalStore, key: str, **options: Any) -> Path:
    return store.root / publish_two_rows(store, key, **options).name


def status(store: Store, key: str = "k", version: str = "v1") -> str:
    return OutputState(store, "s").freshness(partition_of(key, [], version=version)).status


def test_status_follows_from_the_version_of_the_file(
    store: LocalStore,
) -> None:
    assert status(store) == "missing", "in a space without files"
    publish(store, "k")
    assert status(store) == "fresh"
    assert status(store, version="v2") == "stale"
    assert status(store, "j") == "missing"


@pytest.mark.parametrize(
    ("version", "rows_version", "expected"),
    [("v1", None, "retry"), ("v2", None, "stale"), ("v1", "", "fresh")],
    ids=["of the source", "of another source version", "of a parent's file"],
)
def test_file_with_transient_rows_is_tried_again(
    version: str, rows_version: str | None, expected: str
) -> None:
    facts = FileFacts("k", "s", "m", "fp32", "v1", "", "", 2, 4, 0, transient_rows=1)

    assert status_of(facts, "s", "k", version, rows_version) == expected


def test_refused_file_is_missing_until_another_one_takes_its_place(store: LocalStore) -> None:
    publish(store, "k")
    outputs = OutputState(store, "s")
    partition = partition_of("k", [])
    file = outputs.freshness(partition).file
    assert file is not None
    outputs.refuse(file, "its texts differ")
    outputs.refresh()
    assert outputs.freshness(partition).status == "missing"

    publish(store, "k")
    outputs.refresh()
    assert outputs.freshness(partition).status == "fresh"


@pytest.mark.parametrize("damage", ["truncated", "empty", "not parquet", "foreign parquet"])
def test_file_that_is_not_valid_counts_as_missing(store: LocalStore, damage: str) -> None:
    path = publish(store, "k")
    content = path.read_bytes()
    if damage == "foreign parquet":
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"id": ["a"]}), path)
    else:
        path.write_bytes(
            {"truncated": content[:-20], "empty": b"", "not parquet": b"x" * 100}[damage]
        )
    assert status(store) == "missing"
    assert list(OutputState(store, "s").files()) == ["s/k.parquet"]


def test_file_of_another_space_is_foreign_for_any_partition(store: LocalStore) -> None:
    publish(store, "k", space="other")
    assert status(store) == "foreign"
    publish(store, "elsewhere", space="other", place=file_name("s", "j"))
    assert status(store, "j") == "foreign"


def test_file_of_another_partition_counts_as_missing(store: LocalStore) -> None:
    path = publish(store, "k")
    shutil.copy(path, store.root / file_name("s", "j"))
    assert status(store, "j") == "missing"
    assert status(store, "k") == "fresh"


def test_long_keys_are_distinguished_by_the_facts_of_their_files(store: LocalStore) -> None:
    publish(store, "x" * 300)
    assert status(store, "x" * 300) == "fresh"
    assert status(store, "x" * 301) == "missing"


def test_state_does_not_change_until_it_is_refreshed(
    store: LocalStore,
) -> None:
    state = OutputState(store, "s")
    path = publish(store, "k")
    assert state.freshness(partition_of("k", [])).status == "missing"
    state.refresh()
    assert state.freshness(partition_of("k", [])).status == "fresh"
    publish(store, "k", version="v2")
    assert status(store) == "stale"
    path.unlink()
    assert status(store) == "missing"


def overwrite(path: Path, content: bytes, *, modified_ns: int) -> None:
    path.write_bytes(content)
    os.utime(path, ns=(modified_ns, modified_ns))


def test_file_replaced_within_the_resolution_of_the_clock_is_read_again(store: LocalStore) -> None:
    other = publish(store, "k", version="v2").read_bytes()
    # later than any listing of this test
    path, modified = publish(store, "k"), time.time_ns() + 3600 * 10**9
    overwrite(path, path.read_bytes(), modified_ns=modified)
    assert status(store) == "fresh"
    assert len(other) == path.stat().st_size
    overwrite(path, other, modified_ns=modified)
    assert status(store) == "stale"


def test_unreadable_file_is_named_and_neither_fresh_nor_missing(store: LocalStore) -> None:
    path = publish(store, "k")
    publish(store, "j")
    state = OutputState(store, "s")
    path.unlink()
    path.mkdir()  # an error of the disk that a test can cause
    unread = state.freshness(partition_of("k", []))
    assert (unread.status, unread.file) == ("unread", None)
    assert isinstance(unread.error, TransientError) and unread.error.key == "k"
    assert re.search(rf"partition 'k': .*{path}.*Is a directory", str(unread.error))
    assert state.freshness(partition_of("j", [])).status == "fresh"
    path.rmdir()
    state.refresh()
    assert state.freshness(partition_of("k", [])).status == "missing"


def test_name_is_as_listed_only_if_the_store_still_has_it(
    store: LocalStore,
) -> None:
    for key in ("same", "replaced", "unread", "deleted"):
        os.utime(publish(store, key), ns=(0, 0))
    state = OutputState(store, "s")
    publish(store, "replaced")
    publish(store, "added")
    (store.root / file_name("s", "deleted")).unlink()
    (unread := store.root / file_name("s", "unread")).rename(hidden := store.root / "hidden")
    unread.mkdir()
    state.files(["unread"])
    unread.rmdir()
    hidden.rename(unread)
    as_listed = {
        key
        for key in ("same", "replaced", "unread", "deleted", "added", "none")
        if state.is_as_listed(file_name("s", key))
    }
    assert as_listed == {"same", "none"}
