"""`search` gives what comparing a query with every row gives, with equal texts once."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.worker.backends import hash_vectors
from surge_dagster.engine.files import rows as file_rows
from surge_dagster.engine.readers.search import search
from surge_dagster.engine.store import open_store
from tests.engine.runs import finish, in_memory, make_run
from tests.small_catalogs import DIMENSION, Rows, numbered_rows

QUERIES = ["a/1", "something else", "b/7 b/7 b/7"]


def brute_force(catalog: dict[str, Rows], query: str, k: int) -> list[tuple[str, float]]:
    """The nearest distinct texts with their cosines."""
    texts = sorted({text for rows in catalog.values() for _, text in rows})
    [vector] = hash_vectors([query], DIMENSION)
    scores = hash_vectors(texts, DIMENSION) @ vector
    return [
        (texts[place], float(scores[place])) for place in np.argsort(-scores, kind="stable")[:k]
    ]


def embedded(
    root: Path, pool: EncoderPool, catalog: dict[str, Rows], *, include_text: bool = True
) -> Path:
    finish(make_run(pool, in_memory(catalog), root, include_text=include_text))
    return root


@pytest.mark.parametrize("batch_bytes", [2_000, 1 << 20])
@pytest.mark.parametrize("k", [1, 5, 40])
def test_results_are_those_of_brute_force_where_texts_repeat(
    tmp_path: Path,
    hash_pool: EncoderPool,
    monkeypatch: pytest.MonkeyPatch,
    k: int,
    batch_bytes: int,
) -> None:
    rows: Rows = [*numbered_rows("a", 30), *numbered_rows("b", 10)]
    near = brute_force({"all": rows}, QUERIES[0], 5)
    repeated = [text for _, text in rows] + [text for text, _ in near for _ in range(12)]
    draw = random.Random(7)
    catalog: dict[str, Rows] = {}
    for key in ("a", "b", "c"):
        draw.shuffle(repeated)
        catalog[key] = [(f"{key}{row}", text) for row, text in enumerate(repeated)]
    output = embedded(tmp_path, hash_pool, catalog)
    monkeypatch.setattr(file_rows, "READ_BYTES", batch_bytes)
    for query, hits in zip(QUERIES, search(open_store(output), hash_pool, QUERIES, k), strict=True):
        expected = brute_force(catalog, query, k)
        assert [hit.text for hit in hits] == [text for text, _ in expected]
        assert [hit.score for hit in hits] == pytest.approx(
            [score for _, score in expected], abs=1e-5
        )
        assert all((hit.id, hit.text) in catalog[hit.key] for hit in hits)


def test_rows_of_files_without_texts_are_all_shown(tmp_path: Path, hash_pool: EncoderPool) -> None:
    catalog: dict[str, Rows] = {
        "a": [("1", "same"), ("2", "same"), ("3", "other")],
        "b": [("1", "same")],
    }
    output = embedded(tmp_path, hash_pool, catalog, include_text=False)
    [hits] = search(open_store(output), hash_pool, ["same"], 3)
    assert sorted((hit.key, hit.id, hit.text) for hit in hits) == [
        ("a", "1", ""),
        ("a", "2", ""),
        ("b", "1", ""),
    ]
