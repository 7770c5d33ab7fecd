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
from surge_dagster.engine.files.formats import file_name
from surge_dagster.engine.readers.search import search
from surge_dagster.engine.sources import parquet_files
from surge_dagster.engine.sources.file_read import FileRead
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store import open_store
from surge_dagster.engine.support.keys import encode_key
from surge_dagster.engine.tables.frames import FrameCatalog
from surge_dagster.engine.tables.opening import open_source
from tests.engine.runs import (
    completed,
    failures,
    finish,
    in_memory,
    limit_bytes,
    make_run,
    receipts,
    smallest_run_limit,
)
from tests.small_catalogs import (
    Rows,
    assert_embedded,
    keys_of,
    numbered_rows,
    partition_folder,
    partition_of,
    published_files,
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
    hash_pool: EncoderPool, tmp_path: Path, catalog: Path
) -> None:
    run = make_run(hash_pool, open_source(catalog), tmp_path / "out")
    found = failures(finish(run))

    assert keys_of(found) == sorted(BAD)
    for failure in found:
        assert BAD[failure.key][1] in failure.reason
        assert repr(failure.key) in failure.reason
        assert failure.reason.endswith("."), "a remedy, as a sentence"
        assert not failure.transient
    assert run.failed
    assert run.report.as_dict()["partitions_failed"] == [
        {"key": failure.key, "reason": failure.reason} for failure in found
    ]


def test_bad_partitions_stop_no_other(
    hash_pool: EncoderPool, tmp_path: Path, catalog: Path
) -> None:
    run = completed(make_run(hash_pool, open_source(catalog), tmp_path / "out"))

    for key, rows in GOOD.items():
        assert_embedded(tmp_path / "out", run.space.name, key, rows)
    published = published_files(tmp_path / "out", run.space.name)
    assert published == {f"{encode_key(key)}.parquet" for key in GOOD}

    events = finish(make_run(hash_pool, open_source(catalog), tmp_path / "out"))
    assert keys_of(receipts(events, "fresh")) == sorted(GOOD)
    assert keys_of(failures(events)) == sorted(BAD)


def test_partition_that_cannot_be_read_now_is_a_transient_failure(
    hash_pool: EncoderPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_catalog(tmp_path / "catalog", {key: numbered_rows(key, 30) for key in "abc"})
    read = parquet_files._rows

    def fail(request: FileRead, *arguments: Any) -> Any:
        if request.file.relative.startswith("partition=b"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return read(request, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(parquet_files, "_rows", fail)
        events = finish(make_run(hash_pool, open_source(tmp_path / "catalog"), tmp_path / "out"))
    [failure] = failures(events)
    assert failure.key == "b"
    assert failure.transient
    assert "Stale file handle" in failure.reason
    assert keys_of(receipts(events)) == ["a", "c"]
    again = finish(make_run(hash_pool, open_source(tmp_path / "catalog"), tmp_path / "out"))
    assert keys_of(receipts(again, "encoded")) == ["b"]
    assert not failures(again)


def test_partition_whose_source_becomes_invalid_keeps_its_file(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    write_catalog(tmp_path / "catalog", {"k": GOOD["good"]})
    run = completed(make_run(hash_pool, open_source(tmp_path / "catalog"), tmp_path / "out"))
    write_partition(tmp_path / "catalog", "k", with_row(40, 12, ("x", None)), version="v2")
    events = finish(make_run(hash_pool, open_source(tmp_path / "catalog"), tmp_path / "out"))
    assert keys_of(failures(events)) == ["k"]
    assert (
        assert_embedded(tmp_path / "out", run.space.name, "k", GOOD["good"]).source_version == "v1"
    )


def test_repeated_partition_key_is_refused_and_reported_once(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    first = numbered_rows("first", 30)
    other = numbered_rows("other", 30)

    def partitions() -> Iterator[Partition]:
        yield partition_of("k", first)
        yield partition_of("other", other)
        for _ in range(3):
            yield partition_of("k", numbered_rows("again", 30))

    run = make_run(hash_pool, partitions(), tmp_path)
    [failure] = failures(finish(run))
    assert failure.key == "k"
    assert "comes again after it was closed" in failure.reason
    assert "Order the source by partition key" in failure.reason
    assert run.report.texts_encoded == 60
    assert_embedded(tmp_path, run.space.name, "other", other)
    assert_embedded(tmp_path, run.space.name, "k", first)


def test_keys_that_cannot_be_names_are_refused(hash_pool: EncoderPool, tmp_path: Path) -> None:
    rows = numbered_rows("k", 10)
    run = make_run(hash_pool, [partition_of(key, rows) for key in ("", "\ud800", "good")], tmp_path)
    assert keys_of(failures(finish(run))) == ["", "\ud800"]
    assert published_files(tmp_path, run.space.name) == {"good.parquet"}


@pytest.mark.parametrize("fails_at", [0, 99, 100, 150, 299])
def test_split_partition_refused_in_any_segment_leaves_nothing(
    hash_pool: EncoderPool, tmp_path: Path, fails_at: int
) -> None:
    bad = partition_of("bad", numbered_rows("bad", 300), fails_at=fails_at, batch_rows=1)
    catalog = {"before": numbered_rows("before", 40), "after": numbered_rows("after", 220)}
    before, after = in_memory(catalog)
    run = make_run(hash_pool, [before, bad, after], tmp_path)
    [failure] = failures(finish(run))
    assert failure.key == "bad"
    assert f"row {fails_at}:" in failure.reason
    for key, rows in catalog.items():
        assert_embedded(tmp_path, run.space.name, key, rows)
    assert published_files(tmp_path, run.space.name) == {"before.parquet", "after.parquet"}


def test_row_that_fits_no_superbatch_is_named(
    hash_pool: EncoderPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = with_row(30, 20, ("x", "y" * 9000))
    limit_bytes(monkeypatch, 8192)
    run = make_run(
        hash_pool, in_memory({"big row": rows, "good": numbered_rows("good", 30)}), tmp_path
    )
    [failure] = failures(finish(run))
    assert "row 20: the row has 9,001 bytes and a SuperBatch holds at most 8,192" in failure.reason
    assert published_files(tmp_path, run.space.name) == {"good.parquet"}


def test_id_set_over_its_share_of_the_memory_is_refused(
    hash_pool: EncoderPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surge_dagster.engine.run.memory._LEAST_ID_SET_BYTES", 16 * 1024)
    catalog = in_memory({"many": numbered_rows("many", 3000), "few": numbered_rows("few", 90)})
    limit_bytes(monkeypatch, 65_536)
    run = make_run(
        hash_pool, catalog, tmp_path, memory_limit_bytes=smallest_run_limit(hash_pool, tmp_path)
    )
    [failure] = failures(finish(run))
    assert failure.key == "many"
    assert "Raise the memory limit, or split the partition" in failure.reason
    assert published_files(tmp_path, run.space.name) == {"few.parquet"}


def test_file_of_another_space_is_left_alone_and_named(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    catalog = {"k": numbered_rows("k", 30), "other": numbered_rows("other", 30)}
    run = completed(make_run(hash_pool, in_memory(catalog), tmp_path))
    path = tmp_path / file_name(run.space.name, "k")
    rewrite(path, lambda table: table, space="somebody-else")
    foreign = path.read_bytes()
    for force in (False, True):
        again = make_run(hash_pool, in_memory(catalog), tmp_path, force=force)
        [failure] = failures(finish(again))
        assert failure.key == "k"
        assert (
            "is taken by a file of the space 'somebody-else'; it was left alone" in failure.reason
        )
        assert path.read_bytes() == foreign


def test_other_tokenizer_is_refused_before_anything_is_encoded(
    hash_pool: EncoderPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(tokenizer: str) -> None:
        monkeypatch.setattr(hash_pool, "_facts", replace(hash_pool.start(), tokenizer=tokenizer))

    load("ab transformers-5.1")
    finish(make_run(hash_pool, [partition_of("a", numbered_rows("a", 60))], tmp_path))
    load("cd transformers-5.2")
    more = [partition_of("b", numbered_rows("b", 60))]
    with pytest.raises(
        ConfigError, match=r"'hash://16' gives texts other tokens .* ab transformers-5\.1, not cd"
    ):
        list(make_run(hash_pool, more, tmp_path).events())
    assert published_files(tmp_path, hash_pool.space.name) == {"a.parquet"}
    with pytest.raises(ConfigError, match="gives texts other tokens"):
        search(open_store(tmp_path), hash_pool, ["a"])
    load("ab transformers-5.2")
    assert search(open_store(tmp_path), hash_pool, ["a"])
    assert keys_of(receipts(finish(make_run(hash_pool, more, tmp_path)))) == ["b"]


def test_error_in_a_source_that_is_being_replaced_is_transient(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    bad = partition_of("k", numbered_rows("k", 20), fails_at=3)
    run = make_run(hash_pool, [Partition("k", "v1", bad.read, lambda: "v2")], tmp_path)
    [failure] = failures(finish(run))
    assert failure.transient
    assert "row 3: this row is refused" in failure.reason
    assert "source changed while it was read" in failure.reason


def test_frame_that_cannot_be_computed_is_refused_for_what_is_wrong(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    frame = pa.table({"id": ["1"], "text": ["one"]})
    frames = FrameCatalog({"bad": lambda: 1 / 0, "good": frame})  # pyright: ignore[reportArgumentType]

    events = finish(make_run(hash_pool, frames, tmp_path))

    [failure] = failures(events)
    assert failure.key == "bad"
    assert not failure.transient
    assert "its frame could not be computed (ZeroDivisionError: division by zero)" in failure.reason
    assert keys_of(receipts(events)) == ["good"]


class SpoilingPool:
    """A pool whose device gives something that is no vector for one text."""

    def __init__(self, pool: EncoderPool, text: str) -> None:
        self._pool = pool
        self._text = text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def submit(self, slot: Slot, borders: np.ndarray, rows: np.ndarray | None = None) -> EncodeCall:
        call = self._pool.submit(slot, borders, rows)
        call.result()
        texts = slot.texts(0, len(slot)).to_pylist()
        if self._text in texts:
            slot.matrix(0, len(slot))[texts.index(self._text), 3] = np.nan
        return call


@pytest.mark.parametrize("row", [5, 50, 150, 290])
def test_invalid_vector_refuses_its_partition_and_names_the_row(
    hash_pool: EncoderPool, tmp_path: Path, row: int
) -> None:
    rows = numbered_rows("bad", 300 if row > 50 else 60)
    catalog = {"bad": rows, "good": GOOD["good"], "split": GOOD["split"]}
    run = make_run(SpoilingPool(hash_pool, rows[row][1]), in_memory(catalog), tmp_path)
    [failure] = failures(finish(run))
    assert failure.key == "bad"
    assert f"row {row}: its vector is not finite" in failure.reason
    assert not failure.transient
    assert published_files(tmp_path, run.space.name) == {"good.parquet", "split.parquet"}


@pytest.mark.parametrize("row", [10, 110])
def test_partition_that_is_bad_in_two_ways_is_named_once(
    hash_pool: EncoderPool, tmp_path: Path, row: int
) -> None:
    rows = numbered_rows("bad", 300)
    bad = partition_of("bad", rows, fails_at=295)
    run = make_run(
        SpoilingPool(hash_pool, rows[row][1]), [bad, *in_memory({"good": GOOD["good"]})], tmp_path
    )
    assert keys_of(failures(finish(run))) == ["bad"]
    assert published_files(tmp_path, run.space.name) == {"good.parquet"}
