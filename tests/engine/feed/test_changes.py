"""A consumer that applies the change feed has the rows of the files, whatever it missed and
wherever it died."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_dagster.engine.errors import ConfigError, DataError, TransientError
from surge_dagster.engine.feed.changes import Sample
from tests.engine.feeds import Applied, Output, apply, hand_over
from tests.small_catalogs import make_unreadable

TEXTS = {f"id-{row}": f"text {row}" for row in range(10)}


@pytest.fixture
def output(tmp_path: Path) -> Output:
    return Output(tmp_path / "out")


def change_files(output: Output) -> list[Path]:
    return sorted(output.store.root.glob(".changes/*/rows/*.parquet"))


def test_new_consumer_gets_everything_and_then_only_what_changed(output: Output) -> None:
    output.write("a", TEXTS)
    output.write("b", {"1": "one"})
    output.write("empty", {})
    target: Applied = {}
    feed = output.feed()
    assert feed.is_new
    came = apply(feed, target)
    assert [op for op, partition, _ in came if partition == "a"] == ["clear"] + ["put"] * 10
    assert target == output.expected()
    feed.confirm()

    edited = {**TEXTS, "id-3": "edited", "new": "added"}
    del edited["id-7"]
    output.write("a", edited)
    feed = output.feed()
    assert not feed.is_new
    assert sorted(apply(feed, target)) == [
        ("delete", "a", "id-7"),
        ("put", "a", "id-3"),
        ("put", "a", "new"),
    ]
    assert target == output.expected()
    feed.confirm()
    assert apply(output.feed(), target) == []


def test_put_rows_state_whether_their_text_was_truncated(output: Output) -> None:
    output.write("a", {"1": "one", "2": "two"}, truncated=["2"])
    hand_over(output.feed(), {})
    output.write("a", {"2": "long", "3": "three"}, truncated=["2"])

    [partition] = output.feed()
    rows = [row for batch in partition for row in batch.to_pylist()]

    assert [(row["op"], row["id"], row["truncated"]) for row in rows] == [
        ("put", "2", True),
        ("put", "3", False),
        ("delete", "1", None),
    ]


@pytest.mark.parametrize("fault", ["removed", "damaged", "never written"])
def test_gap_in_the_change_files_gives_the_whole_partition(output: Output, fault: str) -> None:
    output.write("a", TEXTS)
    output.write("b", TEXTS)
    target: Applied = {}
    hand_over(output.feed(), target)
    output.write("a", {"id-0": "edited"}, with_changes=fault != "never written")
    for path in change_files(output):
        path.write_bytes(path.read_bytes()[:-9]) if fault == "damaged" else path.unlink()
    output.write("a", {"id-0": "edited", "last": "added"})
    came = apply(output.feed(), target)
    assert came == [("clear", "a", None), ("put", "a", "id-0"), ("put", "a", "last")]
    assert target == output.expected()


def test_what_was_not_read_to_its_end_is_not_confirmed(output: Output) -> None:
    output.write("a", TEXTS)
    output.write("b", TEXTS)
    feed = output.feed()
    first, second = feed
    list(first)
    next(iter(second))
    feed.confirm()
    assert [partition.partition for partition in output.feed()] == [second.partition]


def test_consumer_that_keeps_its_own_versions_needs_no_name(output: Output) -> None:
    output.write("a", TEXTS)
    feed = output.feed(None, since={})
    target: Applied = {}
    apply(feed, target)
    with pytest.raises(ConfigError, match="only a named consumer can confirm"):
        feed.confirm()
    output.write("a", {**TEXTS, "id-1": "edited"})
    again = output.feed(None, since=feed.versions)
    assert apply(again, target) == [("put", "a", "id-1")]
    assert again.versions == output.versions
    with pytest.raises(ConfigError, match="the consumer is missing"):
        output.feed(None)


def test_file_that_cannot_be_read_is_named_and_the_others_are_given(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("a", "b"):
        output.write(key, TEXTS)
    make_unreadable(monkeypatch, output.name("a"))
    feed = output.feed()
    unreadable, whole = feed
    with pytest.raises(TransientError, match=r"partition 'a': .*: Permission denied"):
        list(unreadable)
    assert sum(map(len, whole)) == 11
    feed.confirm()
    monkeypatch.undo()
    assert [partition.partition for partition in output.feed()] == ["a"]


def test_change_file_that_cannot_be_read_now_never_gives_a_whole_partition(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    output.write("a", TEXTS)
    hand_over(output.feed(), {})
    output.write("a", {**TEXTS, "id-1": "edited"})
    make_unreadable(monkeypatch, "/rows/")
    [partition] = output.feed()
    with pytest.raises(
        TransientError, match=r"partition 'a': .* could not be read: Permission denied"
    ):
        next(iter(partition))
    monkeypatch.undo()
    assert apply(output.feed(), {}) == [("put", "a", "id-1")]


def test_file_that_was_replaced_since_the_look_is_left_to_the_next_one(output: Output) -> None:
    output.write("a", TEXTS)
    feed = output.feed()
    output.write("a", {"1": "one"})
    [partition] = feed
    with pytest.raises(TransientError, match="Open them again"):
        list(partition)
    assert feed.versions == {"a": ""}


def test_files_are_those_that_the_consumer_has(output: Output) -> None:
    for key in ("a", "b"):
        output.write(key, TEXTS)
    feed = output.feed()
    first, _ = feed
    list(first)
    assert set(feed.files()) == {"a"}


@pytest.mark.parametrize(
    ("sample", "expected"),
    [(None, {"a": 9, "b": 9}), (Sample(rows=20, of_partition=2), {"a": 2, "b": 2})],
)
def test_vectors_are_those_of_the_files(
    output: Output, sample: Sample | None, expected: dict[str, int]
) -> None:
    for key in ("a", "b"):
        output.write(key, {f"id-{row}": f"text {row}" for row in range(9)})
    output.write("empty", {})
    feed = output.feed(None, since=output.versions)
    rows = output.expected()
    drawn: Counter[str] = Counter()

    for key, batch in feed.vectors(sample):
        assert isinstance(batch, pa.RecordBatch)
        for row in batch.to_pylist():  # pyright: ignore[reportAttributeAccessIssue]
            drawn[key] += 1
            _, vector = rows[key][row["id"]]
            assert np.array(row["embedding"], np.float32).tobytes() == vector
    assert drawn == expected


def test_sample_ends_once_it_has_enough_rows(output: Output) -> None:
    for key in "abcdefgh":
        output.write(key, {"1": "one", "2": "two"})
    feed = output.feed(None, since=output.versions)
    drawn = [batch for _, batch in feed.vectors(Sample(rows=5, of_partition=2))]
    assert len(drawn) == 3


def test_vectors_go_on_after_files_that_cannot_be_read(output: Output) -> None:
    for key in ("a", "damaged", "removed"):
        output.write(key, TEXTS)
    path = output.store.root / output.name("damaged")
    content = path.read_bytes()
    vectors = content.index(output.expected()["damaged"]["id-0"][1])
    path.write_bytes(content[:vectors] + bytes(16) + content[vectors + 16 :])
    feed = output.feed(None, since=output.versions)
    output.remove("removed")

    found = dict(feed.vectors())

    assert isinstance(found["a"], pa.RecordBatch)
    assert isinstance(found["damaged"], DataError)
    assert isinstance(found["removed"], TransientError)


IDS = st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=8)
STEP = st.one_of(
    st.tuples(st.just("write"), st.sampled_from("pq"), IDS, st.integers(0, 2)),
    st.tuples(st.just("remove"), st.sampled_from("pq")),
    st.tuples(st.just("lose a change file"), st.integers(0, 9)),
    st.tuples(st.just("hand over"), st.sampled_from(("one", "two")), st.booleans()),
)
STEPS = st.lists(STEP, max_size=20)


def apply_random_feeds(folder: Path, steps: list[tuple]) -> None:
    """Consumers look after any number of versions, and some die before they confirm; change files
    get lost."""
    output = Output(folder)
    targets: dict[str, Applied] = {"one": {}, "two": {}}
    for step in [*steps, ("hand over", "one", True), ("hand over", "two", True)]:
        match step:
            case ("write", key, ids, edition):
                output.write(
                    key, {row: f"{row} {edition * (place % 2)}" for place, row in enumerate(ids)}
                )
            case ("remove", key) if key in output.rows:
                output.remove(key)
            case ("lose a change file", number):
                for path in change_files(output)[number : number + 1]:
                    path.unlink()
            case ("hand over", consumer, confirms):
                feed = output.feed(consumer)
                apply(feed, targets[consumer])
                assert targets[consumer] == output.expected()
                if confirms:
                    feed.confirm()


@pytest.fixture(scope="module")
def unflushed() -> Iterator[None]:
    """Without waiting for the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.mark.parametrize("examples", [30, pytest.param(1000, marks=pytest.mark.soak)])
def test_applied_feeds_give_the_rows_of_the_files(
    tmp_path_factory: pytest.TempPathFactory, unflushed: None, examples: int
) -> None:
    @settings(max_examples=examples)
    @given(STEPS)
    def apply_all(steps: list[tuple]) -> None:
        apply_random_feeds(tmp_path_factory.mktemp("feed"), steps)

    apply_all()
