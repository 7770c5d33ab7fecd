"""A bad partition is refused with its key, row and remedy, once; it stops no other, and nothing
written is lost."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from surge_dagster.engine.encoder.arena import Slot
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.schedule import EncodeCall
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.readers.search import search
from surge_dagster.engine.sources import parquet_files
from surge_dagster.engine.sources.file_read import FileRead
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.support.keys import encode_key
from surge_dagster.engine.tables.frames import FrameCatalog
from surge_dagster.engine.tables.opening import open_source
from tests.engine.runs import (
    Output,
    Wrapped,
    failures,
    finish,
    in_memory,
    limit_bytes,
    receipts,
    smallest_run_limit,
)
from tests.small_catalogs import (
    Rows,
    keys_of,
    numbered_rows,
    partition_folder,
    partition_of,
    rewrite,
    write_catalog,
    write_partition,
)

GOOD: dict[str, Rows] = {
    "good": numbered_rows("good", 30),
    "empty": [],
    "split": numbered_rows("split", 300),
    "a/b": numbered_rows("ab", 4),
    "..": numbered_rows("dots", 4),
    'Köln, "x" [1]': numbered_rows("köln", 4),
    "x" * 300: numbered_rows("long", 4),
    "A": numbered_rows("upper", 4),
    "a": numbered_rows("lower", 4),
    "zz last": numbered_rows("last", 70),
}


def with_row(count: int, row: int, bad: tuple[Any, Any]) -> Rows:
    rows: list[tuple[Any, Any]] = list(numbered_rows("bad", count))
    rows[row] = bad
    return rows


BAD: dict[str, tuple[Rows, str]] = {
    "null text": (with_row(40, 12, ("x", None)), "row 12: the text is null"),
    "null id": (with_row(40, 12, (None, "x")), "row 12: the id is null"),
    "null, split": (with_row(280, 270, ("x", None)), "row 270: the text is null"),
    "repeated id": (with_row(40, 30, ("id-3", "x")), "row 30: the id 'id-3' stands at row 3"),
    "repeated id, split": (with_row(280, 270, ("id-3", "x")), "row 270: the id 'id-3' stands at "),
    "10 MB": (with_row(40, 5, ("x", "y" * 10_000_000)), "row 5: the text has 10,000,000 bytes"),
    "cut off": (GOOD["good"], "part-0.parquet cannot be read"),
}


@pytest.fixture
def catalog(tmp_path: Path) -> Path:
    """A catalog of bad partitions among good ones."""
    root = write_catalog(tmp_path / "catalog", GOOD)
    for key, (rows, _) in BAD.items():
        write_partition(root, key, rows)
    cut_off = partition_folder(root, "cut off") / "part-0.parquet"
    cut_off.write_bytes(cut_off.read_bytes()[:-50])
    return root


def test_bad_partitions_are_named_once_with_key_row_and_remedy(
    output: Output, catalog: Path
) -> None:
    run = output.run(open_source(catalog))
    found = failures(finish(run))

    assert keys_of(found) == sorted(BAD)
    for failure in found:
        assert BAD[failure.key][1] in failure.reason
        assert repr(failure.key) in failure.reason
        assert failure.reason.endswith("."), "a remedy, as a sentence"
        assert not failure.transient
    assert run.failed
    documents = run.report.as_dict()["partitions_failed"]
    for failure, document in zip(found, documents, strict=True):
        assert document == {"key": failure.key, "reason": failure.reason}


def test_bad_partitions_stop_no_other(output: Output, catalog: Path) -> None:
    output.embed(open_source(catalog))

    output.check_all(GOOD)
    assert output.keys() == set(map(encode_key, GOOD))

    events = output.events(open_source(catalog))
    assert keys_of(receipts(events, "fresh")) == sorted(GOOD)
    assert keys_of(failures(events)) == sorted(BAD)


def test_partition_that_cannot_be_read_now_is_a_transient_failure(
    output: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_source(write_catalog(tmp_path / "catalog", dict.fromkeys("abc", GOOD["good"])))
    read = parquet_files._rows

    def fail(request: FileRead, *arguments: Any) -> Any:
        if request.file.relative.startswith("partition=b"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return read(request, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(parquet_files, "_rows", fail)
        events = output.events(source)
    [failure] = failures(events)
    assert failure.key == "b"
    assert failure.transient
    assert "Stale file handle" in failure.reason
    assert keys_of(receipts(events)) == ["a", "c"]
    again = output.events(source)
    assert keys_of(receipts(again, "encoded")) == ["b"]
    assert not failures(again)


def test_partition_whose_source_becomes_invalid_keeps_its_file(
    output: Output, tmp_path: Path
) -> None:
    source = open_source(write_catalog(tmp_path / "catalog", {"k": GOOD["good"]}))
    output.embed(source)
    write_partition(tmp_path / "catalog", "k", with_row(40, 12, ("x", None)), version="v2")
    assert output.failure(source).key == "k"
    assert output.check("k", GOOD["good"]).source_version == "v1"


def test_repeated_partition_key_is_refused_and_reported_once(output: Output) -> None:
    first = numbered_rows("first", 30)
    other = numbered_rows("other", 30)

    def partitions() -> Iterator[Partition]:
        yield partition_of("k", first)
        yield partition_of("other", other)
        for _ in range(3):
            yield partition_of("k", numbered_rows("again", 30))

    run = output.run(partitions())
    [failure] = failures(finish(run))
    assert failure.key == "k"
    assert "comes again after it was closed" in failure.reason
    assert "Order the source by partition key" in failure.reason
    assert run.report.texts_encoded == 60
    output.check("other", other)
    output.check("k", first)


def test_keys_that_cannot_be_names_are_refused(output: Output) -> None:
    rows = numbered_rows("k", 10)
    events = output.events(in_memory(dict.fromkeys(("", "\ud800", "good"), rows)))
    assert keys_of(failures(events)) == ["", "\ud800"]
    assert output.keys() == {"good"}


@pytest.mark.parametrize("fails_at", [0, 99, 100, 150, 299])
def test_split_partition_refused_in_any_segment_leaves_nothing(
    output: Output, fails_at: int
) -> None:
    bad = partition_of("bad", numbered_rows("bad", 300), fails_at=fails_at, batch_rows=1)
    catalog = {"before": numbered_rows("before", 40), "after": numbered_rows("after", 220)}
    before, after = in_memory(catalog)
    failure = output.failure([before, bad, after])
    assert failure.key == "bad"
    assert f"row {fails_at}:" in failure.reason
    output.check_all(catalog)
    assert output.keys() == {"before", "after"}


def test_row_that_fits_no_superbatch_is_named(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = with_row(30, 20, ("x", "y" * 9000))
    limit_bytes(monkeypatch, 8192)
    failure = output.failure(in_memory({"big row": rows, "good": numbered_rows("good", 30)}))
    assert "row 20: the row has 9,001 bytes and a SuperBatch holds at most 8,192" in failure.reason
    assert output.keys() == {"good"}


def test_id_set_over_its_share_of_the_memory_is_refused(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surge_dagster.engine.run.memory._LEAST_ID_SET_BYTES", 16 * 1024)
    catalog = in_memory({"many": numbered_rows("many", 3000), "few": numbered_rows("few", 90)})
    limit_bytes(monkeypatch, 65_536)
    failure = output.failure(catalog, memory_limit_bytes=smallest_run_limit(output))
    assert failure.key == "many"
    assert "Raise the memory limit, or split the partition" in failure.reason
    assert output.keys() == {"few"}


def test_file_of_another_space_is_left_alone_and_named(output: Output) -> None:
    catalog = {"k": numbered_rows("k", 30), "other": numbered_rows("other", 30)}
    output.embed(in_memory(catalog))
    path = output.path("k")
    rewrite(path, lambda table: table, space="somebody-else")
    foreign = path.read_bytes()
    for force in (False, True):
        failure = output.failure(in_memory(catalog), force=force)
        assert failure.key == "k"
        assert (
            "is taken by a file of the space 'somebody-else'; it was left alone" in failure.reason
        )
        assert path.read_bytes() == foreign


def test_other_tokenizer_is_refused_before_anything_is_encoded(
    output: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(tokenizer: str) -> None:
        monkeypatch.setattr(
            output.pool, "_facts", replace(output.pool.start(), tokenizer=tokenizer)
        )

    load("ab transformers-5.1")
    output.events([partition_of("a", numbered_rows("a", 60))])
    load("cd transformers-5.2")
    more = [partition_of("b", numbered_rows("b", 60))]
    with pytest.raises(
        ConfigError, match=r"'hash://16' gives texts other tokens .* ab transformers-5\.1, not cd"
    ):
        list(output.run(more).events())
    assert output.keys() == {"a"}
    with pytest.raises(ConfigError, match="gives texts other tokens"):
        search(output.store, output.pool, ["a"])
    load("ab transformers-5.2")
    assert search(output.store, output.pool, ["a"])
    assert keys_of(receipts(output.events(more))) == ["b"]


def test_error_in_a_source_that_is_being_replaced_is_transient(output: Output) -> None:
    bad = partition_of("k", numbered_rows("k", 20), fails_at=3)
    failure = output.failure([Partition("k", "v1", bad.read, lambda: "v2")])
    assert failure.transient
    assert "row 3: this row is refused" in failure.reason
    assert "source changed while it was read" in failure.reason


def test_frame_that_cannot_be_computed_is_refused_for_what_is_wrong(output: Output) -> None:
    frame = pa.table({"id": ["1"], "text": ["one"]})
    frames = FrameCatalog({"bad": lambda: 1 / 0, "good": frame})  # pyright: ignore[reportArgumentType]

    events = output.events(frames)

    [failure] = failures(events)
    assert failure.key == "bad"
    assert not failure.transient
    assert "its frame could not be computed (ZeroDivisionError: division by zero)" in failure.reason
    assert keys_of(receipts(events)) == ["good"]


class SpoilingPool(Wrapped):
    """A pool whose device gives something that is no vector for one text."""

    def __init__(self, pool: EncoderPool, text: str) -> None:
        super().__init__(pool)
        self._text = text

    def submit(self, slot: Slot, borders: np.ndarray, rows: np.ndarray | None = None) -> EncodeCall:
        call = self.inner.submit(slot, borders, rows)
        call.result()
        texts = slot.texts(0, len(slot)).to_pylist()
        if self._text in texts:
            slot.matrix(0, len(slot))[texts.index(self._text), 3] = np.nan
        return call


@pytest.mark.parametrize("row", [5, 50, 150, 290])
def test_invalid_vector_refuses_its_partition_and_names_the_row(output: Output, row: int) -> None:
    rows = numbered_rows("bad", 300 if row > 50 else 60)
    catalog = {"good": GOOD["good"], "bad": rows, "split": GOOD["split"]}
    failure = output.failure(in_memory(catalog), pool=SpoilingPool(output.pool, rows[row][1]))
    assert failure.key == "bad"
    assert f"row {row}: its vector is not finite" in failure.reason
    assert not failure.transient
    assert output.keys() == {"good", "split"}


@pytest.mark.parametrize("row", [10, 110])
def test_partition_that_is_bad_in_two_ways_is_named_once(output: Output, row: int) -> None:
    rows = numbered_rows("bad", 300)
    bad = partition_of("bad", rows, fails_at=295)
    partitions = [bad, partition_of("good", GOOD["good"])]
    failure = output.failure(partitions, pool=SpoilingPool(output.pool, rows[row][1]))
    assert failure.key == "bad"
    assert output.keys() == {"good"}
