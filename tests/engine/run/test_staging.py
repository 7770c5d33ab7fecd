"""Segments as they lie staged, the rows of a source that they stand for, and the file that is put
together from them, without a run around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from unittest.mock import Mock

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
from surge_dagster.engine.output.rejected import RejectedLists
from surge_dagster.engine.run import memory
from surge_dagster.engine.run.publication import assemble
from surge_dagster.engine.run.reading import StagedRowsCheck
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
from surge_dagster.engine.support.text_hash import text_hashes
from tests.engine.runs import read_of
from tests.engine.store.object_server import BUCKET, ObjectServer
from tests.small_catalogs import (
    Rows,
    ids_of,
    numbered_rows,
    partition_of,
    row_batch_of,
    row_groups,
    texts_of,
)

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
        superbatch = SuperBatch(0, slot, (segment,), 0, hashes=text_hashes(batch.texts))
        return staging.write(superbatch, segment, matrix, found)


def stage_all(
    staging: Staging, rows: Rows, matrix: np.ndarray, borders: list[int]
) -> list[StagedRows]:
    """Stage the rows between each two borders."""
    staged: list[StagedRows] = []
    for start, stop in pairwise(borders):
        staged.append(stage(staging, rows, start, matrix[start:stop]))
    return staged


def assemble_segments(
    root: Path, rows: Rows, segments: list[StagedRows], space: Space = SPACE
) -> PublishedFile:
    target = target_of(LocalStore(root), space)
    return assemble(
        target,
        staging_of(root, space),
        RejectedLists(target.store, space.name),
        PARTITION,
        read_of(rows),
        segments,
        lambda: None,
    )


def test_staged_rows_are_found_by_the_next_run(tmp_path: Path) -> None:
    staging = staging_of(tmp_path)
    written = stage_all(staging, ROWS, vectors(40), [0, 20, 40])
    assert staging.has(KEY)
    again = staging_of(tmp_path)
    assert again.find(PARTITION.source) == written
    assert not again.has("another")


def test_overlapping_segments_are_not_used_together(tmp_path: Path) -> None:
    for start, stop in ((0, 20), (0, 30), (25, 50), (30, 60)):
        stage(staging_of(tmp_path), ROWS, start, vectors(stop - start))
    first, second = staging_of(tmp_path).find(PARTITION.source)
    assert (first.start, first.stop) == (0, 30)
    assert (second.start, second.stop) == (30, 60)


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
    assert object_server.methods() == ["GET"], "a listing"
    for start in (0, 20):
        stage(staging, ROWS, start, vectors(20))
    assert object_server.methods()[1:] == ["PUT", "PUT"]


@pytest.mark.parametrize(("dtype", "words"), [("float32", 10), ("float16", 10), ("float32", 300)])
def test_assembled_file_has_every_row_and_stays_within_the_readers_share(
    tmp_path: Path, dtype: str, words: int
) -> None:
    space = space_of(384, dtype)
    rows = numbered_rows("k", 20_000 if words < 100 else 4_000, words=words)
    matrix = vectors(len(rows), space)
    staging = staging_of(tmp_path, space)
    borders = [0, len(rows) // 3, len(rows) // 3 + 1, 3 * len(rows) // 4, len(rows)]
    segments = stage_all(staging, rows, matrix, borders)
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
    assert published.facts.truncated == (np.array(borders[:-1]) // 10).sum()
    with pq.ParquetFile(
        tmp_path / published.stored.name, page_checksum_verification=True
    ) as reader:
        groups = row_groups(reader.metadata)
        full = row_group_rows(384, np.dtype(dtype).itemsize)
        assert max(groups) <= full
        assert len(groups) == -(-len(rows) // full), "all are full but the last"
        [whole] = reader.read().combine_chunks().to_batches()
    assert whole.column("id").to_pylist() == ids_of(rows)
    assert whole.column("text").to_pylist() == texts_of(rows)
    np.testing.assert_array_equal(matrix_of(whole), matrix)


def test_segment_that_was_replaced_by_one_of_other_rows_is_refused(tmp_path: Path) -> None:
    segments = stage_all(staging_of(tmp_path), ROWS, vectors(40), [0, 20, 40])
    stage(staging_of(tmp_path), numbered_rows("other", 40), 20, vectors(20))
    with pytest.raises(TransientError, match="it holds other rows than those that were staged"):
        assemble_segments(tmp_path, ROWS[:40], segments)
    assert list(LocalStore(tmp_path).list(SPACE.name)) == []


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), max_size=7))
def test_staged_segments_with_the_most_rows_are_chosen(pieces: list[tuple[int, int]]) -> None:
    segments = [StagedRows(start, start + rows, "", VectorFacts()) for start, rows in pieces]
    most = 0
    for count in range(len(segments) + 1):
        for some in combinations(sorted(segments, key=lambda each: each.start), count):
            most = max(most, rows_without_overlap(some))

    chosen = _most_rows_without_overlap(segments)

    assert rows_without_overlap(chosen) == most


def rows_without_overlap(segments: Sequence[StagedRows]) -> int:
    """The rows of all segments, or -1 if two overlap."""
    rows = 0
    end = 0
    for segment in segments:
        if segment.start < end:
            return -1
        rows += segment.rows
        end = segment.stop
    return rows


def staged_of(rows: Rows, start: int, stop: int) -> StagedRows:
    return StagedRows(start, stop, read_of(rows[start:stop]).content_digest, VectorFacts())


def cut(rows: Rows, staged: list[StagedRows], batch_rows: int = 7) -> list[bool]:
    """For each row whether it is staged; rows and their order are checked."""
    check = StagedRowsCheck(Mock(), "k", staged)
    found = []
    ids = []
    for start in range(0, len(rows), batch_rows):
        for piece, segment in check.cut(row_batch_of(rows[start : start + batch_rows])):
            assert len(piece)
            found += [segment is not None] * len(piece)
            ids += piece.ids.to_pylist()
    check.finish()
    assert ids == ids_of(rows)
    return found


@given(st.sets(st.integers(0, 60), max_size=12), st.integers(1, 70), st.integers(0, 1))
def test_rows_are_divided_into_staged_and_others(
    borders: set[int], batch_rows: int, first: int
) -> None:
    ends = sorted(borders)
    ranges = list(pairwise(ends))[first::2]
    staged: list[StagedRows] = []
    expected = [False] * 60
    for start, stop in ranges:
        staged.append(staged_of(ROWS, start, stop))
        expected[start:stop] = [True] * (stop - start)
    assert cut(ROWS, staged, batch_rows) == expected


@given(st.integers(0, 59), st.integers(0, 1))
def test_changed_staged_row_is_noticed(row: int, column: int) -> None:
    row_id, text = ROWS[row]
    changed = (row_id, f"{text}x") if column else (f"{row_id}x", text)
    rows = [*ROWS[:row], changed, *ROWS[row + 1 :]]
    staged = [staged_of(ROWS, 10, 20), staged_of(ROWS, 20, 45)]
    if 10 <= row < 45:
        with pytest.raises(TransientError, match="are not those that were staged"):
            cut(rows, staged)
    else:
        cut(rows, staged)


@pytest.mark.parametrize(
    ("rows", "reason"),
    [(ROWS[1:], "its rows 10 to 20"), (ROWS[:15], "it has 15 rows, and 20 were there")],
)
def test_moved_or_missing_staged_rows_are_noticed(rows: Rows, reason: str) -> None:
    with pytest.raises(TransientError, match=reason):
        cut(rows, [staged_of(ROWS, 10, 20)])
