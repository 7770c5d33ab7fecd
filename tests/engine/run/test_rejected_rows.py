"""Rows that are set aside: they are counted and listed next to the file, which lacks them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.derived.derive import DeriveRun
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.output import rejected as lists
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.output.rejected import list_name, rejected_from, rejected_of_space
from surge_dagster.engine.output.spaces import list_spaces
from surge_dagster.engine.run.report import Receipt
from surge_dagster.engine.sources.partition import Partition, RejectedRow
from surge_dagster.engine.store import open_store
from tests.engine.runs import completed, failures, finish, make_run, receipts
from tests.engine.store.object_server import ObjectServer, open_bucket
from tests.small_catalogs import (
    Rows,
    assert_embedded,
    numbered_rows,
    partition_of,
    read_embedded,
    row_batch_of,
)

BAD = RejectedRow(2, "row 2 of a.csv", "id-2", "the text is null; every row needs one")
WITHOUT_ID = RejectedRow(9, "row 9 of a.csv", None, "the id is null; every row needs one")


def partition_with(
    key: str, rows: Rows, rejected: Sequence[RejectedRow], *, version: str = "v1"
) -> Partition:
    """A partition in memory of which rows are set aside, in two batches."""

    def read() -> Iterator[Any]:
        half = len(rows) // 2
        yield replace(row_batch_of(rows[:half]), rejected=tuple(rejected[:1]))
        yield replace(row_batch_of(rows[half:]), rejected=tuple(rejected[1:]))

    return Partition(key, version, read, lambda: version, rows=len(rows) + len(rejected))


def listed(root: Path, space: str, key: str) -> list[dict[str, Any]]:
    return pq.read_table(root / list_name(space, key)).to_pylist()


@pytest.mark.parametrize("rows", [20, 300], ids=["whole", "split"])
def test_rejected_rows_are_listed_next_to_the_file(
    hash_pool: EncoderPool, tmp_path: Path, rows: int
) -> None:
    good = numbered_rows("a/b", rows)

    run = completed(make_run(hash_pool, [partition_with("a/b", good, [BAD, WITHOUT_ID])], tmp_path))

    assert_embedded(tmp_path, run.space.name, "a/b", good)
    assert [RejectedRow(**row) for row in listed(tmp_path, run.space.name, "a/b")] == [
        BAD,
        WITHOUT_ID,
    ]


def test_list_names_its_partition_and_source_version(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    run = completed(make_run(hash_pool, [partition_with("ä", [], [BAD])], tmp_path))

    metadata = pq.read_metadata(tmp_path / list_name(run.space.name, "ä")).metadata
    assert metadata[b"surge.partition_key"].decode() == "ä"
    assert metadata[b"surge.source_version"] == b"v1"


def test_rejected_rows_are_counted(hash_pool: EncoderPool, tmp_path: Path) -> None:
    good = numbered_rows("p", 5)
    transient = replace(BAD, kind="transient")

    run = make_run(hash_pool, [partition_with("p", good, [transient, WITHOUT_ID])], tmp_path)
    [receipt] = receipts(finish(run))

    facts = read_embedded(tmp_path, run.space.name, "p").facts
    assert receipt.rejected_rows == facts.rejected_rows == 2
    assert receipt.transient_rows == facts.transient_rows == 1
    assert receipt.source_rows == 7
    assert run.report.as_dict()["rejected_rows"] == 2
    assert run.report.as_dict()["transient_rows"] == 1


def test_lists_are_no_output_files(hash_pool: EncoderPool, tmp_path: Path) -> None:
    run = completed(make_run(hash_pool, [partition_with("p", [], [BAD])], tmp_path))

    store = open_store(tmp_path)
    assert OutputState(store, run.space.name).names() == [f"{run.space.name}/p.parquet"]
    assert not [each.name for each in store.list("", deep=True) if ".rejected" in each.name]


def test_partition_without_any_good_row_is_published(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    run = make_run(hash_pool, [partition_with("unassigned", [], [BAD])], tmp_path)

    [receipt] = receipts(finish(run))

    assert receipt.rows == 0
    assert receipt.rejected_rows == 1


Change = Callable[[Partition], Partition]
# what the next run finds, and what it does with the file
NEXT: dict[str, tuple[Sequence[RejectedRow], str, str]] = {
    "nothing changed": ([BAD], "v1", "fresh"),
    "touched": ([BAD], "v2", "republished"),
    "another bad row": ([BAD, WITHOUT_ID], "v2", "republished"),
    "repaired": ([], "v2", "republished"),
}


@pytest.mark.parametrize("case", NEXT)
def test_next_run_leaves_the_list_that_belongs_to_its_file(
    hash_pool: EncoderPool, tmp_path: Path, case: str
) -> None:
    rejected, version, action = NEXT[case]
    good = numbered_rows("p", 5)
    completed(make_run(hash_pool, [partition_with("p", good, [BAD])], tmp_path))

    after = partition_with("p", good, rejected, version=version)
    run = make_run(hash_pool, [after], tmp_path)
    [receipt] = receipts(finish(run))

    assert receipt.action == action
    assert receipt.rejected_rows == len(rejected)
    path = tmp_path / list_name(run.space.name, "p")
    assert path.exists() == bool(rejected)
    if rejected:
        assert [RejectedRow(**row) for row in pq.read_table(path).to_pylist()] == rejected


def test_folder_of_lists_goes_with_the_last_one(hash_pool: EncoderPool, tmp_path: Path) -> None:
    completed(make_run(hash_pool, [partition_with("p", [], [BAD])], tmp_path))

    run = completed(make_run(hash_pool, [partition_of("p", [], version="v2")], tmp_path))

    assert not (tmp_path / run.space.name / ".rejected").exists()


def test_transient_rows_are_tried_by_the_next_run(hash_pool: EncoderPool, tmp_path: Path) -> None:
    good = numbered_rows("p", 5)
    transient = replace(BAD, kind="transient")
    completed(make_run(hash_pool, [partition_with("p", good[1:], [transient])], tmp_path))

    run = make_run(hash_pool, [partition_with("p", good, [])], tmp_path)
    [receipt] = receipts(finish(run))

    assert receipt.action == "encoded"
    assert (receipt.rows_reused, receipt.rows_encoded) == (4, 1)
    assert receipt.rejected_rows == 0


def test_only_the_first_rows_of_very_many_are_named(
    hash_pool: EncoderPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lists, "MOST_LISTED", 3)
    rejected = [replace(BAD, row=row) for row in range(10)]

    run = make_run(hash_pool, [partition_with("p", [], rejected)], tmp_path)
    [receipt] = receipts(finish(run))

    assert receipt.rejected_rows == 10
    assert [row["row"] for row in listed(tmp_path, run.space.name, "p")] == [0, 1, 2]


def test_rows_whose_texts_ended_workers_are_named_in_any_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lists, "MOST_LISTED", 1)
    builder = lists.RejectedRowsBuilder()

    builder.add([BAD, WITHOUT_ID])
    builder.add([WITHOUT_ID, replace(BAD, row=7, ended_worker=True)])
    rejected = builder.rejected()

    assert rejected.table.column("row").to_pylist() == [2, 7]
    assert rejected.rows == 4


def test_values_that_are_not_utf8_are_listed_with_escapes(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    odd = replace(BAD, id="\ud800", place="row 2 of \udcff.csv")

    run = completed(make_run(hash_pool, [partition_with("p", [], [odd])], tmp_path))

    [row] = listed(tmp_path, run.space.name, "p")
    assert (row["id"], row["place"]) == ("\\ud800", "row 2 of \\udcff.csv")


def test_change_feed_deletes_a_row_that_is_set_aside_now(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    good = numbered_rows("p", 5)
    completed(make_run(hash_pool, [partition_with("p", good, [])], tmp_path, changes=True))

    after = partition_with("p", good[1:], [BAD], version="v2")
    run = completed(make_run(hash_pool, [after], tmp_path, changes=True))

    [changes] = (tmp_path / ".changes" / run.space.name / "rows").glob("*.parquet")
    assert pq.read_table(changes).to_pylist() == [{"id": "id-0"}]


def test_list_of_another_source_version_is_not_read(hash_pool: EncoderPool, tmp_path: Path) -> None:
    run = completed(make_run(hash_pool, [partition_with("p", [], [BAD])], tmp_path))
    facts = read_embedded(tmp_path, run.space.name, "p").facts
    store = open_store(tmp_path)
    [space] = list_spaces(store)

    assert rejected_from(store, space, facts).num_rows == 1
    assert rejected_from(store, space, replace(facts, source_version="v0")).num_rows == 0


def test_refused_partition_has_no_list(hash_pool: EncoderPool, tmp_path: Path) -> None:
    twice = [("id-1", "a"), ("id-1", "b")]
    run = make_run(hash_pool, [partition_with("p", twice, [BAD])], tmp_path)

    [failure] = failures(finish(run))

    assert failure.key == "p"
    assert not (tmp_path / list_name(run.space.name, "p")).exists()


def test_lists_in_a_bucket_follow_their_files(
    hash_pool: EncoderPool, object_server: ObjectServer
) -> None:
    store = open_bucket(object_server)
    good = numbered_rows("p", 5)

    run = completed(make_run(hash_pool, [partition_with("p", good, [BAD])], store))
    listed_objects = [name for name in object_server.objects() if ".rejected" in name]
    completed(make_run(hash_pool, [partition_of("p", good, version="v2")], store))

    assert listed_objects == [f"out/{list_name(run.space.name, 'p')}"]
    assert not [name for name in object_server.objects() if ".rejected" in name]
    assert OutputState(store, run.space.name).names() == [f"{run.space.name}/p.parquet"]


def test_derived_space_has_the_lists_of_its_parent_and_stays_fresh(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    transient = replace(BAD, kind="transient")
    partition = partition_with("p", numbered_rows("p", 5), [transient])
    completed(make_run(hash_pool, [partition], tmp_path))
    store = open_store(tmp_path)
    [parent] = list_spaces(store)

    derived = DeriveRun(store, parent, "float32", 8)
    list(derived.events())
    [again] = DeriveRun(store, parent, "float32", 8).events()

    [found] = rejected_of_space(store, derived.space)
    assert [RejectedRow(**row) for row in found.listed] == [transient]
    assert isinstance(again, Receipt)
    assert again.action == "fresh"
