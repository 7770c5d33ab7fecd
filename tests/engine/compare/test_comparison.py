"""Which rows two spaces are compared on, and what the result rests on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from surge_dagster.engine.compare.comparison import compare
from surge_dagster.engine.compare.queries import Label, Query
from surge_dagster.engine.compare.report import Comparison
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import EncodingSpec, Space
from surge_dagster.engine.output.current_space import named_space
from surge_dagster.engine.sources.partition import Partition
from tests.engine.runs import Output, in_memory
from tests.small_catalogs import Rows, numbered_rows, row_batch_of
from tests.spaces import KEYS, ROWS, Spaces

FIRST = "hash://16"
SECOND = "hash://24"


_OPEN: dict[str, EncoderPool] = {}


@contextmanager
def open_pool(space: Space) -> Iterator[EncoderPool]:
    """A pool that encodes queries, which the other tests of this file use as well."""
    model = space.encoder_sha256
    if model not in _OPEN:
        _OPEN[model] = EncoderPool(space.loadable, task="query")
    yield _OPEN[model]


@pytest.fixture(scope="module", autouse=True)
def closed_pools() -> Iterator[None]:
    """Close the pools after the last test."""
    yield
    for pool in _OPEN.values():
        pool.close()
    _OPEN.clear()


@contextmanager
def no_pool(space: Space) -> Iterator[EncoderPool]:
    raise AssertionError("no model is needed")
    yield


def compared(made: Spaces, queries: Any, **options: Any) -> Comparison:
    return compare(made.store, made.of(FIRST), made.of(SECOND), queries, open_pool, **options)


def space_of(output: Output) -> Space:
    return named_space(output.store, output.space)


def embed_again(output: Output, catalog: Mapping[str, Rows], **options: Any) -> Space:
    """Embed a catalog into a second space of an output."""
    with EncoderPool(EncodingSpec(SECOND)) as pool:
        second = Output(pool, output.root)
        second.embed(in_memory(catalog), **options)
    return space_of(second)


def labelled(count: int) -> list[Query]:
    """Queries with the texts of rows of partition a, which are their relevant rows."""
    queries: list[Query] = []
    for row, (name, text) in enumerate(numbered_rows("a", count)):
        queries.append(Query(text, {Label("a", name): row + 2}))
    return queries


def test_row_with_the_text_of_the_query_is_found_in_both_spaces(three_spaces: Spaces) -> None:
    judged = compared(three_spaces, labelled(20)).judged

    assert judged is not None
    assert [(metric.name, metric.first, metric.second) for metric in judged.metrics] == [
        ("recall@10", 1, 1),
        ("MRR@10", 1, 1),
        ("nDCG@10", 1, 1),
    ]
    assert judged.verdict == "no difference can be seen with 20 queries"


def test_result_says_what_it_rests_on(three_spaces: Spaces) -> None:
    queries = [*labelled(10), Query("unknown", {Label("a", "none"): 99}), Query("no label")]

    found = compared(three_spaces, queries, k=3)

    assert found.queries == 12
    assert found.rows == ROWS * len(KEYS)
    assert found.partitions == len(KEYS)
    assert found.judged is not None
    assert found.judged.queries == 10
    assert found.judged.rows == 10
    assert found.judged.labels_unknown == 1
    assert found.judged.share_first == pytest.approx(0.1)
    assert "10 queries with 10 judged rows; 10.0% and 10.0% of the ten" in found.in_words()


def test_partition_of_only_one_space_does_not_count(three_spaces: Spaces, tmp_path: Path) -> None:
    made = three_spaces.copy_to(tmp_path, (FIRST, SECOND))
    made.file(SECOND, "b").unlink()

    found = compared(made, 5)

    assert found.partitions == 2
    assert found.partitions_left_out == 1
    assert found.rows == 2 * ROWS


def test_partition_with_other_rows_in_a_space_does_not_count(
    output: Output,
) -> None:
    output.embed(in_memory({"a": numbered_rows("a", 5), "b": numbered_rows("b", 5)}))
    second = embed_again(output, {"a": numbered_rows("a", 5), "b": numbered_rows("b", 6)})

    found = compare(output.store, space_of(output), second, 3, open_pool)

    assert found.partitions == 1
    assert found.partitions_left_out == 1


def test_spaces_without_rows_in_common_are_refused(three_spaces: Spaces, tmp_path: Path) -> None:
    made = three_spaces.copy_to(tmp_path, (FIRST, SECOND))
    for key in KEYS:
        made.file(SECOND, key).unlink()

    with pytest.raises(ConfigError, match="have no partition with the same rows"):
        compared(made, 5)


def test_id_of_several_partitions_needs_the_partition(three_spaces: Spaces) -> None:
    queries = [Query("text", {Label(None, "id-7"): 4})]

    with pytest.raises(ConfigError, match=r"line 4: the partitions 'a' and 'b' both.*'id-7'"):
        compared(three_spaces, queries)


def test_labels_that_name_no_row_at_all_are_refused(three_spaces: Spaces) -> None:
    queries = [Query("text", {Label("a", "9"): 2, Label("x", "id-1"): 3})]

    with pytest.raises(ConfigError, match="line 2: no row of both spaces has the id '9'"):
        compared(three_spaces, queries)


def with_unknown(count: int) -> list[Query]:
    return [Query(f"unknown {row}", {Label("a", f"typo{row}"): 50 + row}) for row in range(count)]


@pytest.mark.parametrize(
    ("queries", "problem"),
    [
        pytest.param(
            labelled(1), "expected 6 judged queries or more.*1 query with 1 judged row;", id="few"
        ),
        pytest.param(
            [*labelled(20), *with_unknown(3)],
            "rows of both spaces for 90% of the labels.*3 of 23 labels.*line 50: .*'typo0'",
            id="unknown",
        ),
        pytest.param(
            [Query(f"stray {row}", {Label("c", f"id-{row}"): row}) for row in range(6)],
            "the current space finds none of the judged rows",
            id="nothing found",
        ),
    ],
)
def test_labels_that_are_no_evidence_decide_no_switch(
    three_spaces: Spaces, queries: list[Query], problem: str
) -> None:
    found = compared(three_spaces, queries)

    with pytest.raises(ConfigError, match=problem):
        found.shortfall(0.9)


def test_few_unknown_labels_leave_the_others_to_decide(three_spaces: Spaces) -> None:
    found = compared(three_spaces, [*labelled(20), *with_unknown(2)])

    assert found.shortfall(0.99) == ""


def test_binary_ids_are_labelled_and_shown_in_hex(output: Output) -> None:
    rows: Rows = [(b"\x00\xff%d" % row, f"text {row}") for row in range(3)]
    batch = row_batch_of(rows, pa.binary())
    output.embed([Partition("a", "v1", lambda: iter([batch]), lambda: "v1")])
    space = space_of(output)

    found = compare(
        output.store, space, space, [Query("text 1", {Label("a", "00ff31"): 2})], open_pool
    )

    assert found.judged is not None
    assert found.judged.ndcg.first == 1
    assert found.differing[0].first[0].endswith(" a 00ff31 text 1")


def test_rows_with_the_same_text_count_once(output: Output) -> None:
    rows: Rows = [("1", "same"), ("2", "same"), ("3", "other")]
    output.embed(in_memory({"a": rows}))
    space = space_of(output)
    queries = [Query("same", {Label("a", "2"): 2})]

    found = compare(output.store, space, space, queries, open_pool)

    assert found.judged is not None
    assert found.judged.ndcg.first == 1
    assert len(found.differing[0].first) == 2


def test_drawn_row_is_no_result_of_its_own_text(three_spaces: Spaces) -> None:
    space = three_spaces.of(FIRST)

    found = compare(three_spaces.store, space, space, 200, no_pool)

    assert found.queries == ROWS * len(KEYS)
    for query in found.differing:
        assert not any(query.text in row for row in query.first)


def test_texts_are_shown_as_one_short_line(output: Output) -> None:
    text = "a long\ntext " * 50
    output.embed(in_memory({"a": [("1", text), ("2", text + "x")]}))
    space = space_of(output)

    [one, _] = compare(output.store, space, space, 2, no_pool).differing

    assert one.text == ("a long text " * 9)[:100]
    assert one.first[0].endswith(one.text)


def test_same_rows_are_drawn_each_time(three_spaces: Spaces) -> None:
    assert compared(three_spaces, 20) == compared(three_spaces, 20)


def test_small_blocks_give_the_same_result(
    three_spaces: Spaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = compared(three_spaces, labelled(20))
    module = "surge_dagster.engine.compare.comparison"
    monkeypatch.setattr(f"{module}._BLOCK_BYTES", 8 * (20 + 24) * 7)

    assert compared(three_spaces, labelled(20)).judged == whole.judged


def test_texts_are_drawn_only_from_files_that_have_them(output: Output) -> None:
    rows = {"a": numbered_rows("a", 5)}
    output.embed(in_memory(rows), include_text=False)
    second = embed_again(output, rows, include_text=False)

    with pytest.raises(ConfigError, match="have no texts to draw queries from"):
        compare(output.store, space_of(output), second, 3, open_pool)


def test_progress_counts_the_rows_of_both_spaces(three_spaces: Spaces) -> None:
    seen: list[tuple[int, int | None]] = []

    compared(three_spaces, 5, progress=lambda done, total: seen.append((done, total)))

    assert seen[-1] == (2 * ROWS * len(KEYS), 2 * ROWS * len(KEYS))
