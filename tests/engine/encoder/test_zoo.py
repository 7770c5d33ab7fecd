"""A zoo of models: each gives sentence-transformers' vectors, alone and in company, in every
precision of this CPU.

The weights are random and the hidden sizes tiny; modules, tokenizers and configurations are real
ones. All go through torch here, which takes some two seconds each; `test_architectures.py` converts
some of them for OpenVINO.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surge_dagster.engine.encoder.worker import parity
from surge_dagster.engine.encoder.worker.backends import BackendSettings, encode_texts
from surge_dagster.engine.encoder.worker.loading import load_backend, loaded_tokenizer
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.inference.torch_backend import load_torch
from surge_dagster.engine.model.spec import EncodingSpec, Space
from tests.engine.encoder.conftest import tiny_model
from tests.engine.odd_texts import short_texts

pytestmark = pytest.mark.timeout(400)

ZOO = (
    "bert_cls",
    "bert_truncated_on_the_left",
    "bert_matryoshka",
    "bert_with_prompts",
    "mpnet_mean",
    "xlm_roberta_with_dense",
    "modernbert_cls",
    "distilbert_mean",
    "qwen3_last_token",
    "gemma3_overflowing_fp16",
    "static_embedding",
)
# Their parts are in others as well.
ALSO_ELSEWHERE = (
    "bert_several_poolings",
    "bert_prompt_left_out_of_the_mean",
    "t5_with_dense",
    "qwen2_last_token",
    "llama_weighted_mean",
)


@pytest.mark.parametrize(
    "name", [*ZOO, *(pytest.param(name, marks=pytest.mark.soak) for name in ALSO_ELSEWHERE)]
)
def test_model_gives_the_vectors_of_sentence_transformers_alone_and_in_company(
    name: str, tmp_path: Path
) -> None:
    from sentence_transformers import SentenceTransformer

    folder = tiny_model(name, tmp_path)
    model = SentenceTransformer(str(folder), device="cpu")
    spec = EncodingSpec(str(folder))
    _compare(spec.resolve(), model.encode_document, ("fp32", "bf16"))
    queries = replace(spec.resolve(), task="query")
    if queries.side == "query":
        _compare(queries, model.encode_query, ("fp32",))


def _compare(space: Space, encode: Callable[..., Any], precisions: tuple[str, ...]) -> None:
    # In one batch: sentence-transformers itself fails on a batch of one text without tokens.
    expected = encode(
        short_texts(), batch_size=99, normalize_embeddings=space.normalize, show_progress_bar=False
    )
    assert expected.shape == (len(short_texts()), space.dimension)
    for precision in precisions:
        # So small that texts of neighbouring lengths share passes with padding, and long ones have
        # their own.
        settings = BackendSettings(device="cpu", precision=precision, threads=2, token_budget=200)
        backend = (
            load_backend(space, settings, "torch").backend
            if precision == "fp32"
            else load_torch(space, settings)
        )
        floor = parity.LOWEST_COSINE[precision]
        found, _ = encode_texts(backend, short_texts(), space)
        assert parity.lowest_cosine(found, expected) >= floor
        assert np.allclose(
            np.linalg.norm(found, axis=1), np.linalg.norm(expected, axis=1), rtol=0.02, atol=1e-4
        )
        for row in (1, 4, 20):
            alone, _ = encode_texts(backend, short_texts()[row : row + 1], space)
            assert parity.lowest_cosine(alone, expected[row : row + 1]) >= floor


@pytest.mark.parametrize("split_special_tokens", [False, True])
def test_tokenizer_of_another_class_is_named(tmp_path: Path, split_special_tokens: bool) -> None:
    """Split special tokens go through sentence-transformers' own tokenization."""
    folder = tiny_model("xlm_roberta_with_dense", tmp_path)
    file = folder / "tokenizer_config.json"
    changed = {"tokenizer_class": "BertTokenizer", "split_special_tokens": split_special_tokens}
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    space = EncodingSpec(str(folder)).resolve()
    named = r"gives token \d+ \('.*'\), and the model knows \d+ tokens.* loaded as BertTokenizer"
    for backend in ("torch", "auto"):
        with pytest.raises(ConfigError, match=named):
            load_backend(space, BackendSettings("cpu", "fp32", 1), backend)


def test_roberta_that_states_more_tokens_reads_those_that_it_has_positions_for(
    tmp_path: Path,
) -> None:
    from sentence_transformers import SentenceTransformer

    folder = tiny_model("xlm_roberta_with_dense", tmp_path)
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 66}')
    space = EncodingSpec(str(folder)).resolve()
    model = SentenceTransformer(str(folder), device="cpu")
    model.max_seq_length = 64

    backend = load_backend(space, BackendSettings("cpu", "fp32", 1, 200), "torch").backend
    found, _ = encode_texts(backend, ["word " * 80, "a"], space)
    assert space.max_length == 64
    assert parity.lowest_cosine(found, model.encode(["word " * 80, "a"])) >= 0.99999


@pytest.mark.parametrize("name", ["bert_cls", "static_embedding"])
def test_worker_states_the_tokens_of_the_tokenizer_that_the_libraries_loaded(
    name: str, tmp_path: Path
) -> None:
    folder = tiny_model(name, tmp_path)

    def loaded() -> tuple[str, str]:
        space = EncodingSpec(str(folder)).resolve()
        backend = load_torch(space, BackendSettings("cpu", "fp32", 1))
        return space.name, loaded_tokenizer(backend)

    space, tokenizer = loaded()
    assert " transformers-5." in tokenizer and loaded() == (space, tokenizer)
    if name == "bert_cls":
        (folder / "special_tokens_map.json").write_text('{"additional_special_tokens": ["bottle"]}')
        assert loaded()[1] != tokenizer
