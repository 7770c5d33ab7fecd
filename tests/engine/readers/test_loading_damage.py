"""Loading an output that is damaged, of several spaces or incomplete: errors name the partition and
what to do."""

from __future__ import annotations

import shutil
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest

from surge_dagster import open_embeddings
from surge_dagster.engine.errors import ConfigError, DataError, TransientError
from surge_dagster.engine.files import rows as files_rows
from surge_dagster.engine.model.spec import EncodingSpec
from tests.engine.outputs import Load, Output, both_ways, output
from tests.small_catalogs import make_unreadable

__all__ = ["output"]


class TestSpaces:
    def test_several_spaces_are_listed_and_never_mixed(self, output: Output) -> None:
        other = Output(output.root, EncodingSpec("hash://8"))
        output.put("a", 2)
        other.put("a", 3)
        with pytest.raises(
            ConfigError, match=f"several spaces.*{output.space.name}, {other.space.name}. Name one"
        ):
            open_embeddings(output.root)
        assert open_embeddings(output.root, other.space.name).lazy().collect().height == 3
        with pytest.raises(
            ConfigError, match=f"no space 'x'; it holds {output.space.name}, {other.space.name}"
        ):
            open_embeddings(str(output.root), "x")

    def test_error_for_an_output_without_embeddings_says_what_to_do(
        self, output: Output, tmp_path: Path
    ) -> None:
        with pytest.raises(ConfigError, match=r"holds no embeddings\. Run `surge-dagster embed`"):
            open_embeddings(tmp_path / "nothing")
        with pytest.raises(
            ConfigError, match="is the folder of one space; give the folder above it"
        ):
            open_embeddings(output.root / output.space.name)

    def test_space_without_partitions_loads_empty(self, output: Output) -> None:
        opened = open_embeddings(output.root)
        assert opened.keys() == []
        assert opened.rows == 0
        assert opened.lazy().collect().shape == (0, 4)
        assert opened.dataset().count_rows() == 0

    @both_ways
    def test_file_of_another_space_is_refused(self, output: Output, load: Load) -> None:
        output.put("a", 2)
        output.put("b", 2, space="other-space")
        opened = open_embeddings(output.root)
        assert opened.keys() == ["a"]
        with pytest.raises(
            DataError,
            match=r"partition 'b': .*b\.(parquet|arrow).*vectors of the space 'other-space'",
        ):
            load(opened)
        with pytest.raises(DataError, match="partition 'b'"):
            load(opened, ["a", "b"])
        assert load(opened, ["a"]).num_rows == 2


class TestDamage:
    @pytest.mark.parametrize(
        "damage", ["truncated", "foreign", "another partition's", "another dimension"]
    )
    def test_invalid_file_is_named_and_the_others_can_be_loaded(
        self, output: Output, damage: str
    ) -> None:
        output.put("a", 2)
        output.put("b", 2, dimension=8 if damage == "another dimension" else None)
        if damage == "truncated":
            output.path("b").write_bytes(output.path("b").read_bytes()[:-9])
        elif damage == "foreign":
            pl.DataFrame({"id": ["1"]}).write_parquet(output.path("b"))
        elif damage == "another partition's":
            shutil.copy(output.path("a"), output.path("b"))
        opened = open_embeddings(output.root)
        refused = (
            r"partition 'b': .*b\.parquet' cannot be read because "
            r".*the catalog's job embed_partitions"
        )
        with pytest.raises(DataError, match=refused):
            opened.lazy()
        with pytest.raises(DataError, match="partition 'b'"):
            opened.dataset(["b"])
        assert opened.lazy(["a"]).collect().height == 2

    def test_flipped_bit_is_noticed_while_reading(self, output: Output) -> None:
        output.put("a", 200)
        output.put("b", 200)
        damaged = bytearray(output.path("b").read_bytes())
        damaged[10_000] ^= 1
        output.path("b").write_bytes(damaged)
        opened = open_embeddings(output.root)
        refused = (
            r"partition 'b': .* because .*checksum verification failed"
            r".*launch the catalog's job embed_partitions"
        )
        for engine in ("in-memory", "streaming"):
            with pytest.raises(DataError, match=refused):
                opened.lazy().collect(engine=engine)  # pyright: ignore[reportArgumentType]
        with pytest.raises(OSError, match="checksum verification failed"):
            opened.dataset().to_table()

    def test_flipped_bit_in_a_footer_never_gives_fewer_rows(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Every bit of the bytes that count the rows of a row group."""
        monkeypatch.setattr(files_rows, "_ROW_GROUP_BYTES", 30 * 4 * 4)
        output = Output(tmp_path, EncodingSpec("hash://4"))
        output.put("a", 100)
        content = output.path("a").read_bytes()
        footer = range(
            len(content) - 8 - int.from_bytes(content[-8:-4], "little"), len(content) - 8
        )
        counts = [place for place in footer if content[place] == 2 * 30]  # 30 as Parquet writes it
        noticed = 0

        for bit in range(8 * len(counts)):
            output.path("a").write_bytes(content)
            # as if facts came from the cache of a bucket's footers
            known = open_embeddings(tmp_path).dataset()
            damaged = bytearray(content)
            damaged[counts[bit // 8]] ^= 1 << bit % 8
            output.path("a").write_bytes(damaged)
            for load in (
                lambda: open_embeddings(tmp_path).dataset().to_table(),
                lambda: open_embeddings(tmp_path).lazy().collect().to_arrow(),
                known.to_table,
            ):
                try:
                    assert load().num_rows == 100
                except (DataError, OSError, pa.ArrowException, UnicodeError):
                    noticed += 1
        assert noticed > 50

    def test_unreadable_file_is_not_reported_as_damaged(
        self, output: Output, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        output.put("a", 200)
        opened = open_embeddings(output.root)
        frame = open_embeddings(output.root).lazy()
        make_unreadable(monkeypatch, output.name("a"))
        refused = "could not be read: Permission denied. Give the user that runs this the right"
        with pytest.raises(TransientError, match=f"partition 'a': .*{refused}"):
            frame.collect()
        monkeypatch.undo()
        output.path("a").unlink()
        output.path("a").mkdir()
        with pytest.raises(
            TransientError, match=r"Is a directory. Check the disk and its permissions"
        ):
            opened.lazy()

    def test_partitions_that_are_missing_or_have_ids_of_two_types_are_named(
        self, output: Output
    ) -> None:
        output.put("a", 2)
        output.put("b", 2, id_type=pa.int64())
        opened = open_embeddings(output.root)
        with pytest.raises(
            ConfigError, match=r"no embeddings of 'k0', .*'k4' and 2 others. Embed them first"
        ):
            opened.lazy(["a", *(f"k{number}" for number in range(7))])
        with pytest.raises(ConfigError, match="no embeddings of 'c'"):
            opened.facts("c")
        with pytest.raises(
            DataError,
            match="partition 'b': its column 'id' has type int64, and that of 'a' has type string",
        ):
            opened.lazy()
        assert opened.dataset(["b"]).to_table()["id"].to_pylist() == [0, 1]
