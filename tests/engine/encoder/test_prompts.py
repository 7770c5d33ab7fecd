"""Documents are encoded as sentence-transformers' `encode_document` does, and queries as its
`encode_query` does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.worker import parity
from surge_dagster.engine.encoder.worker.backends import BackendSettings, encode_texts
from surge_dagster.engine.encoder.worker.loading import load_backend
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.prompts import CONFIG_FILE, Task
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.readers.search import search
from surge_dagster.engine.store import open_store
from surge_dagster.engine.verify.reencoding import SampledRows
from tests.engine.encoder.conftest import tiny_model

pytestmark = pytest.mark.timeout(400)

FLOOR = 0.99999
TEXTS = ["", "steel bottle", "Größe 43", "the index " * 3, "word " * 90, "a", "3.14 lid and strap"]


def _vectors(spec: EncodingSpec, task: Task) -> np.ndarray:
    space = replace(spec.resolve(), task=task)
    settings = BackendSettings(device="cpu", precision="fp32", threads=1)
    loaded = load_backend(space, settings, "torch")
    assert loaded.lowest_cosine is not None and loaded.lowest_cosine >= FLOOR
    return encode_texts(loaded.backend, TEXTS, space)[0]


def test_prompts_of_the_settings_take_the_place_of_the_models(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    folder = tiny_model("bert_with_prompts", tmp_path)
    model = SentenceTransformer(str(folder), device="cpu")
    spec = EncodingSpec(str(folder), document_prompt="other: ", query_prompt="")
    assert (
        parity.lowest_cosine(_vectors(spec, "document"), model.encode(TEXTS, prompt="other: "))
        >= FLOOR
    )
    assert parity.lowest_cosine(_vectors(spec, "query"), model.encode(TEXTS, prompt="")) >= FLOOR


def test_passage_prompt_counts_where_a_model_states_none_named_document(tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer

    folder = tiny_model("bert_with_prompts", tmp_path)
    own = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(
        json.dumps(own | {"prompts": {"query": "query: ", "passage": "passage: "}})
    )
    model = SentenceTransformer(str(folder), device="cpu")
    expected = model.encode_document(TEXTS, prompt_name="passage")
    assert parity.lowest_cosine(_vectors(EncodingSpec(str(folder)), "document"), expected) >= FLOOR


def test_pool_of_one_side_is_refused_where_the_other_is_needed(tmp_path: Path) -> None:
    spec = EncodingSpec("hash://8", query_prompt="query: ")
    with (
        EncoderPool(spec) as pool,
        pytest.raises(ConfigError, match='Start the pool with task="query"'),
    ):
        search(open_store(str(tmp_path)), pool, ["a"])
    with (
        EncoderPool(spec, task="query") as pool,
        pytest.raises(ConfigError, match="the pool encodes queries"),
    ):
        SampledRows(pool, pool.space, 3, 0)
