"""A table has the rows of the files after each hand-over, whatever happened before; the same for
every target."""

from __future__ import annotations

import copy
import random
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from surge_dagster.consumers import comparison
from surge_dagster.consumers.comparison import compare
from surge_dagster.consumers.lance import LanceTable
from surge_dagster.consumers.target import HandOver, Stored, Target
from surge_dagster.engine.errors import ConfigError, TransientError
from surge_dagster.engine.feed.changes import Changes, Sample, changes
from surge_dagster.engine.model.spec import EncodingSpec, Space
from surge_dagster.engine.output.spaces import claim_space
from surge_dagster.engine.run.change_feed import confirm_versions
from tests.consumers.scripts import TEXTS, Follower, follow_a_script
from tests.consumers.tables import table_of
from tests.engine.feeds import Output


@pytest.fixture
def follower(tmp_path: Path, target: Target) -> Follower:
    return Follower(Output(tmp_path / "out"), target)


def load(follower: Follower, *keys: str) -> HandOver:
    """Publish partitions with the same texts, and hand them over."""
    for key in keys:
        follower.output.write(key, TEXTS)
    return follower.hand_over()


def test_table_follows_edits_gaps_and_removed_partitions(follower: Follower) -> None:
    done = follow_a_script(follower)
    if isinstance(follower.target, LanceTable):
        assert [done[step].commits for step in done] == [1, 0, 2, 2]


def test_float16_vectors_reach_the_table_as_they_are(tmp_path: Path, target: Target) -> None:
    follow_a_script(Follower(Output(tmp_path / "out", "float16"), target))


def test_partition_that_cannot_be_handed_over_is_named_and_stops_no_other(
    follower: Follower,
) -> None:
    output = follower.output
    load(follower, "a", "b")
    before = output.expected()
    path = output.store.root / output.name("a")
    output.write("a", {"1": "never seen"})
    content = path.read_bytes()
    path.write_bytes(content[:200] + b"\xff" + content[201:])
    output.write("b", {"1": "one"})
    done = follower.hand_over()
    assert list(done.failures) == ["a"]
    assert "partition 'a'" in str(done.failures["a"])
    assert follower.target.counts() == {"a": 10, "b": 1}
    assert follower.target.vectors("a", ["id-3"])["id-3"].tobytes() == before["a"]["id-3"][1]
    assert compare(done.feed, follower.target).wrong == {}
    path.write_bytes(content)
    assert follower.hand_over().failures == {}
    follower.assert_equal()


def test_table_has_which_texts_were_truncated(follower: Follower) -> None:
    follower.output.write("a", {"1": "one", "2": "two"}, truncated=["2"])
    follower.hand_over()

    assert truncated(follower) == {"1": False, "2": True}


def test_table_without_a_column_gets_it_and_values_of_rows_that_change(follower: Follower) -> None:
    follower.output.write("a", {"1": "one", "2": "two"})
    follower.hand_over()
    table_of(follower.target).drop_column("truncated")
    follower.output.write("a", {"1": "one", "2": "long"}, truncated=["2"])

    assert follower.hand_over().failures == {}
    assert truncated(follower) == {"1": None, "2": True}


def truncated(follower: Follower) -> dict[str, bool | None]:
    """The column `truncated` by id; None also if the table does not have it."""
    return dict(table_of(follower.target).rows("id", "truncated"))


def test_table_that_was_dropped_is_loaded_again(follower: Follower) -> None:
    load(follower, "a")
    table_of(follower.target).drop()
    assert follower.hand_over().rows_sent == 10
    follower.assert_equal()


def test_wrong_partitions_are_loaded_whole_by_the_next_hand_over(
    follower: Follower,
) -> None:
    load(follower, "a", "b")
    table = table_of(follower.target)
    table.delete(("a", "id-3"))
    table.copy(("b", "id-1"), "c")
    assert set(compare(follower.hand_over().feed, follower.target).wrong) == {"a", "c"}
    assert follower.hand_over(judged=True).rows_sent == 0
    assert follower.hand_over().rows_sent == 10
    follower.assert_equal()
    assert follower.hand_over().partitions == 0


@pytest.mark.parametrize(("partition", "other"), ["ab", "ba"])
def test_row_under_another_partition_is_repaired_by_the_next_hand_over(
    follower: Follower, partition: str, other: str
) -> None:
    load(follower, "a", "b")
    table_of(follower.target).move((partition, "id-3"), other)

    follower.hand_over(judged=True)
    assert follower.hand_over(judged=True).rows_sent == 20

    follower.assert_equal()
    assert follower.hand_over(judged=True).partitions == 0


def test_doubled_row_of_lancedb_is_repaired_by_the_next_hand_over(tmp_path: Path) -> None:
    pytest.importorskip("lancedb", reason="not installed: the extra 'lancedb'")
    target = LanceTable(str(tmp_path / "lance"), "products")
    follower = Follower(Output(tmp_path / "out"), target)
    load(follower, "a", "b")
    table = target._open()
    assert table is not None
    table.add(table.search().where("partition = 'a' AND id = 'id-3'").to_arrow())
    assert target.counts() == {"a": 11, "b": 10}

    follower.hand_over(judged=True)
    assert follower.hand_over(judged=True).rows_sent == 10

    follower.assert_equal()
    assert follower.hand_over(judged=True).partitions == 0


def test_files_that_cannot_be_read_are_named_also_where_no_other_can(follower: Follower) -> None:
    output = follower.output
    for key in "ab":
        output.write(key, TEXTS)
        (output.store.root / output.name(key)).write_bytes(b"x")
    assert len(follower.hand_over(judged=True).failures) == 2
    for key in "ab":
        output.write(key, TEXTS, with_changes=False)
    assert follower.hand_over(judged=True).failures == {}
    follower.assert_equal()


def test_vectors_changed_by_hand_are_all_found_once_a_sample_has_one(
    follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "SAMPLE", Sample(rows=24, of_partition=4))
    load(follower, *"abcdef")
    table = table_of(follower.target)
    table.spoil(*((key, "id-3") for key in "abcde"))
    random.seed(2)  # draws one of them, and not all
    compared = compare(follower.hand_over().feed, follower.target)
    assert set(compared.wrong) == set("abcde")
    assert compared.vectors_compared == 60
    random.seed(2)
    assert follower.hand_over(judged=True).rows_sent == 0
    assert follower.hand_over().rows_sent == 50
    follower.assert_equal()
    table.spoil(("f", "id-3"))
    assert compare(follower.hand_over().feed, follower.target, everything=True).wrong.keys() == {
        "f"
    }


def test_what_is_stored_stays_where_judging_it_fails(follower: Follower) -> None:
    follower.output.write("a", TEXTS)

    def judge(feed: Changes, stored: Stored) -> list[str]:
        raise RuntimeError("it ends here")

    with pytest.raises(RuntimeError, match="it ends here"):
        follower.target.apply(partial(changes, follower.output.store, "shop"), judge)
    assert follower.hand_over(judged=True).rows_sent == 0
    follower.assert_equal()


def test_hand_over_that_judges_is_not_overtaken_by_one_of_another_space(follower: Follower) -> None:
    output = follower.output
    first = follower.output.space
    load(follower, "a", "b")
    rows = dict(output.rows)
    began = threading.Event()
    fill_another_space(output)
    second = Follower(output, copy.copy(follower.target), space=output.space.name)

    def overtake() -> None:
        began.set()
        second.hand_over()

    def judge(feed: Changes, stored: Stored) -> list[str]:
        other.start()
        began.wait()
        return ["b"]

    other = threading.Thread(target=overtake)
    follower.target.apply(partial(changes, output.store, "shop", space=first.name), judge)
    other.join()
    second.assert_equal()
    follow_again(follower, first, rows)


def test_table_of_another_space_is_loaded_anew_whatever_was_confirmed(follower: Follower) -> None:
    output = follower.output
    first = follower.output.space
    versions = load(follower, "a", "b").feed.versions
    rows = dict(follower.output.rows)
    fill_another_space(output)
    second = Follower(output, follower.target, space=output.space.name)
    second.hand_over()
    second.assert_equal()
    confirm_versions(output.store, first.name, "shop", versions)
    follow_again(follower, first, rows)


def test_table_of_another_catalog_or_output_is_refused_by_both_names(
    follower: Follower, tmp_path: Path
) -> None:
    load(follower, "a")
    elsewhere = Output(tmp_path / "elsewhere")
    elsewhere.write("b", TEXTS)
    for other in (
        Follower(follower.output, follower.target, "toys"),
        Follower(elsewhere, follower.target),
    ):
        with pytest.raises(ConfigError) as refused:
            other.hand_over()
        assert f"has the rows of 'shop' of {follower.output.store.url}" in str(refused.value)
        assert f"{other.consumer!r} of {other.output.store.url}" in str(refused.value)
    follower.assert_equal()


def test_rows_with_numbers_as_ids_follow_the_files(follower: Follower) -> None:
    least, greatest = -(2**63), 2**63 - 1
    steps: list[Any] = [
        {least: "least", greatest: "greatest", 1: "one"},
        {least: "another", 1: "one"},
        {1: "one"},
    ]
    for texts in steps:
        follower.output.write("a", texts, with_changes=False)
        follower.hand_over()
        follower.assert_equal()


@pytest.mark.parametrize(
    "row", [{"name": "boots"}, {"partition": "x", "id": "1", "text": "", "embedding": [1.0] * 8}]
)
def test_table_with_rows_of_other_programs_is_refused_and_unchanged(
    follower: Follower, row: dict[str, Any]
) -> None:
    follower.output.write("a", TEXTS)
    table_of(follower.target).make(row)
    for _ in range(2):
        with pytest.raises(
            ConfigError, match=r"has rows that no hand-over put there|has no column"
        ):
            follower.hand_over()
    assert "id" not in row or follower.target.counts() == {"x": 1}


def test_comparison_names_a_file_that_was_damaged_since(follower: Follower) -> None:
    done = load(follower, "a")
    path = follower.output.store.root / follower.output.name("a")
    content = path.read_bytes()
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    path.write_bytes(content[:4] + bytes(footer - 4) + content[footer:])
    found = compare(changes(follower.output.store, since=done.feed.versions), follower.target)
    assert list(found.wrong) == ["a"]
    assert "is damaged" in found.wrong["a"]


def test_errors_of_lancedb_name_the_table_and_can_be_tried_again(tmp_path: Path) -> None:
    pytest.importorskip("lancedb", reason="not installed: the extra 'lancedb'")
    follower = Follower(Output(tmp_path / "out"), LanceTable(str(tmp_path / "lance"), "products"))
    load(follower, "a")
    for path in (tmp_path / "lance" / "products.lance" / "_versions").iterdir():
        path.write_bytes(b"x")
    for ask in (
        follower.hand_over,
        follower.target.counts,
        lambda: follower.target.vectors("a", ["id-1"]),
    ):
        with pytest.raises(
            TransientError, match=r"the table 'products' of .*lance cannot be used: .*Run again"
        ):
            ask()


def test_column_that_the_table_lacks_is_refused_by_name(follower: Follower) -> None:
    load(follower, "a")
    follower.output.write("b", {1: "ids are numbers here"})  # pyright: ignore[reportArgumentType]
    follower.output.write("c", {"1": "one"})
    done = follower.hand_over()
    assert list(done.failures) == ["b"]
    assert "column 'id' is of type int" in str(done.failures["b"])
    assert follower.target.counts() == {"a": 10, "c": 1}


def follow_again(follower: Follower, first: Space, rows: dict[str, dict[str, str]]) -> None:
    """Follow the first space of the output, which has these rows."""
    follower.output.space = first
    follower.output.rows = rows
    again = Follower(follower.output, follower.target, space=first.name)
    again.hand_over()
    again.assert_equal()


def fill_another_space(output: Output) -> None:
    output.space = claim_space(
        output.store, EncodingSpec("hash://8", document_prompt="passage: ").resolve()
    )
    output.rows = {}
    output.write("a", {row: f"{text} for another model" for row, text in TEXTS.items()})
