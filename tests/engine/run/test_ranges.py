"""Ranges of one partition, each encoded by a run of its own: whoever finds all rows staged
publishes the file."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surge_dagster.engine.errors import ConfigError, TransientError
from surge_dagster.engine.files.facts import FileFacts
from surge_dagster.engine.run.staging import STAGING, Staging
from surge_dagster.engine.sources.partition import Partition, PartitionRange, RowBatch
from surge_dagster.engine.sources.selection import Selection
from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.engine.store.store import StoredObject
from surge_dagster.engine.tables.opening import open_source
from tests.engine.run.test_staged_runs import BIG, staged
from tests.engine.runs import (
    Output,
    assert_nothing_is_held,
    failures,
    finish,
    receipts,
    smallest_run_limit,
)
from tests.small_catalogs import (
    Rows,
    numbered_rows,
    partition_of,
    write_partition,
)

HALVES = ((0, 240), (240, 450))


def write_big(root: Path, rows: Rows = BIG, version: str = "v1") -> Path:
    """A catalog of the one partition, in row groups of 60."""
    write_partition(root, "big", rows, version=version, row_group_size=60)
    return root


@pytest.fixture
def catalog(tmp_path: Path) -> Path:
    return write_big(tmp_path / "catalog")


def sliced(rows: Rows) -> Partition:
    """A partition in memory whose source reads any rows alone."""

    def read_range(start: int, stop: int) -> Iterator[RowBatch]:
        return partition_of("big", rows[start:stop]).read()

    return replace(partition_of("big", rows), rows=len(rows), read_range=read_range)


def ranges_of(partitions: Any, *rows: tuple[int, int]) -> list[PartitionRange]:
    [partition] = partitions
    return [PartitionRange(partition.key, partition.source_version, *each) for each in rows]


def run_range(output: Output, source: Any, *rows: tuple[int, int], **options: Any) -> list[Any]:
    """The events of a run of these rows of the only partition."""
    return output.events(source, ranges=ranges_of(source, *rows), **options)


def assert_complete(output: Output, rows: Rows = BIG) -> FileFacts:
    assert not (output.root / STAGING).exists()
    assert output.keys() == {"big"}
    return output.check("big", rows)


def test_runs_that_both_find_all_rows_staged_both_end_well(
    output: Output, catalog: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(catalog)
    both = threading.Barrier(2)
    find = Staging.find

    def together(staging: Staging, partition: Partition, within: Any = None) -> Any:
        if within is not None:
            return find(staging, partition, within)
        both.wait(60)
        found = find(staging, partition)
        both.wait(60)
        return found

    monkeypatch.setattr(Staging, "find", together)
    runs = [output.run(source, ranges=ranges_of(source, half)) for half in HALVES]
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda run: list(run.events()), runs)

    assert failures(first + second) == []
    assert receipts(first + second, "encoded")
    assert_complete(output)
    for run in runs:
        assert_nothing_is_held(run)


@pytest.mark.parametrize("step", ["looks", "writes", "writes, as a bucket says it"])
def test_run_whose_staged_rows_another_run_publishes_reports_nothing(
    output: Output, catalog: Path, step: str
) -> None:
    """The other run does so while this one looks at them, or is about to use them."""
    source = open_source(catalog)
    run_range(output, source, HALVES[0])

    class OvertakenStore(LocalStore):
        def open(self, name: str, listed: StoredObject | None = None) -> Any:
            if name.endswith("/0-100.parquet") and step == "looks":
                self._publish()
            try:
                return super().open(name, listed)
            except FileNotFoundError:
                if step in ("looks", "writes"):
                    raise
                reason = f"{name!r} was replaced or removed while it was read"
                raise TransientError(reason) from None

        def create(self, name: str) -> Any:
            if name.endswith("/big.parquet") and step != "looks":
                self._publish()
            return super().create(name)

        def _publish(self) -> None:
            other = output.run(source, ranges=ranges_of(source, HALVES[1]))
            [receipt] = other
            assert receipt.action == "encoded"

    events = run_range(output, source, HALVES[1], store=OvertakenStore(output.root))

    assert failures(events) == []
    assert receipts(events) == []
    assert_complete(output)


def test_ranges_of_a_replaced_source_publish_nothing(output: Output, catalog: Path) -> None:
    source = open_source(catalog)
    new = numbered_rows("new", 300)
    old = ranges_of(source, *HALVES)
    run_range(output, source, HALVES[0])
    [partition] = source
    replaced = [replace(partition, current_source_version=lambda: "v2")]
    [failure] = failures(run_range(output, replaced, HALVES[1]))
    assert failure.transient
    assert "('v1' was read, it is 'v2' now)" in failure.reason.replace("source version ", "")
    assert len(staged(output)) == 6
    assert output.keys() == set()
    write_big(catalog, new, "v2")
    failure = output.failure(source, ranges=old)
    assert failure.transient
    assert failure.reason == (
        "rows 0 to 240 of partition 'big' were to be encoded as the source had them in its "
        "version 'v1'; it is 'v2' "
        "now. Divide it anew."
    )
    for rows in ((0, 240), (240, 300)):
        assert not failures(run_range(output, source, rows))
    assert assert_complete(output, new).source_version == "v2"


def test_repeated_id_in_another_range_is_refused_by_its_row(output: Output, tmp_path: Path) -> None:
    repeated = [*BIG[:440], ("id-7", "once more"), *BIG[441:]]
    source = open_source(write_big(tmp_path / "c", repeated))
    run_range(output, source, HALVES[0])
    for encoded in (210, 0):
        run = output.run(source, ranges=ranges_of(source, HALVES[1]))
        [failure] = failures(finish(run))
        assert "row 440: the id 'id-7' stands at row 7 already" in failure.reason
        assert not failure.transient
        assert run.report.texts_encoded == encoded, "what is staged stays"
    assert output.keys() == set()


@pytest.mark.parametrize("kind", ["beyond", "in order", "removed", "left out"])
def test_rows_that_cannot_be_read_alone_are_refused(
    output: Output, catalog: Path, kind: str
) -> None:
    partition = sliced(BIG)
    rows = HALVES[1]
    reason = "240 to 450 of partition 'big' were to be encoded, and "
    if kind == "beyond":
        partition = replace(partition, rows=449)
        reason += "it has 449. Divide a partition of a known size"
    else:
        write_big(catalog, [("a", None), *BIG[1:]])
        [skipping] = open_source(catalog, selection=Selection(missing_text="skip"))
        partition = partition_of("big", BIG) if kind == "in order" else skipping
        reason += "its source cannot read rows without those before them. Divide"
    ranges = ranges_of([partition], rows)
    partitions = [partition]
    if kind == "removed":
        partitions = [partition_of("other", [])]
        reason = "and the source has no such partition now. Divide it anew."
    failure = output.failure(partitions, ranges=ranges)
    assert failure.key == "big"
    assert reason in failure.reason
    assert failure.transient == (kind == "removed")
    assert not (output.root / STAGING).exists()


def test_ranges_that_are_none_and_forced_ones_are_refused(output: Output) -> None:
    with pytest.raises(ConfigError, match="rows 5 to 5 of partition 'big' are not a range"):
        PartitionRange("big", "v1", 5, 5)
    with pytest.raises(ConfigError, match="force cannot be used"):
        output.run([], ranges=[PartitionRange("big", "v1", 0, 5)], force=True)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 0, 2, 1)])
def test_ranges_are_encoded_within_the_smallest_memory(
    output: Output, order: tuple[int, ...]
) -> None:
    rows = numbered_rows("big", 2_000)
    source = [sliced(rows)]
    limit = smallest_run_limit(output)
    reused: list[int] = []
    for number in order:
        ranges = ranges_of(source, (number * 500, number * 500 + 500))
        run = output.embed(source, ranges=ranges, memory_limit_bytes=limit)
        assert run.report.texts_encoded == 500
        assert run.report.max_in_flight_texts <= 3 * 100 + 2 * 7
        reused.append(run.report.texts_reused)
    assert reused == [0, 0, 0, 1_500], "those of the others"
    assert_complete(output, rows)


def test_range_is_refused_where_the_ids_of_its_partition_will_not_fit(output: Output) -> None:
    source = [replace(sliced(BIG), rows=10**9)]
    limit = smallest_run_limit(output)
    [failure] = failures(run_range(output, source, (0, 10), memory_limit_bytes=limit))
    assert "finding repeated ids takes 9,000,000,000 bytes" in failure.reason


def test_undivided_run_completes_ranges(output: Output, catalog: Path) -> None:
    source = open_source(catalog)
    run_range(output, source, (100, 350))
    run = output.embed(source)
    assert run.report.texts_reused == 250
    assert run.report.texts_encoded == 200
    assert_complete(output)


def test_damaged_rows_of_another_range_are_encoded_again(output: Output, catalog: Path) -> None:
    source = open_source(catalog)
    run_range(output, source, HALVES[0])
    staged(output)[100, 200].write_bytes(b"")
    run_range(output, source, HALVES[1])
    assert output.keys() == set()

    run = output.embed(source, ranges=ranges_of(source, HALVES[0]))

    assert run.report.texts_encoded == 100
    assert_complete(output)


@pytest.mark.parametrize("new", [5, 0])
def test_ranges_take_vectors_of_the_old_file(output: Output, catalog: Path, new: int) -> None:
    source = open_source(catalog)
    rows = [*BIG[new:], *numbered_rows("new", new)]
    output.embed(source)
    write_big(catalog, rows, "v2")
    first = output.embed(source, ranges=ranges_of(source, HALVES[0])).report
    second = output.embed(source, ranges=ranges_of(source, HALVES[1])).report
    assert first.partitions_written == 0, "no range reads all to see whether it is the same"
    assert second.partitions_written == 1
    assert first.texts_encoded + second.texts_encoded == new
    assert assert_complete(output, rows).source_version == "v2"
