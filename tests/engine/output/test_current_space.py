"""The current space: readers keep the one that they opened, and of concurrent switches one wins."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.output.current_space import (
    CURRENT_FILE,
    CurrentSpace,
    SwitchedMeanwhile,
    keep_current,
    read_current,
    space_of_readers,
    write_current,
)
from surge_dagster.engine.output.spaces import claim_space
from surge_dagster.engine.readers.loading import open_embeddings
from surge_dagster.engine.store import open_store
from surge_dagster.engine.store.store import Store

SPACES = [*map(EncodingSpec.resolve, map(EncodingSpec, ("hash://16", "hash://24", "hash://8")))]
NAMES = [space.name for space in SPACES]


@pytest.fixture(params=["disk", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "disk":
        return open_store(tmp_path / "out")
    from tests.engine.store.object_server import open_bucket

    return open_bucket(request.getfixturevalue("object_server"))


def claim_all(store: Store) -> None:
    for space in SPACES:
        claim_space(store, space)


def test_without_a_current_space_only_a_single_one_is_read(store: Store) -> None:
    with pytest.raises(ConfigError, match="holds no embeddings"):
        space_of_readers(store)
    claim_space(store, SPACES[0])
    claim_space(store, SPACES[1])
    with pytest.raises(ConfigError, match=f"several spaces.*{NAMES[0]}, {NAMES[1]}"):
        space_of_readers(store)
    write_current(store, NAMES[1], seen=None)
    assert space_of_readers(store).name == NAMES[1]


def test_first_space_becomes_current_before_a_second_one_is_begun(store: Store) -> None:
    for beginning in (*SPACES, SPACES[1]):
        keep_current(store, beginning)
        claim_space(store, beginning)
    assert read_current(store) == CurrentSpace(NAMES[0])


@pytest.mark.parametrize("first", [True, False])
def test_one_of_several_concurrent_switches_wins_and_the_others_are_refused(
    store: Store, first: bool
) -> None:
    claim_all(store)
    seen = None if first else write_current(store, NAMES[0], seen=None)
    together = threading.Barrier(4)

    def write(name: str) -> CurrentSpace | None:
        together.wait(timeout=60)
        try:
            return write_current(store, name, seen=seen)
        except SwitchedMeanwhile:
            return None

    with ThreadPoolExecutor(4) as threads:
        [won] = filter(None, threads.map(write, [*NAMES, NAMES[1]]))
    assert read_current(store) == won
    assert (won.previous, won.number) == ((None, 1) if first else (NAMES[0], 2))


def test_space_that_is_current_again_does_not_match_its_first_time(store: Store) -> None:
    claim_all(store)
    x, y, z = NAMES
    first = write_current(store, x, seen=None)
    back = write_current(store, x, seen=write_current(store, y, seen=first))
    assert back == CurrentSpace(x, y, 3)
    with pytest.raises(SwitchedMeanwhile, match=f"{x!r} was made current"):
        write_current(store, z, seen=first)
    store.delete(CURRENT_FILE)
    with pytest.raises(SwitchedMeanwhile, match="was removed"):
        write_current(store, z, seen=back)


@pytest.mark.parametrize(
    ("text", "refusal"),
    [
        ("", "cannot be used"),
        ("[]", "cannot be used"),
        ('{"format": 2}', "cannot be used"),
        ('{"format": 1, "space": 3, "previous": null, "number": 1}', "cannot be used"),
        (
            '{"format": 1, "space": "x", "previous": null, "number": 1}',
            "names the space 'x', and the output holds h",
        ),
    ],
)
def test_damaged_or_missing_current_space_is_refused(
    tmp_path: Path, text: str, refusal: str
) -> None:
    store = open_store(tmp_path)
    space = claim_space(store, SPACES[0])
    (tmp_path / "current_space.json").write_text(text)
    with pytest.raises(ConfigError, match=f"current_space.json' {refusal}"):
        open_embeddings(store)
    assert open_embeddings(store, space.name).space.name == space.name
