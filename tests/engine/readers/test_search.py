"""`search` gives what comparing a query with every row gives, with equal texts once."""

from __future__ import annotations

import random

import numpy as np
import pytest

from surge_dagster.engine.encoder.worker.backends import hash_vectors
from surge_dagster.engine.files import rows as file_rows
from surge_dagster.engine.readers.search import search
from tests.engine.runs import Output, in_memory
from tests.small_catalogs import DIMENSION, Rows, numbered_rows, texts_of

QUERIES = ["a/1", "something else", "b/7 b/7 b/7"]


def nearest(rows: Rows, query: str, k: int) -> tuple[list[str], np.ndarray]:
    """The nearest distinct texts, and their cosines."""
    texts = sorted(set(texts_of(rows)))
    [vector] = hash_vectors([query], DIMENSION)
    scores = hash_vectors(texts, DIMENSION) @ vector
    places = np.argsort(-scores, kind="stable")[:k]
    return np.array(texts)[places].tolist(), scores[places]


@pytest.mark.parametrize("batch_bytes", [2_000, 1 << 20])
@pytest.mark.parametrize("k", [1, 5, 40])
def test_results_are_those_of_brute_force_where_texts_repeat(
    output: Output, monkeypatch: pytest.MonkeyPatch, k: int, batch_bytes: int
) -> None:
    rows: Rows = [*numbered_rows("a", 30), *numbered_rows("b", 10)]
    near, _ = nearest(rows, QUERIES[0], 5)
    repeated = [*texts_of(rows), *near * 12]
    draw = random.Random(7)
    catalog: dict[str, Rows] = {}
    for key in ("a", "b", "c"):
        draw.shuffle(repeated)
        catalog[key] = list(zip(map(str, range(len(repeated))), repeated, strict=True))
    output.embed(in_memory(catalog))
    monkeypatch.setattr(file_rows, "READ_BYTES", batch_bytes)

    for query, hits in zip(QUERIES, search(output.store, output.pool, QUERIES, k), strict=True):
        texts, scores = nearest(rows, query, k)
        for hit, text, score in zip(hits, texts, scores, strict=True):
            assert hit.text == text
            assert hit.score == pytest.approx(score, abs=1e-5)
            assert (hit.id, hit.text) in catalog[hit.key]


@pytest.mark.parametrize("include_text", [True, False])
def test_hit_states_whether_its_text_was_truncated(output: Output, include_text: bool) -> None:
    long = "shoes " * 1_000
    output.embed(in_memory({"a": [("1", "boots"), ("2", long)]}), include_text=include_text)

    found = search(output.store, output.pool, ["boots", long], 1)

    assert [hit.truncated for [hit] in found] == [False, True]


def test_rows_of_files_without_texts_are_all_shown(output: Output) -> None:
    catalog: dict[str, Rows] = {
        "a": [("1", "same"), ("2", "same"), ("3", "other")],
        "b": [("1", "same")],
    }
    output.embed(in_memory(catalog), include_text=False)
    [hits] = search(output.store, output.pool, ["same"], 3)
    assert sorted((hit.key, hit.id, hit.text) for hit in hits) == [
        ("a", "1", ""),
        ("a", "2", ""),
        ("b", "1", ""),
    ]
