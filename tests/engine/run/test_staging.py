"""Segments as they lie staged, and the file that is put together from them, without a run around them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.errors import Cancelled, TransientError
from surge_dagster.engine.files.facts import InvalidFile, VectorFacts
from surge_dagster.engine.files.formats import PublishedFile
from surge_dagster.engine.files.parquet import read_facts
from surge_dagster.engine.files.rows import matrix_of, row_group_rows
from surge_dagster.engine.model.spec import EncodingSpec, Space
from surge_dagster.engine.run import memory
from surge_dagster.engine.run.rewriting import assemble
from surge_dagster.engine.run.space_target import SpaceTarget
from surge_dagster.engine.run.staging import STAGING, Staging
from surge_dagster.engine.run.superbatch import OpenPartition, Segment, StagedRows
from surge_dagster.engine.sources.content import ContentDigest
from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.engine.store.object_client import StorageOptions
from surge_dagster.engine.store.object_store import open_object_store
from surge_dagster.engine.store.store import Store
from tests.engine.store.object_server import BUCKET, ObjectServer
from tests.small_catalogs import Rows, numbered_rows, partition_of, row_batch_of

KEY = "a key / with.signs"
OPTIONS = StorageOptions(access_key_id="AKIATESTKEY", secret_access_key="secret-of-the-test")


def space_of(dimension: int, dtype: str = "float32") -> Space:
    return EncodingSpec(f"hash://{dimension}", dtype=dtype).resolve()


def target_of(store: Store, space: Space) -> SpaceTarget:
    return SpaceTarget(store, space, "fp32", include_text=True)


def staging_of(store: LocalStore, space: Space) -> Staging:
    store.prepare(space.name)
    return Staging(target_of(store, space))


def vectors(rows: int, space: Space) -> np.ndarray:
    found = np.random.default_rng(rows).standard_normal((rows, space.dimension)).astype(np.float32)
    return (found / np.linalg.norm(found, axis=1, keepdims=True)).astype(space.dtype)


def stage(staging: Staging, opened: OpenPartition, rows: Rows, start: int, matrix: np.ndarray) -> StagedRows:
    batch = row_batch_of(rows[start : start + len(matrix)])
    halves = [batch.ids[: len(batch) // 2], batch.ids[len(batch) // 2 :]]
    segment = Segment(opened, 0, len(matrix), start, (halves[0], halves[1]), last=False)
    return staging.write(segment, batch.texts, matrix, VectorFacts(start // 10, rows_encoded=len(matrix)))


def opened_of(rows: Rows) -> OpenPartition:
    digest = ContentDigest()
    digest.update(row_batch_of(rows))
    return OpenPartition(partition_of(KEY, rows), len(rows), id_type=pa.string(), content_digest=digest.hexdigest())


def assemble_segments(
    store: LocalStore, space: Space, staging: Staging, opened: OpenPartition, segments: list[StagedRows]
) -> PublishedFile:
    opened.staged = segments
    return assemble(target_of(store, space), staging, opened, lambda: None)


class TestSegments:
    SPACE = space_of(16)
    ROWS = numbered_rows("k", 60)

    def test_staged_rows_are_found_by_the_next_run(self, tmp_path: Path) -> None:
        store, opened = LocalStore(tmp_path), opened_of(self.ROWS)
        staging = staging_of(store, self.SPACE)
        written = [stage(staging, opened, self.ROWS, start, vectors(20, self.SPACE)) for start in (20, 0)]
        assert staging.knows(KEY)
        again = staging_of(store, self.SPACE)
        assert again.usable(opened.source) == written[::-1]
        assert not again.knows("another")

    def test_overlapping_segments_are_not_used_together(self, tmp_path: Path) -> None:
        store, opened = LocalStore(tmp_path), opened_of(self.ROWS)
        staging = staging_of(store, self.SPACE)
        for start, stop in ((0, 20), (0, 30), (25, 50), (30, 60)):
            stage(staging, opened, self.ROWS, start, vectors(stop - start, self.SPACE))
        found = staging_of(store, self.SPACE).usable(opened.source)
        assert [(rows.start, rows.stop) for rows in found] == [(0, 30), (30, 60)]

    @pytest.mark.parametrize("other", ["precision", "include_text", "source_version"])
    def test_segments_with_other_settings_are_not_used_and_stay_until_publication(
        self, tmp_path: Path, other: str
    ) -> None:
        store, opened = LocalStore(tmp_path), opened_of(self.ROWS)
        stage(staging_of(store, self.SPACE), opened, self.ROWS, 0, vectors(20, self.SPACE))
        precision = "bf16" if other == "precision" else "fp32"
        again = Staging(SpaceTarget(store, self.SPACE, precision, include_text=other != "include_text"))
        wanted = replace(opened.source, source_version="v2") if other == "source_version" else opened.source
        assert again.usable(wanted) == []
        assert len(staging_of(store, self.SPACE).usable(opened.source)) == 1, "the other run can go on with it"
        again.remove(opened.key)
        assert not (tmp_path / STAGING).exists()

    def test_segment_with_an_invalid_vector_is_not_used(self, tmp_path: Path) -> None:
        store, opened = LocalStore(tmp_path), opened_of(self.ROWS)
        matrix = vectors(20, self.SPACE)
        matrix[7] = np.nan
        stage(staging_of(store, self.SPACE), opened, self.ROWS, 0, matrix)
        assert staging_of(store, self.SPACE).usable(opened.source) == []

    def test_segment_is_not_a_valid_output_file(self, tmp_path: Path) -> None:
        store, opened = LocalStore(tmp_path), opened_of(self.ROWS)
        stage(staging_of(store, self.SPACE), opened, self.ROWS, 0, vectors(20, self.SPACE))
        [path] = (tmp_path / STAGING).rglob("*.parquet")
        with pytest.raises(InvalidFile, match="its metadata name the format 'segment 2'"):
            read_facts(pq.read_metadata(path))

    def test_temp_files_of_a_dead_writer_are_removed_when_the_next_run_begins(self, tmp_path: Path) -> None:
        folder = tmp_path / STAGING / self.SPACE.name / "key" / "version"
        folder.mkdir(parents=True)
        (folder / ".tmp-1-0123456789ab").write_bytes(b"half")
        staging_of(LocalStore(tmp_path), self.SPACE)
        assert not (tmp_path / STAGING).exists()

    def test_run_lists_a_bucket_once_and_stages_each_segment_with_one_request(
        self, object_server: ObjectServer
    ) -> None:
        store = open_object_store(f"s3://{BUCKET}/out", replace(OPTIONS, endpoint=object_server.url))
        staging, opened = Staging(target_of(store, self.SPACE)), opened_of(self.ROWS)
        assert [method for method, _, _ in object_server.log] == ["GET"], "a listing"
        for start in (0, 20):
            stage(staging, opened, self.ROWS, start, vectors(20, self.SPACE))
        assert [method for method, _, _ in object_server.log[1:]] == ["PUT", "PUT"]

    def test_folder_that_another_run_removed_is_created_again(self, tmp_path: Path) -> None:
        store, opened = LocalStore(tmp_path), opened_of(self.ROWS)
        staging = staging_of(store, self.SPACE)
        stage(staging, opened, self.ROWS, 0, vectors(20, self.SPACE))
        other = staging_of(store, self.SPACE)
        other.remove(KEY)
        assert not (tmp_path / STAGING).exists()
        stage(staging, opened, self.ROWS, 20, vectors(20, self.SPACE))
        assert len(list((tmp_path / STAGING).rglob("*.parquet"))) == 1


class TestAssembly:
    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    def test_assembled_file_has_every_row_and_stays_within_the_readers_share(self, tmp_path: Path, dtype: str) -> None:
        space = space_of(384, dtype)
        rows = numbered_rows("k", 20_000, words=10)
        matrix = vectors(len(rows), space)
        store, opened = LocalStore(tmp_path), opened_of(rows)
        staging = staging_of(store, space)
        borders = [0, 7_000, 7_001, 16_000, 20_000]
        segments = [stage(staging, opened, rows, start, matrix[start:stop]) for start, stop in pairwise(borders)]
        before = pa.default_memory_pool()
        watched = pa.proxy_memory_pool(before)
        pa.set_memory_pool(watched)
        try:
            published = assemble_segments(store, space, staging, opened, segments)
        finally:
            pa.set_memory_pool(before)
        assert 0 < watched.max_memory() < memory._READER_BYTES
        assert published.facts.rows == 20_000
        assert published.facts.content_digest == opened.content_digest
        assert published.facts.truncated == sum(border // 10 for border in borders[:-1])
        with pq.ParquetFile(tmp_path / published.stored.name, page_checksum_verification=True) as reader:
            groups = [reader.metadata.row_group(n).num_rows for n in range(reader.num_row_groups)]
            full = row_group_rows(384, np.dtype(dtype).itemsize)
            assert max(groups) <= full
            assert len(groups) == -(-len(rows) // full), "all are full but the last"
            [whole] = reader.read().combine_chunks().to_batches()
        assert whole.column("id").to_pylist() == [row[0] for row in rows]
        assert whole.column("text").to_pylist() == [row[1] for row in rows]
        np.testing.assert_array_equal(matrix_of(whole), matrix)

    def test_segment_that_was_replaced_by_one_of_other_rows_is_refused(self, tmp_path: Path) -> None:
        space, rows = space_of(16), numbered_rows("k", 40)
        store, opened = LocalStore(tmp_path), opened_of(rows)
        staging = staging_of(store, space)
        segments = [stage(staging, opened, rows, start, vectors(20, space)) for start in (0, 20)]
        stage(staging, opened, numbered_rows("other", 40), 20, vectors(20, space))
        with pytest.raises(TransientError, match="it holds other rows than those that were staged"):
            assemble_segments(store, space, staging, opened, segments)
        assert list(store.list(space.name)) == []

    def test_cancelled_assembly_leaves_only_the_segments(self, tmp_path: Path) -> None:
        space, rows = space_of(16), numbered_rows("k", 20)
        store, opened = LocalStore(tmp_path), opened_of(rows)
        staging = staging_of(store, space)
        segments = [stage(staging, opened, rows, 0, vectors(20, space))]

        def cancel() -> None:
            raise Cancelled

        opened.staged = segments
        with pytest.raises(Cancelled):
            assemble(target_of(store, space), staging, opened, cancel)
        assert {path.name for path in (tmp_path / space.name).iterdir()} <= {".lock"}
        assert staging_of(store, space).usable(opened.source) == segments

    def test_assembly_does_not_begin_when_the_source_has_changed(self, tmp_path: Path) -> None:
        space, rows = space_of(16), numbered_rows("k", 20)
        store, opened = LocalStore(tmp_path), opened_of(rows)
        opened.source = replace(opened.source, current_source_version=lambda: "v2")
        with pytest.raises(TransientError, match="its source changed while it was encoded"):
            assemble_segments(store, space, staging_of(store, space), opened, [])
