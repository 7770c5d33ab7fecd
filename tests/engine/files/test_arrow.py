"""Arrow files: the rows and facts of a Parquet file, nothing damaged unnoticed although the format has no checksums."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from surge_dagster.engine.files.arrow import FORMAT, ArrowFile, ArrowWriter
from surge_dagster.engine.files.facts import FileFacts, InvalidFile, guarded_metadata
from surge_dagster.engine.files.formats import END_BYTES, read_published_file, write_file
from surge_dagster.engine.files.rows import FileRows, check_schema, row_group_rows, schema
from surge_dagster.engine.readers.tables import filesystem_of
from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.engine.store.local_upload import LocalUpload
from surge_dagster.engine.support.text_hash import text_hashes

FACTS = FileFacts("Köln", "hash-16-abc", "hash://16", "fp32", "v1", "0" * 32, "1" * 32, 200, 16, 2)
ID_TYPES = [pa.string(), pa.int64(), pa.binary()]


def vectors(rows: int, dimension: int = 16, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(3).standard_normal((rows, dimension)).astype(dtype)


def texts_of(rows: int, words: int = 4) -> pa.Array:
    return pa.array([" ".join([f"text-{row}"] * words) for row in range(rows)], pa.large_string())


def ids_of(rows: int, id_type: pa.DataType = ID_TYPES[0]) -> pa.Array:
    return pa.array([str(row) for row in range(rows)]).cast(id_type)


def content_of(matrix: np.ndarray, facts: FileFacts | None = None, *, pieces: int = 1, words: int = 4) -> bytes:
    """A file with these vectors, written in so many pieces."""
    (rows, dimension), sink = matrix.shape, pa.BufferOutputStream()
    ids, texts = ids_of(rows), texts_of(rows, words)
    columns = schema(ids.type, dimension, str(matrix.dtype), include_text=True)
    said = facts or replace(FACTS, rows=rows, dimension=dimension)
    with ArrowWriter(sink, columns, guarded_metadata(said, FORMAT)) as writer:
        for part in np.array_split(np.arange(rows), pieces):
            if len(part):
                cut = slice(int(part[0]), int(part[-1]) + 1)
                part_rows = FileRows([ids[cut]], ids.type, texts[cut], text_hashes(texts[cut]), matrix[cut])
                writer.append_table(part_rows.table(columns))
        writer.close()
    return sink.getvalue().to_pybytes()


def rows_of(path: Path, *, mapped: bool = False) -> pa.Table:
    with ArrowFile(pa.OSFile(str(path)), mapped=mapped) as file:
        check_schema(file.columns, dimension=16, dtype="float32")
        return pa.Table.from_batches(file.read(), schema=file.columns)


class TestFormat:
    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    @pytest.mark.parametrize("id_type", ID_TYPES)
    @pytest.mark.parametrize("include_text", [True, False])
    def test_rows_are_those_that_were_written_and_the_columns_those_of_parquet(
        self, tmp_path: Path, dtype: str, id_type: pa.DataType, include_text: bool
    ) -> None:
        matrix, ids = vectors(50, 3, dtype), ids_of(50, id_type)
        upload = LocalUpload(tmp_path, "f")
        with upload:
            texts = texts_of(50) if include_text else None
            rows = FileRows([ids[:7], ids[7:]], id_type, texts, text_hashes(texts_of(50)), matrix)
            write_file("arrow", upload, rows, replace(FACTS, rows=50, dimension=3))
            upload.publish(lambda: None)
        table = pa.ipc.open_file(tmp_path / "f").read_all()
        table.validate(full=True)
        assert table.schema.equals(schema(id_type, 3, dtype, include_text=include_text), check_metadata=True)
        assert table["id"].combine_chunks().equals(ids)
        assert not include_text or table["text"].combine_chunks().equals(texts_of(50))
        found = table["embedding"].combine_chunks().flatten().to_numpy(zero_copy_only=False).reshape(50, 3)
        np.testing.assert_array_equal(found, matrix)
        with ArrowFile(pa.OSFile(str(tmp_path / "f"))) as file:
            assert pa.Table.from_batches(file.read()).equals(table)

    def test_pyarrow_and_polars_read_the_rows_and_the_facts(self, tmp_path: Path) -> None:
        path = tmp_path / "f.arrow"
        path.write_bytes(content_of(vectors(200)))
        expected = pl.DataFrame(pl.from_arrow(rows_of(path)))
        assert pl.read_ipc(path).equals(expected)
        assert pl.scan_ipc(path).filter(pl.col("id") == "7").collect().equals(expected[7])
        assert ds.dataset(path, format="ipc").to_table().num_rows == 200
        assert pa.ipc.open_stream(path.read_bytes()[8:]).read_all().num_rows == 200
        assert dict(pa.ipc.open_file(path).metadata) == guarded_metadata(FACTS, FORMAT)

    @pytest.mark.parametrize(("dimension", "full"), [(384, row_group_rows(384, 4)), (16, 1024)])
    def test_record_batches_are_bounded_in_bytes_and_rows(self, tmp_path: Path, dimension: int, full: int) -> None:
        (tmp_path / "f").write_bytes(content_of(vectors(2_500, dimension)))
        reader = pa.ipc.open_file(tmp_path / "f")
        sizes = [reader.get_batch(number).num_rows for number in range(reader.num_record_batches)]
        assert sizes[:-1] == [full] * (2_500 // full) and sum(sizes) == 2_500

    def test_several_pieces_make_the_same_rows_as_one(self, tmp_path: Path) -> None:
        (tmp_path / "one").write_bytes(content_of(vectors(100)))
        (tmp_path / "many").write_bytes(content_of(vectors(100), pieces=7))
        assert pa.ipc.open_file(tmp_path / "many").num_record_batches == 7
        assert rows_of(tmp_path / "one").equals(rows_of(tmp_path / "many"))

    def test_no_rows_make_a_valid_file(self, tmp_path: Path) -> None:
        (tmp_path / "f").write_bytes(content_of(vectors(0)))
        assert rows_of(tmp_path / "f").num_rows == 0 == pa.ipc.open_file(tmp_path / "f").read_all().num_rows

    def test_columns_and_batches_can_be_read_alone(self, tmp_path: Path) -> None:
        (tmp_path / "f").write_bytes(content_of(vectors(100), pieces=4))
        whole = rows_of(tmp_path / "f")
        with ArrowFile(pa.OSFile(str(tmp_path / "f"))) as file:
            ids = pa.Table.from_batches(file.read(columns=["id"], batch_rows=10))
            assert ids.equals(whole.select(["id"])) and file.groups == 4
            assert pa.Table.from_batches(file.read(groups=[2])).equals(whole.slice(50, 25))
            assert file.group_bytes(2) >= 25 * 16 * 4

    def test_group_bytes_cover_one_batch_with_long_texts_among_short_ones(self, tmp_path: Path) -> None:
        columns = schema(pa.string(), 16, "float32", include_text=True)
        with pa.OSFile(str(tmp_path / "f"), "wb") as sink:
            writer = ArrowWriter(sink, columns, guarded_metadata(replace(FACTS, rows=50), FORMAT))
            for words in (*[1] * 24, 10_000, *[1] * 25):
                texts = texts_of(1, words)
                row = FileRows([ids_of(1)], pa.string(), texts, text_hashes(texts), vectors(1))
                writer.append_table(row.table(columns))
            writer.close()
        with ArrowFile(pa.OSFile(str(tmp_path / "f"))) as file:
            [batch] = file.read(groups=[24])
            assert file.group_bytes(24) >= batch.nbytes > 50_000


class TestMapped:
    def test_what_is_read_is_the_file_itself(self, tmp_path: Path) -> None:
        (tmp_path / "f").write_bytes(content_of(vectors(70_000)))
        before = pa.total_allocated_bytes()
        with ArrowFile(pa.OSFile(str(tmp_path / "f")), mapped=True) as file:
            batches = list(file.read(batch_rows=100_000))
            assert pa.total_allocated_bytes() - before < 100_000, "the vectors alone have 4 MB"
        assert pa.Table.from_batches(batches).equals(rows_of(tmp_path / "f")), "also after it was closed"

    def test_dataset_reads_the_file_itself_too_and_keeps_no_file_open(self, tmp_path: Path) -> None:
        (tmp_path / "f.arrow").write_bytes(content_of(vectors(70_000)))
        form, filesystem = ds.IpcFileFormat(), filesystem_of(LocalStore(tmp_path))
        columns = schema(pa.string(), 16, "float32", include_text=True)
        dataset = ds.FileSystemDataset([form.make_fragment("f.arrow", filesystem)] * 20, columns, form, filesystem)
        before = pa.total_allocated_bytes()
        table = dataset.to_table(columns=["embedding"])
        assert pa.total_allocated_bytes() - before < 20 * 100_000
        opened = [link.resolve() for link in Path("/proc/self/fd").iterdir() if link.exists()]
        assert opened.count((tmp_path / "f.arrow").resolve()) < 10, "of 20; Arrow may be closing the last ones"
        assert table.slice(0, 70_000).equals(rows_of(tmp_path / "f.arrow").select(["embedding"]))
        assert len(table) == 20 * 70_000


class TestDamage:
    def test_no_flipped_bit_gives_other_rows_or_facts(self, tmp_path: Path) -> None:
        content, chance = content_of(vectors(200), FACTS, pieces=3), random.Random(11)
        path = tmp_path / "f.arrow"
        path.write_bytes(content)
        reference = rows_of(path)
        form, store = ds.IpcFileFormat(), LocalStore(tmp_path)
        end = len(content) - 10 - int.from_bytes(content[-10:-6], "little")
        places = [*range(16), *chance.sample(range(end), 150), *chance.sample(range(end, len(content)), 150)]
        noticed = {False: 0, True: 0}
        for place in [*places, *range(len(content) - 12, len(content))]:
            damaged = bytearray(content)
            damaged[place] ^= 1 << chance.randrange(8)
            path.unlink()  # the old one may still be mapped
            path.write_bytes(damaged)
            for mapped in (False, True):
                try:
                    with ArrowFile(pa.OSFile(str(path)), mapped=mapped) as file:
                        assert file.facts == FACTS, place
                        assert pa.Table.from_batches(file.read()).equals(reference), place
                except InvalidFile:
                    noticed[mapped] += 1
            try:
                fragment = form.make_fragment("f.arrow", filesystem_of(store))
                assert fragment.to_table().equals(reference), place
            except (OSError, pa.ArrowException):
                pass
            try:
                assert read_published_file(store, "f.arrow").facts == FACTS, place
            except InvalidFile:
                continue
            assert place < len(content) - 10, "what the end of the file says is always refused"
        assert noticed[False] == noticed[True] > 280

    def test_error_names_the_damaged_column_and_other_columns_are_read(self, tmp_path: Path) -> None:
        content = bytearray(content_of(vectors(200)))
        content[content.index(b"text-150")] ^= 1
        (tmp_path / "f").write_bytes(content)
        with ArrowFile(pa.OSFile(str(tmp_path / "f"))) as file:
            assert sum(map(len, file.read(columns=["id"]))) == 200
            with pytest.raises(InvalidFile, match=r"checksum .* failed: column 'text' of record batch 0 was changed"):
                list(file.read(columns=["id", "text"]))

    def test_damaged_list_of_checksums_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "k.arrow"
        content = content_of(vectors(20))
        path.write_bytes(content.replace(b"embedding:", b"embedding;"))
        assert path.read_bytes() != content
        with pytest.raises(InvalidFile, match="record batch 0 was changed"):
            rows_of(path)

    def test_swapped_record_batches_are_refused(self, tmp_path: Path) -> None:
        content = content_of(vectors(200), pieces=2)
        reader = pa.ipc.open_file(content)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, reader.schema, metadata=dict(reader.metadata)) as writer:
            for number in (1, 0):
                batch, checksums = reader.get_batch_with_custom_metadata(number)
                writer.write_batch(batch, custom_metadata=checksums)
        (tmp_path / "f").write_bytes(sink.getvalue())
        with pytest.raises(InvalidFile, match="checksum verification failed"):
            rows_of(tmp_path / "f")

    @pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.999])
    def test_truncated_file_is_refused(self, tmp_path: Path, share: float) -> None:
        content = content_of(vectors(200))
        (tmp_path / "f").write_bytes(content[: int(len(content) * share)])
        with pytest.raises(InvalidFile):
            rows_of(tmp_path / "f")

    def test_another_number_of_rows_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "f").write_bytes(content_of(vectors(3), FACTS))
        with pytest.raises(InvalidFile, match="promise 200 rows and it has 3"):
            rows_of(tmp_path / "f")

    def test_arrow_file_of_another_program_is_refused(self, tmp_path: Path) -> None:
        pl.DataFrame({"id": ["1"]}).write_ipc(tmp_path / "f.arrow")
        with pytest.raises(InvalidFile, match="name the format None; expected 'arrow-3'"):
            read_published_file(LocalStore(tmp_path), "f.arrow")


class TestEnd:
    def test_one_read_of_the_end_returns_facts_and_columns(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "f.arrow").write_bytes(content_of(vectors(20_000), replace(FACTS, rows=20_000)))
        read: list[int] = []
        original = LocalStore.read_end
        monkeypatch.setattr(LocalStore, "read_end", lambda *given: read.append(given[2]) or original(*given))
        assert read_published_file(LocalStore(tmp_path), "f.arrow").facts == replace(FACTS, rows=20_000)
        assert read == [END_BYTES]

    def test_end_of_many_record_batches_takes_two_reads(self, tmp_path: Path) -> None:
        content = content_of(vectors(400), replace(FACTS, rows=400), pieces=400)
        (tmp_path / "f.arrow").write_bytes(content)
        assert int.from_bytes(content[-10:-6], "little") > END_BYTES
        assert read_published_file(LocalStore(tmp_path), "f.arrow").facts.rows == 400
        assert rows_of(tmp_path / "f.arrow").num_rows == 400

    @pytest.mark.parametrize("key", ["a\0b", "", "\udcff", "surge.crc32", "x" * 20_000])
    def test_every_partition_key_is_read_back_from_the_file(self, tmp_path: Path, key: str) -> None:
        facts = replace(FACTS, partition_key=key, rows=2)
        (tmp_path / "f.arrow").write_bytes(content_of(vectors(2), facts))
        found = read_published_file(LocalStore(tmp_path), "f.arrow").facts.partition_key
        assert found == key.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
