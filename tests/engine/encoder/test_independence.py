"""A vector depends on its text alone: not on how many workers there are, how work is cut, or what comes before it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from surge_dagster.engine.encoder import chunks
from surge_dagster.engine.encoder.parity import PARITY_TEXTS, lowest_cosine
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.spec import EncodingSpec
from tests.engine.encoder.conftest import encode


def test_vectors_do_not_depend_on_workers_chunks_order_or_budget(
    model_pool: EncoderPool, demo_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(2)
    texts = [f"{PARITY_TEXTS[row % len(PARITY_TEXTS)][:400]} {row}" for row in range(80)]
    order = rng.permutation(len(texts))
    back = np.argsort(order)
    shuffled = [texts[row] for row in order]
    expected = encode(model_pool, texts)
    found = {"order": encode(model_pool, shuffled)[back]}
    monkeypatch.setattr(chunks, "LARGEST_CHUNK_TEXTS", 7)
    found["chunks"] = encode(model_pool, texts)
    monkeypatch.setattr(chunks, "LARGEST_CHUNK_TEXTS", 23)
    with EncoderPool(EncodingSpec(model=str(demo_folder)), devices="cpu,cpu", token_budget=300) as pool:
        found["workers and budget"] = encode(pool, texts)
        found["all of them"] = encode(pool, shuffled)[back]
    found["reference"] = expected
    for one in found:
        for other in found:
            assert lowest_cosine(found[one], found[other]) >= 0.99999, (one, other)
