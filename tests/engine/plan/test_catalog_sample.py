"""A sample of a catalog: its bytes, its tokens, and its equal texts, scaled to all partitions."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer

from surge_dagster.engine.encoder.speed import Speed
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.plan.catalog_sample import sample_catalog, token_counter, tokens_by_bytes
from surge_dagster.engine.sources.partition import Partition
from tests.engine.priced_pool import catalog
from tests.engine.runs import in_memory
from tests.small_catalogs import Rows, partition_of

COSTS = Speed.given(0.0, 1.0, 1)
COUNT_TOKENS, _ = token_counter(EncodingSpec("hash://8", max_length=50).resolve(), COSTS)


def counted(key: str, rows: Rows) -> Partition:
    return replace(partition_of(key, rows), rows=len(rows))


@pytest.mark.parametrize("max_length", [16, 256])
def test_tokens_are_those_that_the_model_reads_prompt_included(
    demo_folder: Path, max_length: int
) -> None:
    space = EncodingSpec(
        str(demo_folder), max_length=max_length, document_prompt="passage: "
    ).resolve()
    count, is_exact = token_counter(space, COSTS)
    texts = ["", "a steel bottle", "жёлтый чайник", "unbelievable " * 5_000]
    tokenizer = Tokenizer.from_file(str(demo_folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(max_length)
    assert is_exact
    for text, tokens in zip(texts, count(pa.array(texts, pa.large_string())), strict=True):
        assert tokens == len(tokenizer.encode("passage: " + text).ids)


def test_tokens_without_a_fast_tokenizer_are_those_of_earlier_runs(
    demo_folder: Path, tmp_path: Path
) -> None:
    for file in demo_folder.rglob("*"):
        if file.is_file() and file.name != "tokenizer.json":
            (tmp_path / file.relative_to(demo_folder)).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file.relative_to(demo_folder)).symlink_to(file)
    space = replace(EncodingSpec(str(demo_folder)).resolve(), model_path=str(tmp_path))
    count, is_exact = token_counter(space, replace(COSTS, tokens_per_byte=0.5, equal_share=0.5))
    assert not is_exact
    assert count(pa.array(["four"], pa.large_string())).tolist() == [4.0]


@pytest.mark.parametrize("partitions", [1, 80])
def test_equal_texts_of_a_partition_count_once(partitions: int) -> None:
    rows = [(str(row), f"text {row % 50}") for row in range(100)]
    one = sample_catalog([counted("a", rows)], COUNT_TOKENS).texts

    found = sample_catalog(
        [counted(str(key), rows) for key in range(partitions)], COUNT_TOKENS
    ).texts

    assert found.texts == pytest.approx(50 * partitions)
    assert found.equal_texts == pytest.approx(50 * partitions)
    assert found.tokens / found.text_bytes == pytest.approx(one.tokens / one.text_bytes, rel=0.02)


def test_equal_texts_of_neighbors_count_once_if_they_are_small() -> None:
    small = [counted(str(key), [("1", f"text {key // 5}"), ("2", "the same")]) for key in range(50)]

    found = sample_catalog(small, COUNT_TOKENS).texts

    assert found.texts == 10 + 1
    assert found.equal_texts == 100 - 11


def test_sample_of_tiny_partitions_stands_for_all_of_them() -> None:
    rng = np.random.default_rng(4)
    tiny = []
    for key in range(5_000):
        rows = [(str(row), f"{key} {row} " + "x" * int(rng.integers(200))) for row in range(2)]
        tiny.append(counted(f"{key:04}", rows))

    found = sample_catalog(tiny, COUNT_TOKENS)

    assert found.partitions_read <= 640
    assert found.texts.texts == pytest.approx(10_000, rel=0.02)


def test_tokens_of_texts_of_which_most_are_cut_are_within_two_percent() -> None:
    rng = np.random.default_rng(5)
    rows = [
        (str(row), f"{row} " + "x" * int(size))
        for row, size in enumerate(rng.lognormal(5, 1, 15_000))
    ]
    sample = sample_catalog([counted("a", rows)], COUNT_TOKENS)
    exact = COUNT_TOKENS(pa.array([text for _, text in rows], pa.large_string())).sum()
    assert sample.texts_tokenized == 4096
    assert sample.texts.tokens == pytest.approx(exact, rel=0.02)


def test_long_texts_are_read_and_tokenized_up_to_their_bytes() -> None:
    rows = [(str(row), f"{row} " * 100_000) for row in range(40)]
    others = [(id_, text.replace(" ", ",")) for id_, text in rows]
    partitions = [counted("a", rows), counted("b", others)]
    sample = sample_catalog(partitions, tokens_by_bytes(COSTS))
    assert sample.texts.texts == 80
    assert 10 < sample.texts_tokenized < 50
    assert sample.text_bytes.tolist() == pytest.approx(
        [sum(len(text) for _, text in rows)] * 2, rel=0.2
    )


@pytest.mark.parametrize("listed_per_row", [None, 40])
@pytest.mark.parametrize("sizes", [[300, 20], [30] * 16 + [10] * 200])
def test_bytes_of_all_partitions_are_those_of_their_texts(
    sizes: list[int], listed_per_row: int | None
) -> None:
    rows_of = catalog(sizes)
    partitions = []
    for partition, size in zip(in_memory(rows_of), sizes, strict=True):
        listed = None if listed_per_row is None else listed_per_row * size
        partitions.append(replace(partition, rows=size, text_bytes=listed))
    expected = sum(len(text) for rows in rows_of.values() for _, text in rows)

    sample = sample_catalog(partitions, COUNT_TOKENS)

    assert sample.text_bytes.sum() == pytest.approx(expected, rel=0.02)


def test_partitions_of_unknown_size_have_no_bytes() -> None:
    partitions = list(in_memory(catalog([300, 20])))
    assert sample_catalog(partitions, COUNT_TOKENS).text_bytes.tolist() == [0, 0]
    assert sample_catalog([], COUNT_TOKENS).text_bytes.tolist() == []
