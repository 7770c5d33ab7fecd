"""Segments as they lie staged, and the file that is put together from them, without a run around
them."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surge_dagster.engine.encoder.arena import Arena
from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.files.facts import VectorFacts
from surge_dagster.engine.files.formats import PublishedFile
from surge_dagster.engine.files.rows import matrix_of, row_group_rows
from surge_dagster.engine.model.spec import EncodingSpec, Space
from surge_dagster.engine.run import memory
from surge_dagster.engine.run.publication import assemble
from surge_dagster.engine.run.staging import STAGING, Staging, _most_rows_without_overlap
from surge_dagster.engine.run.superbatch import (
    PartitionToRead,
    Segment,
    SpaceTarget,
    StagedRows,
    SuperBatch,
)
from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.engine.store.object_client import StorageOptions
from surge_dagster.engine.store.object_store import open_object_store
from surge_dagster.engine.store.store import Store
from tests.engine.runs import read_of
from tests.engine.store.object_server import BUCKET, ObjectServer
from tests.small_catalogs import Rows, numbered_rows, partition_of, row_batch_of

KEY = "a key / with.signs"
OPTIONS = StorageOptions(access_key_id="AKIATESTKEY", secret_access_key="secret-of-the-test")
ROWS = numbered_rows("k", 60)
PARTITION = PartitionToRead(partition_of(KEY, ROWS))


def space_of(dimension: int, dtype: str = "float32") -> Space:
    return EncodingSpec(f"hash://{dimension}", dtype=dtype).resolve()


SPACE = space_of(16)


def target_of(store: Store, space: Space = SPACE) -> SpaceTarget:
    return SpaceTarget(store, space, "fp32", include_text=True)


def staging_of(root: Path, space: Space = SPACE) -> Staging:
    """The staged segments of a disk as a run sees them that begins now."""
    store = LocalStore(root)
    store.prepare(space.name)
    return Staging(target_of(store, space))


def vectors(rows: int, space: Space = SPACE) -> np.ndarray:
    found = np.random.default_rng(rows).standard_normal((rows, space.dimension)).astype(np.float32)
    return (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(space.dtype)


def stage(staging: Staging, rows: Rows, start: int, matrix: np.ndarray) -> StagedRows:
    batch = row_batch_of(rows[start : start + len(matrix)])
    ids = batch.ids[: len(batch) // 2], batch.ids[len(batch) // 2 :]
    segment = Segment(PARTITION, 0, len(matrix), start, ids, read=None)
    with Arena(
        slots=1, max_texts=len(batch), max_bytes=1 << 23, dimension=1, dtype="float32"
    ) as arena:
        slot = arena.acquire()
        slot.append(batch.texts)
        found = VectorFacts(start // 10, rows_encoded=len(matrix))
        return staging.write(SuperBatch(0, slot, (segment,), 0), segment, matrix, found)


def assemble_segments(
    root: Path, rows: Rows, segments: list[StagedRows], space: Space = SPACE
) -> PublishedFile:
    target = target_of(LocalStore(root), space)
    return assemble(
        target, staging_of(root, space), PARTITION, read_of(rows), segments, lambda: None
    )


def test_staged_rows_are_found_by_the_next_run(tmp_path: Path) -> None:
    staging = staging_of(tmp_path)
    written = [stage(staging, ROWS, start, vectors(20)) for start in (20, 0)]
    assert staging.has(KEY)
    again = staging_of(tmp_path)
    assert again.find(PARTITION.source) == written[::-1]
    assert not again.has("another")


def test_overlapping_segments_are_not_used_together(tmp_path: Path) -> None:
    for start, stop in ((0, 20), (0, 30), (25, 50), (30, 60)):
        stage(staging_of(tmp_path), ROWS, start, vectors(stop - start))
    found = staging_of(tmp_path).find(PARTITION.source)
    assert [(rows.start, rows.stop) for rows in found] == [(0, 30), (30, 60)]


@pytest.mark.parametrize("other", ["precision", "include_text", "source_version"])
def test_segments_with_other_settings_are_not_used(tmp_path: Path, other: str) -> None:
    stage(staging_of(tmp_path), ROWS, 0, vectors(20))
    precision = "bf16" if other == "precision" else "fp32"
    again = Staging(
        SpaceTarget(LocalStore(tmp_path), SPACE, precision, include_text=other != "include_text")
    )
    source = PARTITION.source
    version = "v2" if other == "source_version" else source.source_version

    assert again.find(replace(source, source_version=version)) == []
    assert len(staging_of(tmp_path).find(source)) == 1, "the other run can go on with it"
    again.remove(KEY)
    assert not (tmp_path / STAGING).exists()


def test_run_lists_a_bucket_once_and_stages_each_segment_with_one_request(
    object_server: ObjectServer,
) -> None:
    store = open_object_store(f"s3://{BUCKET}/out", replace(OPTIONS, endpoint=object_server.url))
    staging = Staging(target_of(store))
    assert [method for method, _, _ in object_server.log] == ["GET"], "a listing"
    for start in (0, 20):
        stage(staging, ROWS, start, vectors(20))
    assert [method for method, _, _ in object_server.log[1:]] == ["PUT", "PUT"]


@pytest.mark.parametrize(("dtype", "words"), [("float32", 10), ("float16", 10), ("float32", 300)])
def test_assembled_file_has_every_row_and_stays_within_the_readers_share(
    tmp_path: Path, dtype: str, words: int
) -> None:
    space = space_of(384, dtype)
    rows = numbered_rows("k", 20_000 if words < 100 else 4_000, words=words)
    matrix = vectors(len(rows), space)
    staging = staging_of(tmp_path, space)
    borders = [0, len(rows) // 3, len(rows) // 3 + 1, 3 * len(rows) // 4, len(rows)]
    segments = [
        stage(staging, rows, start, matrix[start:stop]) for start, stop in pairwise(borders)
    ]
    before = pa.default_memory_pool()
    watched = pa.proxy_memory_pool(before)
    pa.set_memory_pool(watched)
    try:
        published = assemble_segments(tmp_path, rows, segments, space)
    finally:
        pa.set_memory_pool(before)
    assert 0 < watched.max_memory() < memory._READER_BYTES
    assert published.facts.rows == len(rows)
    assert published.facts.content_digest == read_of(rows).content_digest
    assert published.facts.truncated == sum(border // 10 for border in borders[:-1])
    with pq.ParquetFile(
        tmp_path / published.stored.name, page_checksum_verification=True
    ) as reader:
        groups = [reader.metadata.row_group(n).num_rows for n in range(reader.num_row_groups)]
        full = row_group_rows(384, np.dtype(dtype).itemsize)
        assert max(groups) <= full
        assert len(groups) == -(-len(rows) // full), "all are full but the last"
        [whole] = reader.read().combine_chunks().to_batches()
    assert whole.column("id").to_pylist() == [row[0] for row in rows]
    assert whole.column("text").to_pylist() == [row[1] for row in rows]
    np.testing.assert_array_equal(matrix_of(whole), matrix)


def test_segment_that_was_replaced_by_one_of_other_rows_is_refused(tmp_path: Path) -> None:
    segments = [stage(staging_of(tmp_path), ROWS, start, vectors(20)) for start in (0, 20)]
    stage(staging_of(tmp_path), numbered_rows("other", 40), 20, vectors(20))
    with pytest.raises(TransientError, match="it holds other rows than those that were staged"):
        assemble_segments(tmp_path, ROWS[:40], segments)
    assert list(LocalStore(tmp_path).list(SPACE.name)) == []


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), max_size=7))
def test_staged_segments_with_the_most_rows_are_chosen(pieces: list[tuple[int, int]]) -> None:
    vectors = VectorFacts()
    segments = [StagedRows(start, start + rows, "", vectors) for start, rows in pieces]
    most = 0
    for count in range(len(segments) + 1):
        for some in combinations(sorted(segments, key=lambda each: each.start), count):
            if all(first.stop <= second.start for first, second in pairwise(some)):
                most = max(most, sum(each.rows for each in some))

    chosen = _most_rows_without_overlap(segments)

    assert all(first.stop <= second.start for first, second in pairwise(chosen))
    assert sum(each.rows for each in chosen) == most
