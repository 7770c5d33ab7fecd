"""Only a complete and verified space becomes the current one; otherwise nothing changes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from surge_dagster.engine.errors import ConfigError, TransientError
from surge_dagster.engine.output.current_space import CurrentSpace, SwitchedMeanwhile, read_current
from surge_dagster.engine.sources.partition import Partition, Source
from surge_dagster.engine.verify.verification import SwitchRefused, switch_space
from tests.small_catalogs import (
    FailingStore,
    Rows,
    numbered_rows,
    partition_folder,
    write_partition,
)
from tests.spaces import KEYS, ROWS, Spaces


@pytest.fixture
def made(three_spaces: Spaces, tmp_path: Path) -> Spaces:
    return three_spaces.copy_to(tmp_path)


def test_complete_space_becomes_current_and_can_be_switched_back(made: Spaces) -> None:
    first, second, _ = made.names()
    assert switch_space(made.source, made.store, made.of("hash://16")).current == CurrentSpace(
        first
    )
    switched = switch_space(made.source, made.store, made.of("hash://24"))
    assert switched.current == CurrentSpace(second, first, 2)
    assert switched.changed
    assert switched.partitions == len(KEYS)
    assert switched.rows == ROWS * len(KEYS)
    again = switch_space(made.source, made.store, made.of("hash://24"))
    assert again.current == switched.current
    assert not again.changed
    back = switch_space(made.source, made.store, made.of("hash://16"))
    assert read_current(made.store) == back.current == CurrentSpace(first, second, 3)


def change_the_source(made: Spaces) -> None:
    write_partition(made.root / "catalog", "b", numbered_rows("b", ROWS + 1), version="v2")


def flip_a_bit(made: Spaces) -> None:
    path = made.file("hash://24", "b")
    content = bytearray(path.read_bytes())
    content[600] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "key", "kind"),
    [
        (lambda made: made.file("hash://24", "b").unlink(), "b", "missing"),
        (change_the_source, "b", "stale"),
        (lambda made: os.truncate(made.file("hash://24", "b"), 1000), "b", "missing"),
        (flip_a_bit, "b", "damaged"),
        (
            lambda made: shutil.copy(made.file("hash://16", "b"), made.file("hash://24", "b")),
            "b",
            "space",
        ),
    ],
)
def test_incomplete_space_is_refused_with_the_key_of_the_partition(
    made: Spaces, spoil: Callable[[Spaces], object], key: str, kind: str
) -> None:
    before = switch_space(made.source, made.store, made.of("hash://16")).current
    spoil(made)
    with pytest.raises(SwitchRefused, match=f"1 {kind}: '{key}'") as refused:
        switch_space(made.source, made.store, made.of("hash://24"))
    assert [(found.key, found.kind) for found in refused.value.violations] == [(key, kind)]
    assert read_current(made.store) == before


@pytest.fixture
def current(made: Spaces) -> Spaces:
    """Three spaces, of which that of hash://16 is current."""
    switch_space(made.source, made.store, made.of("hash://16"))
    return made


@pytest.mark.parametrize("rows", [[("x", None)], numbered_rows("d", 3)], ids=["bad", "new"])
def test_partition_that_the_current_space_lacks_too_does_not_block_a_switch(
    current: Spaces, rows: Rows
) -> None:
    write_partition(current.root / "catalog", "d", rows)

    switched = switch_space(current.source, current.store, current.of("hash://24"))

    assert switched.changed
    assert switched.partitions == len(KEYS)


def test_damaged_file_of_a_removed_partition_is_refused_with_a_remedy(current: Spaces) -> None:
    shutil.rmtree(partition_folder(current.root / "catalog", "b"))
    os.truncate(current.file("hash://24", "b"), 1000)

    with pytest.raises(SwitchRefused, match=r"has this name\. Move the file away\. Remove damaged"):
        switch_space(current.source, current.store, current.of("hash://24"))


def test_unreadable_file_is_a_transient_error_and_not_a_refusal(made: Spaces) -> None:
    store = FailingStore(made.root / "output", "b")
    with pytest.raises(
        TransientError, match=r"1 of 3 partitions could not be read. .*Input/output error"
    ):
        switch_space(made.source, store, made.of("hash://24"))
    flip_a_bit(made)
    with pytest.raises(SwitchRefused, match="1 damaged, 1 unread"):
        switch_space(made.source, FailingStore(made.root / "output", "a"), made.of("hash://24"))
    assert not made.pointer.exists()


def test_refusal_counts_all_violations_and_names_the_first(made: Spaces) -> None:
    for number in range(30):
        write_partition(made.root / "catalog", f"n{number:02}", [("x", "y")])
    change_the_source(made)
    with pytest.raises(
        SwitchRefused, match=r"of 33 partitions, 30 missing, 1 stale: 'b'.* and 21 others"
    ) as refused:
        switch_space(made.source, made.store, made.of("hash://24"))
    assert refused.value.counts == {"missing": 30, "stale": 1}
    assert not made.pointer.exists()


def test_files_of_removed_partitions_do_not_count(
    made: Spaces,
) -> None:
    (made.root / "catalog" / "partition=b" / "part-0.parquet").unlink()
    (made.root / "catalog" / "partition=b").rmdir()
    assert switch_space(made.source, made.store, made.of("hash://24")).partitions == len(KEYS) - 1
    with pytest.raises(ConfigError, match="no partitions"):
        switch_space(Watched(made.source, lambda: None, first=0), made.store, made.of("hash://16"))


@dataclass
class Watched:
    """A source with an action at its second listing, which is during the verification."""

    source: Source
    then: Callable[[], object]
    first: int | None = None
    listings: int = 0

    @property
    def url(self) -> str:
        return self.source.url

    def __iter__(self) -> Iterator[Partition]:
        self.listings += 1
        if self.listings == 2:
            self.then()
        yield from list(self.source)[: self.first]


def test_later_of_two_concurrent_switches_is_refused(made: Spaces) -> None:
    first, _, third = made.names()
    switch_space(made.source, made.store, made.of("hash://16"))
    watched = Watched(
        made.source, lambda: switch_space(made.source, made.store, made.of("hash://8"))
    )
    with pytest.raises(SwitchedMeanwhile, match=f"{third!r} was made current .* meanwhile"):
        switch_space(watched, made.store, made.of("hash://24"))
    assert read_current(made.store) == CurrentSpace(third, first, 2)
