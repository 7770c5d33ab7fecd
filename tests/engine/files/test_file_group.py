"""Files of many tiny partitions at once: every byte is what each of them would have been written with by itself."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surge_dagster.engine.files import file_template as module
from surge_dagster.engine.files.embedding_file import LEAST_COMPRESSED_BYTES, FileFacts, FileRows
from surge_dagster.engine.files.file_group import GroupRows, fits, group_files
from surge_dagster.engine.files.small_file import MAX_ROWS, small_file, write_file
from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.engine.store.store import Upload

ID_TYPES = [pa.string(), pa.int64(), pa.binary()]


def facts_of(bounds: Sequence[int], dimension: int, key: str = "shoes") -> list[FileFacts]:
    return [
        FileFacts(f"{key}{place}", "space", "model", "fp32", "v1", "0" * 32, "1" * 32, end - first, dimension, place)
        for place, (first, end) in enumerate(pairwise(bounds))
    ]


def one_by_one(folder: Path, rows: GroupRows, facts: Sequence[FileFacts]) -> list[bytes]:
    """The files as `write_file` writes them."""
    store, files = LocalStore(folder), []
    store.prepare("")
    for said, (first, end) in zip(facts, pairwise(rows.bounds), strict=True):
        with store.create("one") as upload:
            texts = None if rows.texts is None else rows.texts[first:end]
            ids: list[pa.Array] = [rows.ids[first:end]]
            write_file(upload, FileRows(ids, rows.ids.type, texts, rows.matrix[first:end]), said)
            stored = upload.publish(lambda: None)
        files.append(store.open(stored.name).read())
    return files


@pytest.mark.parametrize("kind", ID_TYPES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("include_text", [True, False])
def test_files_of_every_form_are_those_of_the_writer_of_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: pa.DataType, dtype: str, include_text: bool
) -> None:
    random = np.random.default_rng(1)
    bounds = [0, *accumulate((1, 10, 2, MAX_ROWS, 10, 1))]
    numbers = range(-3, bounds[-1] - 3)
    ids = pa.array(numbers if kind == pa.int64() else [f"ä{number}" for number in numbers], kind)
    texts = pa.array([f"text {number}" for number in numbers], pa.large_string()) if include_text else None
    for dimension in (1, 8, 384):
        matrix = random.normal(size=(bounds[-1], dimension)).astype(dtype)
        rows, facts = GroupRows(ids, texts, matrix, bounds), facts_of(bounds, dimension)
        assert list(group_files(rows, facts)) == one_by_one(tmp_path, rows, facts)
    assert caplog.text == "", "a form that is not known is written correctly too, but slowly"


@pytest.mark.parametrize("kind", ID_TYPES, ids=str)
@pytest.mark.parametrize("include_text", [True, False])
@pytest.mark.parametrize("dimension", [1, 384])
def test_checksums_of_any_length_move_what_follows_and_nothing_else(
    kind: pa.DataType, include_text: bool, dimension: int
) -> None:
    """One in sixteen takes a byte less, and files with integer ids alone differ in nothing else."""
    random = np.random.default_rng(3)
    for rows in range(1, 21):
        bounds = list(range(0, 40 * rows + 1, rows))
        numbers = random.integers(0, 900_000, bounds[-1]).tolist()
        ids = pa.array(numbers if kind == pa.int64() else [f"{number:06}" for number in numbers], kind)
        texts = pa.array([f"text {number:06}" for number in numbers], pa.large_string()) if include_text else None
        group = GroupRows(ids, texts, random.normal(size=(bounds[-1], dimension)).astype("float32"), bounds)
        facts = facts_of(bounds, dimension)
        alone = [
            small_file(
                FileRows([ids[first:end]], kind, None if texts is None else texts[first:end], group.matrix[first:end]),
                said,
            )
            for said, (first, end) in zip(facts, pairwise(bounds), strict=True)
        ]
        assert list(group_files(group, facts)) == alone, rows


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    partitions=st.lists(st.lists(st.text(max_size=80), min_size=1, max_size=4), min_size=1, max_size=4),
    key=st.text(min_size=1, max_size=300).filter(lambda key: key.isprintable()),
)
def test_whatever_stands_in_them(partitions: list[list[str]], key: str) -> None:
    bounds = [0, *accumulate(map(len, partitions))]
    words = ["left out", *[text for texts in partitions for text in texts]]
    texts = pa.array(words, pa.large_string())[1:]
    ids = pa.array([f"{text}{row}" for row, text in enumerate(words)])[1:]
    matrix = np.random.default_rng(bounds[-1]).normal(size=(bounds[-1], 12)).astype("float32")
    rows, facts = GroupRows(ids, texts, matrix, bounds), facts_of(bounds, 12, key)
    alone = [
        small_file(FileRows([ids[first:end]], ids.type, texts[first:end], matrix[first:end]), said)  # pyright: ignore[reportArgumentType]
        for said, (first, end) in zip(facts, pairwise(bounds), strict=True)
    ]
    assert list(group_files(rows, facts)) == alone


@pytest.mark.parametrize(
    ("rows", "dimension", "string_bytes", "expected"),
    [
        (10, 384, 500, True),
        (0, 384, 0, False),
        (MAX_ROWS, 512, 1, True),
        (MAX_ROWS + 1, 8, 1, False),
        (10, 20_000, 1, False),
        (10, 8, LEAST_COMPRESSED_BYTES, False),
    ],
)
def test_what_is_tiny(rows: int, dimension: int, string_bytes: int, expected: bool) -> None:
    assert fits(rows, dimension, 4, string_bytes) is expected


def test_a_form_that_is_written_otherwise_is_left_to_the_writer_of_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def otherwise(upload: Upload, rows: FileRows, facts: FileFacts) -> None:
        write_file(upload, rows, facts)
        if len(facts.partition_key) == 300:  # one of those that a template is tried on
            upload.write(b"more")

    monkeypatch.setattr(module, "_templates", {})
    monkeypatch.setattr(module, "write_file", otherwise)
    rows = GroupRows(pa.array(["a", "b", "c"]), None, np.zeros((3, 8), "float32"), [0, 1, 3])
    with caplog.at_level(logging.WARNING):
        assert list(group_files(rows, facts_of(rows.bounds, 8))) == [None, None]
        assert list(group_files(rows, facts_of(rows.bounds, 8))) == [None, None]
    assert caplog.text.count("written one by one") == 2, "once for each number of rows"
