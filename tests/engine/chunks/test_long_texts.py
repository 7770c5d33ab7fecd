"""Texts that are longer than the model reads: truncated, refused or set aside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster import embed
from surge_dagster.config.settings import load_settings
from surge_dagster.engine.chunks.long_texts import LongText, without_long_texts
from surge_dagster.engine.errors import ConfigError, DataError
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.tables.opening import open_source

SHORT = "A steel bottle."
LONG = "steel " * 500
HASHES = EncodingSpec("hash://16")


def partition_in(folder: Path, texts: list[str], long_text: LongText, **spec: Any) -> Partition:
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), folder / "a.parquet")
    chosen = EncodingSpec(**spec) if spec else HASHES
    [partition] = without_long_texts(open_source(folder), chosen, long_text)
    return partition


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.engine.encoder import tiny_models

    return str(tiny_models.bert_cls(tmp_path_factory.mktemp("bert")))


def test_long_text_refuses_its_partition_by_row(tmp_path: Path) -> None:
    partition = partition_in(tmp_path, [SHORT, LONG * 4, SHORT], "refuse")

    with pytest.raises(DataError, match=r"row 1: the text has more than the 256 tokens") as refused:
        list(partition.read())

    assert "set long_text to set_aside or truncate" in refused.value.remedy


def test_long_texts_are_set_aside_and_named(tmp_path: Path, bert: str) -> None:
    texts = [LONG, SHORT, "A hat.", LONG]

    [batch] = partition_in(tmp_path, texts, "set_aside", model=bert).read()

    assert batch.texts.to_pylist() == [SHORT, "A hat."]
    assert batch.ids.to_pylist() == [1, 2]
    assert [(row.row, row.id, row.kind) for row in batch.rejected] == [
        (0, "0", "invalid"),
        (3, "3", "invalid"),
    ]
    assert "more than the 64 tokens that the model reads" in batch.rejected[0].reason
    assert batch.source_rows + len(batch.rejected) == 4


@pytest.mark.parametrize("words", [61, 62, 63])
def test_text_is_too_long_exactly_when_the_worker_truncates_it(
    tmp_path: Path, bert: str, words: int
) -> None:
    """The model reads 64 tokens, two of which are its own."""
    [batch] = partition_in(tmp_path, ["steel " * words], "set_aside", model=bert).read()

    assert len(batch.rejected) == int(words > 62)


def test_prompt_counts(tmp_path: Path, bert: str) -> None:
    texts = ["steel " * 62]

    [batch] = partition_in(
        tmp_path, texts, "set_aside", model=bert, document_prompt="a bottle: "
    ).read()

    assert len(batch.rejected) == 1


def test_another_setting_is_another_source_version(tmp_path: Path) -> None:
    partition_in(tmp_path, [SHORT], "truncate")
    settings: tuple[LongText, ...] = ("truncate", "refuse", "set_aside")

    sources = [without_long_texts(open_source(tmp_path), HASHES, setting) for setting in settings]
    [[truncate], [refuse], [set_aside]] = map(list, sources)

    assert refuse.source_version == f"{truncate.source_version}?long_text=refuse"
    assert set_aside.source_version == f"{truncate.source_version}?long_text=set_aside"
    assert refuse.current_source_version() == refuse.source_version


def test_removed_partition_has_no_version(tmp_path: Path) -> None:
    partition = partition_in(tmp_path, [SHORT], "refuse")
    (tmp_path / "a.parquet").unlink()

    assert partition.current_source_version() is None


def test_setting_reaches_a_run(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for key, text in (("a", SHORT), ("b", LONG * 4)):
        pq.write_table(
            pa.table({"id": [1, 2], "text": [SHORT, text]}), tmp_path / f"in/{key}.parquet"
        )

    report = embed(
        tmp_path / "in",
        tmp_path / "out",
        model="hash://16",
        long_text="refuse",
        quiet=True,
        raise_on_failure=False,
    )

    assert [failure.key for failure in report.partitions_failed] == ["b"]
    assert report.partitions_written == 1


def test_chunks_exclude_it(tmp_path: Path, bert: str) -> None:
    settings = load_settings(
        source=str(tmp_path),
        output=str(tmp_path / "out"),
        model=bert,
        chunks={},
        long_text="refuse",
    )

    with pytest.raises(ConfigError, match="long_text is 'refuse', and of texts in chunks"):
        settings.open_source()


def test_model_without_a_tokenizer_that_counts_is_refused(tmp_path: Path) -> None:
    from tests.engine.encoder import tiny_models

    static = str(tiny_models.static_embedding(tmp_path / "model"))
    partition = partition_in(tmp_path / "in", [SHORT], "refuse", model=static)

    with pytest.raises(ConfigError, match="long_text needs a model with a fast tokenizer"):
        list(partition.read())


def test_rows_are_numbered_as_in_the_source(tmp_path: Path, bert: str) -> None:
    table = pa.table({"id": [None, "b", "c", "d", "e"], "text": [SHORT, LONG, " ", SHORT, LONG]})
    pq.write_table(table, tmp_path / "a.parquet")
    selection = {"missing_text": "skip", "bad_rows": "set_aside"}
    source = open_source(tmp_path, **selection)  # pyright: ignore[reportArgumentType]

    [partition] = without_long_texts(source, EncodingSpec(model=bert), "set_aside")
    [batch] = partition.read()

    assert [(row.row, row.id) for row in batch.rejected] == [(0, None), (1, "b"), (4, "e")]
    assert batch.row_numbers(0).tolist() == [3]
