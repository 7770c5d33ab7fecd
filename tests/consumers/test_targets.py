"""A table has the rows of the files after each hand-over, whatever happened before; the same for every target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surge_dagster.consumers.comparison import compare
from surge_dagster.consumers.lance import LanceTable
from surge_dagster.consumers.target import HandOver, Target
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.feed.changes import changes
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.output.spaces import claim_space
from tests.consumers.scripts import TEXTS, Follower, follow_a_script
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


def test_partition_that_cannot_be_handed_over_is_named_and_stops_no_other(follower: Follower) -> None:
    output = follower.output
    load(follower, "a", "b")
    before = output.expected()
    path = output.store.root / output.name("a")
    output.write("a", {"1": "never seen"})
    content = path.read_bytes()
    path.write_bytes(content[:200] + b"\xff" + content[201:])
    output.write("b", {"1": "one"})
    done = follower.hand_over()
    assert list(done.failures) == ["a"] and "partition 'a'" in str(done.failures["a"])
    assert follower.target.counts() == {"a": 10, "b": 1}
    assert follower.target.vectors("a", ["id-3"])["id-3"].tobytes() == before["a"]["id-3"][1]
    assert compare(done.feed, follower.target).wrong == {}
    path.write_bytes(content)
    assert follower.hand_over().failures == {}
    follower.assert_equal()


def test_table_that_was_dropped_is_loaded_again(follower: Follower) -> None:
    load(follower, "a")
    drop(follower.target)
    assert follower.hand_over().rows_sent == 10
    follower.assert_equal()


def test_table_has_vectors_of_the_current_space_alone_when_an_earlier_one_is_current_again(follower: Follower) -> None:
    output = follower.output
    first, others = output.space, {row: f"{text} for another model" for row, text in TEXTS.items()}
    second = claim_space(output.store, EncodingSpec("hash://8", document_prompt="passage: ").resolve())
    for space, texts in ((second, others), (first, TEXTS)):
        output.space = space
        output.rows.clear()
        output.write("a", texts)
        if space is first:
            output.write("b", TEXTS)
    rows = {first.name: {"a": dict(TEXTS), "b": dict(TEXTS)}, second.name: {"a": others}}
    for space in (first, second, first):
        output.rows = rows[space.name]
        follower = Follower(output, follower.target, space=space.name)
        follower.hand_over()
        follower.assert_equal()


def test_partitions_that_are_found_wrong_are_loaded_whole_by_the_next_hand_over(follower: Follower) -> None:
    load(follower, "a", "b")
    if isinstance(follower.target, LanceTable):
        table = follower.target._open()
        assert table is not None
        table.delete("partition = 'a' AND id = 'id-3'")
        table.add(table.search().where("partition = 'b'").limit(1).to_arrow().set_column(0, "partition", [["c"]]))
    else:
        run(follower.target, "DELETE FROM products WHERE partition = 'a' AND id = 'id-3'")
        run(follower.target, "INSERT INTO products SELECT 'c', id, text, embedding FROM products LIMIT 1")
    done = follower.hand_over()
    found = compare(done.feed, follower.target)
    assert set(found.wrong) == {"a", "c"}
    follower.target.forget(done.feed, found.wrong)
    assert follower.hand_over().rows_sent == 10
    follower.assert_equal()
    assert follower.hand_over().partitions == 0


@pytest.mark.parametrize("row", [{"name": "boots"}, {"partition": "x", "id": "1", "text": "", "embedding": [1.0] * 8}])
def test_table_with_rows_of_other_programs_is_refused_and_unchanged(follower: Follower, row: dict[str, Any]) -> None:
    follower.output.write("a", TEXTS)
    if isinstance(follower.target, LanceTable):
        follower.target._connect().create_table("products", [row])
    elif "id" in row:
        run(follower.target, "CREATE EXTENSION vector")
        run(follower.target, "CREATE TABLE products (partition text, id text, text text, embedding vector(8))")
        run(follower.target, "INSERT INTO products VALUES ('x', '1', '', '[1, 1, 1, 1, 1, 1, 1, 1]')")
    else:
        run(follower.target, "CREATE TABLE products (name text)")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"has rows that no hand-over put there|has no column"):
            follower.hand_over()
    assert "id" not in row or follower.target.counts() == {"x": 1}


def test_comparison_finds_missing_doubled_and_wrong_rows(follower: Follower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surge_dagster.consumers.comparison.random.getrandbits", lambda bits: 7)
    done = load(follower, "a", "b", "c", "d")
    spoiled: Any = Spoiled(follower.target)
    found = compare(done.feed, spoiled)
    assert found.wrong == {
        "a": "it has 9 rows; its file has 10",
        "e": "it has 1 rows; its file has 0",
        "b": found.wrong["b"],
        "c": found.wrong["c"],
    }
    assert "is missing" in found.wrong["b"] and "is not that of its file" in found.wrong["c"]
    assert found.vectors_compared == 12  # of each partition those of one row group


def test_comparison_names_a_file_that_was_damaged_since(follower: Follower) -> None:
    done = load(follower, "a")
    path = follower.output.store.root / follower.output.name("a")
    content = path.read_bytes()
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    path.write_bytes(content[:4] + bytes(footer - 4) + content[footer:])
    found = compare(changes(follower.output.store, since=done.feed.versions), follower.target)
    assert list(found.wrong) == ["a"] and "is damaged" in found.wrong["a"]


def test_column_that_the_table_lacks_is_refused_by_name(follower: Follower) -> None:
    load(follower, "a")
    follower.output.write("b", {1: "ids are numbers here"})  # pyright: ignore[reportArgumentType]
    follower.output.write("c", {"1": "one"})
    done = follower.hand_over()
    assert list(done.failures) == ["b"] and "column 'id' is of type int" in str(done.failures["b"])
    assert follower.target.counts() == {"a": 10, "c": 1}


class Spoiled:
    """A target in which rows are wrong."""

    def __init__(self, target: Target) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def counts(self) -> dict[str, int]:
        return self._target.counts() | {"a": 9, "e": 1}

    def vectors(self, partition: str, ids: list[object]) -> dict[object, np.ndarray]:
        found = self._target.vectors(partition, ids)
        if partition == "b":
            found.popitem()
        if partition == "c":
            found = {row: np.nextafter(vector, np.float32(2)) for row, vector in found.items()}
        return found


def drop(target: Target) -> None:
    if isinstance(target, LanceTable):
        target._connect().drop_table("products")
    else:
        run(target, "DROP TABLE products")


def run(target: Any, query: str) -> None:
    import psycopg

    with psycopg.connect(target._dsn, autocommit=True) as connection:
        connection.execute(query.encode())
