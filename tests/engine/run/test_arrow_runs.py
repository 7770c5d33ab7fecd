"""Runs that write Arrow files: all that is promised of Parquet files, from the same run."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from surge_dagster import open_embeddings
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.files.facts import FileFacts
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.output.spaces import find_space
from surge_dagster.engine.readers.search import search
from surge_dagster.engine.run.staging import STAGING
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.store import open_store
from surge_dagster.engine.support.footer_memory import forget_all
from surge_dagster.engine.tables.opening import open_source
from surge_dagster.engine.verify.verification import Verified, Violation, verify
from tests.engine.runs import failures, finish, in_memory, limit_bytes, make_run, receipts
from tests.engine.store.object_server import ObjectServer, open_bucket
from tests.small_catalogs import (
    Rows,
    assert_embedded,
    numbered_rows,
    partition_of,
    published_files,
    read_embedded,
    write_catalog,
    write_partition,
)

# "big" is split: its file is put together from staged segments.
CATALOG: dict[str, Rows] = {
    "a": numbered_rows("a", 30),
    "big": numbered_rows("big", 450),
    "empty": [],
    "Köln, 50%": numbered_rows("k", 3, words=400),
}


def embed(pool: EncoderPool, root: Path, **options: Any) -> Path:
    """A catalog on disk and a run over it."""
    if not (root / "catalog").exists():
        write_catalog(root / "catalog", CATALOG)
    run = make_run(pool, open_source(root / "catalog"), root / "out", file_format="arrow", **options)
    assert failures(finish(run)) == []
    return root


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory, hash_pool: EncoderPool) -> Path:
    return embed(hash_pool, tmp_path_factory.mktemp("arrow"))


@pytest.fixture
def copy(embedded: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(embedded, tmp_path / "copy"))


def space_of(root: Path, pool: EncoderPool) -> Any:
    space = find_space(open_store(root / "out"), pool.space.requested)
    assert space is not None and space.file_format == "arrow"
    return space


def violations(root: Path, pool: EncoderPool) -> list[Violation]:
    found = verify(open_source(root / "catalog"), open_store(root / "out"), space_of(root, pool))
    return [one for one in found if isinstance(one, Violation)]


@pytest.mark.parametrize("include_text", [True, False])
def test_both_formats_hold_the_same_rows_and_facts(hash_pool: EncoderPool, tmp_path: Path, include_text: bool) -> None:
    for file_format in ("parquet", "arrow"):
        output = tmp_path / file_format
        run = make_run(hash_pool, in_memory(CATALOG), output, include_text=include_text, file_format=file_format)
        assert failures(finish(run)) == []
        assert not (output / STAGING).exists()
    space = run.space.name
    assert {Path(name).suffix for name in published_files(tmp_path / "arrow", space)} == {".arrow"}
    for key, rows in CATALOG.items():
        one, other = (read_embedded(tmp_path / name, space, key) for name in ("parquet", "arrow"))
        assert len(one.facts.rows_version) == 32
        of_the_run = {name: getattr(other.facts, name) for name in ("rows_version", "oldest_encoded_at")}
        assert replace(one.facts, **of_the_run) == other.facts
        assert (one.ids, one.texts, one.text_hashes) == (other.ids, other.texts, other.text_hashes)
        assert one.matrix.tobytes() == other.matrix.tobytes() and len(one.matrix) == len(rows)
    frames = [open_embeddings(tmp_path / name).lazy().collect() for name in ("parquet", "arrow")]
    assert frames[0].equals(frames[1])


def test_fresh_arrow_files_are_not_encoded_again(
    copy: Path, hash_pool: EncoderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget_all()
    run = make_run(hash_pool, open_source(copy / "catalog"), copy / "out", file_format="arrow")
    assert {receipt.action for receipt in receipts(finish(run))} == {"fresh"}
    assert (run.report.texts_encoded, run.report.partitions_skipped) == (0, len(CATALOG))


def test_space_names_its_file_format(copy: Path, hash_pool: EncoderPool) -> None:
    wrong = r"'arrow'; the settings request 'parquet'\. Set format to 'arrow', or write to another"
    before = {path: path.stat().st_mtime_ns for path in (copy / "out").rglob("*")}
    with pytest.raises(ConfigError, match=wrong):
        list(make_run(hash_pool, open_source(copy / "catalog"), copy / "out"))
    assert {path: path.stat().st_mtime_ns for path in (copy / "out").rglob("*")} == before


def test_format_that_this_version_does_not_know_is_refused(copy: Path, hash_pool: EncoderPool) -> None:
    record = copy / "out" / space_of(copy, hash_pool).name / "space.json"
    record.write_text(record.read_text().replace('"arrow"', '"feather"'))
    with pytest.raises(ConfigError, match="has format 1 and feather files; this version reads"):
        open_embeddings(copy / "out")


def test_file_of_the_other_format_is_ignored(copy: Path, hash_pool: EncoderPool) -> None:
    stray = copy / "out" / space_of(copy, hash_pool).name / "a.parquet"
    stray.write_bytes(b"PAR1")
    [found] = violations(copy, hash_pool)
    assert found.is_warning and "is never read" in found.reason
    assert open_embeddings(copy / "out").rows == sum(map(len, CATALOG.values()))
    [[hit]] = search(open_store(copy / "out"), hash_pool, [CATALOG["a"][7][1]], k=1)
    assert hit.id == "id-7"


def test_published_arrow_files_have_no_violation(embedded: Path, hash_pool: EncoderPool) -> None:
    source, store = open_source(embedded / "catalog"), open_store(embedded / "out")
    found = list(verify(source, store, space_of(embedded, hash_pool), pool=hash_pool, reencode=None))
    assert {one.key: one.rows for one in found if isinstance(one, Verified)} == {
        key: len(rows) for key, rows in CATALOG.items()
    }
    assert not [one for one in found if isinstance(one, Violation)]


def test_flipped_bit_in_a_vector_is_reported_as_damage(copy: Path, hash_pool: EncoderPool) -> None:
    path = copy / "out" / space_of(copy, hash_pool).name / "big.arrow"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    [found] = violations(copy, hash_pool)
    assert (found.key, found.kind) == ("big", "damaged")
    assert "checksum verification failed" in found.reason


def test_equal_content_under_a_new_version_is_republished(copy: Path, hash_pool: EncoderPool) -> None:
    for key in ("a", "big", "empty"):
        write_partition(copy / "catalog", key, CATALOG[key], version="v2")
    run = make_run(hash_pool, open_source(copy / "catalog"), copy / "out", file_format="arrow")
    again = receipts(finish(run), "republished")
    assert {receipt.key: receipt.source_version for receipt in again} == {"a": "v2", "big": "v2", "empty": "v2"}
    assert run.report.texts_encoded == 0 and violations(copy, hash_pool) == []


def test_wide_texts_are_assembled_and_republished_within_the_booked_memory(
    hash_pool: EncoderPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 256 * 1024
    rows = [(f"id-{row}", f"{row} ".ljust(size, "x")) for row in range(60)]
    limit_bytes(monkeypatch, 20 * size)  # three segments
    before = pa.default_memory_pool()
    for version, action in (("v1", "encoded"), ("v2", "republished")):
        source = [partition_of("wide", rows, version=version, batch_rows=1)]
        run = make_run(hash_pool, source, tmp_path, Thresholds(b_min=1, b_max=1000), file_format="arrow")
        watched = pa.proxy_memory_pool(before)
        pa.set_memory_pool(watched)
        try:
            [receipt] = receipts(finish(run))
        finally:
            pa.set_memory_pool(before)
        assert (receipt.action, receipt.source_version) == (action, version)
        assert 0 < watched.max_memory() < run.report.peak_resident_bytes
        assert_embedded(tmp_path, run.space.name, "wide", rows)


def test_writing_to_a_bucket_and_checking_freshness_take_one_request_per_file(
    object_server: ObjectServer, hash_pool: EncoderPool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SURGE_CACHE_DIR", str(tmp_path))  # another machine
    store, facts = open_bucket(object_server), dict[str, FileFacts]()
    run = make_run(hash_pool, in_memory(CATALOG), store, file_format="arrow")
    assert failures(finish(run)) == []
    forget_all()
    object_server.log.clear()
    outputs = OutputState(store, run.space.name, "arrow")
    for partition in outputs.looked_at(in_memory(CATALOG)):
        found = outputs.freshness(partition)
        assert found.status == "fresh" and found.file is not None
        facts[partition.key] = found.file.facts
    assert len([target for target in object_server.requests("GET") if ".arrow" in target]) == len(CATALOG)
    loaded = open_embeddings(store)
    assert {key: loaded.facts(key) for key in CATALOG} == facts
    assert loaded.lazy(["big"]).collect()["text"].to_list() == [text for _, text in CATALOG["big"]]
    assert loaded.dataset().to_table(columns=["id", "embedding"]).num_rows == sum(map(len, CATALOG.values()))


def test_damaged_file_is_encoded_again(
    copy: Path, hash_pool: EncoderPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forget_all()
    folder = copy / "out" / space_of(copy, hash_pool).name
    cut, flipped = folder / "a.arrow", folder / "big.arrow"
    cut.write_bytes(cut.read_bytes()[:-100])
    content = bytearray(flipped.read_bytes())
    content[3_000] ^= 1
    flipped.write_bytes(content)
    write_partition(copy / "catalog", "big", CATALOG["big"], version="v2")  # would only be written again
    run = make_run(hash_pool, open_source(copy / "catalog"), copy / "out", file_format="arrow")
    assert {receipt.key for receipt in receipts(finish(run), "encoded")} == {"a", "big"}
    assert "partition 'big' is encoded again: " in caplog.text and "checksum verification failed" in caplog.text
    assert violations(copy, hash_pool) == []
