"""Change files lead from one version of a partition's rows to another, or are not used at all."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from surge_dagster.engine.files.facts import InvalidFile
from surge_dagster.engine.run import change_feed
from surge_dagster.engine.run.change_feed import (
    ChangeFeed,
    ChangeFiles,
    RowChanges,
    confirm_versions,
    confirmed_versions,
    write_changes,
)
from surge_dagster.engine.store.local_store import LocalStore
from tests.engine.feeds import facts_of

SPACE = "space"
FIRST, SECOND, THIRD, FOURTH = (letter * 32 for letter in "abcd")


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def write(
    store: LocalStore,
    before: str,
    after: str,
    changed: Sequence[str],
    deleted: Sequence[Any] = (),
    key: str = "p",
) -> None:
    """Write the change file of a partition."""
    columns = [pa.array(ids, pa.string()) for ids in (changed, deleted)]
    changes = RowChanges(columns[:1], columns[1], before)
    write_changes(store, facts_of(key, SPACE, {}, after), changes)


def names(store: LocalStore) -> set[str]:
    """Versions that change files lead to, by their first letters."""
    return {file.after[0] for file in ChangeFiles(store, SPACE)}


def test_chain_of_change_files_leads_from_one_version_to_a_later_one(store: LocalStore) -> None:
    write(store, FIRST, SECOND, ["1", "2"])
    write(store, SECOND, THIRD, [], ["9"])
    # of a run that died before it published, or of another partition
    write(store, FIRST, FOURTH, ["0"])
    files = ChangeFiles(store, SPACE)
    chain = files.chain(FIRST, THIRD)
    assert chain is not None
    read = [files.read(file).to_pylist() for file in chain]
    assert read == [["1", "2"], ["9"]]
    assert files.chain(THIRD, THIRD) == []
    assert files.chain(THIRD, SECOND) is None
    assert files.chain(FOURTH, THIRD) is None


@pytest.mark.parametrize("fault", ["cut off", "flipped", "renamed"])
def test_change_file_that_is_not_what_its_name_says_is_refused(
    store: LocalStore, fault: str
) -> None:
    write(store, FIRST, SECOND, list(map(str, range(50))))
    [path] = store.root.rglob("*.parquet")
    content = bytearray(path.read_bytes())
    if fault == "cut off":
        del content[-20:]
    if fault == "flipped":
        content[60] ^= 1
    path.write_bytes(content)
    if fault == "renamed":
        path = path.rename(path.with_name(path.name.replace("-50.", "-49.")))
    files = ChangeFiles(store, SPACE)
    [file] = files
    with pytest.raises(InvalidFile):
        files.read(file)


def test_change_files_are_removed_once_they_are_old(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store, FIRST, SECOND, ["0"])
    write(store, SECOND, THIRD, ["0"])
    feed = ChangeFeed()

    feed.end(store, SPACE)
    assert names(store) == {"b", "c"}

    later = time.time() + 7.1 * 24 * 3600
    monkeypatch.setattr(change_feed.time, "time", lambda: later)
    feed.end(store, SPACE)
    assert names(store) == set()


def test_feed_is_written_only_if_it_is_wanted_or_has_a_consumer(
    store: LocalStore,
) -> None:
    assert not ChangeFeed().begin(store, SPACE)
    assert ChangeFeed(always=True).begin(store, SPACE)
    confirm_versions(store, "another space", "shop", {})
    assert not ChangeFeed().begin(store, SPACE)
    confirm_versions(store, SPACE, "shop", {})
    assert ChangeFeed().begin(store, SPACE)


def test_confirmations_are_read_back_as_they_were_written(store: LocalStore) -> None:
    assert confirmed_versions(store, SPACE, "a/b") is None
    confirm_versions(store, SPACE, "a/b", {"p": FIRST, "q ü": SECOND})
    assert confirmed_versions(store, SPACE, "a/b") == {"p": FIRST, "q ü": SECOND}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"versions": 1}'])
def test_damaged_confirmations_count_as_none(store: LocalStore, content: str) -> None:
    confirm_versions(store, SPACE, "shop", {"p": FIRST})
    [path] = store.root.rglob("*.json")
    path.write_text(content)
    assert confirmed_versions(store, SPACE, "shop") is None
