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

SPECS = [EncodingSpec(f"hash://{d}") for d in (16, 24, 8)]


@pytest.fixture(params=["disk", "bucket"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "disk":
        return open_store(tmp_path / "out")
    from tests.engine.store.object_server import open_bucket

    return open_bucket(request.getfixturevalue("object_server"))


def test_without_a_current_space_only_a_single_one_is_read(store: Store) -> None:
    with pytest.raises(ConfigError, match="holds no embeddings"):
        space_of_readers(store)
    first, second = (claim_space(store, spec.resolve()) for spec in SPECS[:2])
    with pytest.raises(ConfigError, match=f"several spaces.*{first.name}, {second.name}"):
        space_of_readers(store)
    write_current(store, second.name, seen=None)
    assert space_of_readers(store).name == second.name


def test_first_space_becomes_current_before_a_second_one_is_begun(store: Store) -> None:
    first, second, third = (spec.resolve() for spec in SPECS)
    for beginning in (first, second, third, second):
        keep_current(store, beginning)
        claim_space(store, beginning)
    assert read_current(store) == CurrentSpace(first.name)


@pytest.mark.parametrize("first", [True, False])
def test_one_of_several_concurrent_switches_wins_and_the_others_are_refused(
    store: Store, first: bool
) -> None:
    spaces = [claim_space(store, spec.resolve()).name for spec in SPECS]
    seen = None if first else write_current(store, spaces[0], seen=None)
    together = threading.Barrier(4)

    def write(name: str) -> CurrentSpace | None:
        together.wait(timeout=60)
        try:
            return write_current(store, name, seen=seen)
        except SwitchedMeanwhile:
            return None

    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(write, [*spaces, spaces[1]]))
    [won] = [result for result in results if result]
    assert read_current(store) == won
    assert (won.previous, won.number) == ((None, 1) if first else (spaces[0], 2))


def test_space_that_is_current_again_does_not_match_its_first_time(store: Store) -> None:
    x, y, z = (claim_space(store, spec.resolve()).name for spec in SPECS)
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
    space = claim_space(store, SPECS[0].resolve())
    (tmp_path / "current_space.json").write_text(text)
    with pytest.raises(ConfigError, match=f"current_space.json' {refusal}"):
        open_embeddings(store)
    assert open_embeddings(store, space.name).space.name == space.name
