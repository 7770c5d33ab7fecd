"""Partitions that are read once more in a run, because their old vectors are not to be trusted."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.files.formats import file_name
from surge_dagster.engine.plan.calibrating import learning
from surge_dagster.engine.run.failures import DroppedPartitions
from surge_dagster.engine.run.memory import ResultMemory
from surge_dagster.engine.run.publisher import _Tasks
from surge_dagster.engine.run.report import SuperBatchReport
from surge_dagster.engine.run.superbatch import PartitionToRead
from surge_dagster.engine.store import open_store
from tests.engine.runs import finish, make_run, receipts
from tests.small_catalogs import Rows, assert_embedded, numbered_rows, partition_of, rewrite, with_vectors

ROWS = {key: numbered_rows(key, 40) for key in ("a", "b", "c")}


def embed(pool: EncoderPool, root: Path, catalog: Mapping[str, Rows], version: str) -> list[object]:
    return finish(make_run(pool, [partition_of(key, rows, version=version) for key, rows in catalog.items()], root))


@pytest.fixture
def changed(hash_pool: EncoderPool, tmp_path: Path) -> dict[str, Rows]:
    """The next version of a catalog; in the output the vectors of its partition "b" are of another model."""
    embed(hash_pool, tmp_path, ROWS, "v1")
    path = tmp_path / file_name(hash_pool.space.name, "b")
    rewrite(path, lambda table: with_vectors(table, lambda matrix: -matrix))
    return {key: [*rows, ("new", f"new in {key}")] for key, rows in ROWS.items()}


def test_partition_that_is_read_again_is_counted_once_in_superbatches_of_their_own(
    hash_pool: EncoderPool, tmp_path: Path, changed: dict[str, Rows]
) -> None:
    run = make_run(hash_pool, [partition_of(key, rows, version="v2") for key, rows in changed.items()], tmp_path)
    events = finish(run)
    numbers = [event.index for event in events if isinstance(event, SuperBatchReport)]
    assert sorted(numbers) == list(range(len(numbers)))  # whose threads end first is not known
    written = receipts(events, "encoded")
    assert {receipt.key: receipt.rows_reused for receipt in written} == {"a": 40, "b": 0, "c": 40}
    assert {receipt.compared_rows for receipt in written} == {1}
    assert (run.report.texts_encoded, run.report.costs.rows_reused) == (1 + 41 + 1, 80)
    assert run.report.superbatches == len(numbers) and not run.failed
    for key, rows in changed.items():
        assert_embedded(tmp_path, run.space.name, key, rows)


def test_run_that_reads_every_partition_again_ends_with_its_prediction(
    hash_pool: EncoderPool, tmp_path: Path, changed: dict[str, Rows]
) -> None:
    for key in ("a", "c"):
        rewrite(
            tmp_path / file_name(hash_pool.space.name, key), lambda table: with_vectors(table, lambda matrix: -matrix)
        )
    store = open_store(tmp_path)
    run = make_run(hash_pool, [partition_of(key, rows, version="v2") for key, rows in changed.items()], store)
    events = list(learning(run, hash_pool, store))
    assert 0 in {event.texts for event in events if isinstance(event, SuperBatchReport)}
    assert run.report.predicted_wall_seconds is not None and not run.failed
    for key, rows in changed.items():
        assert_embedded(tmp_path, run.space.name, key, rows)


def test_partitions_of_which_no_sampled_row_fits_the_memory_are_encoded(
    hash_pool: EncoderPool, tmp_path: Path, changed: dict[str, Rows], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each SuperBatch has memory for one sampled row; "b", after "a" in its own, would keep the wrong vectors."""
    of_rows = ResultMemory.of_rows

    def for_one_row(result: ResultMemory, rows: int, string_bytes: int) -> int:
        row = result.dimension * result.itemsize
        return of_rows(result, rows, string_bytes) if string_bytes else (rows + 1) * row

    monkeypatch.setattr(ResultMemory, "of_rows", for_one_row)
    written = receipts(embed(hash_pool, tmp_path, changed, "v2"), "encoded")
    assert {receipt.key: receipt.rows_reused for receipt in written} == {"a": 40, "b": 0, "c": 40}
    for key, rows in changed.items():
        assert_embedded(tmp_path, hash_pool.space.name, key, rows)


def test_partition_has_a_failure_or_another_reading_and_never_both() -> None:
    first, second, third = (PartitionToRead(partition_of(key, [])) for key in "abc")
    dropped = DroppedPartitions()
    dropped.read_again(first, [0.5])
    assert not dropped.fail(first), "its failure is not reported"
    assert dropped.fail(second, drop=False) and second not in dropped
    dropped.read_again(second)
    assert second in dropped and not dropped.comes_again(second)
    assert dropped.fail(third) and not dropped.fail(third), "a failure is reported once"
    [again] = dropped.to_read_again()
    assert (again.source, again.reuse, again.cosines) == (first.source, False, (0.5,))


def test_publishing_tasks_share_a_limited_number_of_threads() -> None:
    together, most, lock = 0, 0, threading.Lock()
    both_run = threading.Barrier(2)

    def task() -> None:
        nonlocal together, most
        with lock:
            together += 1
            most = max(most, together)
        both_run.wait(60)
        with lock:
            together -= 1

    tasks = _Tasks("test", 2)
    for _ in range(20):
        tasks.add(task)
    tasks.end()
    tasks.wait(60)
    assert (together, most) == (0, 2)
