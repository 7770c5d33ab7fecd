"""Every architecture gives the vectors of sentence-transformers: other poolings, paddings,
tokenizers and modules.

Each test converts a tiny model of random weights, which takes a few seconds: the tracing and not
the size costs.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from surge_dagster.engine.encoder.metrics import Costs
from surge_dagster.engine.encoder.worker import parity
from surge_dagster.engine.encoder.worker.backends import Backend, BackendSettings, Rows
from surge_dagster.engine.encoder.worker.loading import load_backend, make_backend
from surge_dagster.engine.encoder.worker.parity import load_reference
from surge_dagster.engine.inference.torch_backend import ReferenceBackend
from surge_dagster.engine.model.spec import EncodingSpec, Space
from tests.engine.encoder.conftest import tiny_model
from tests.engine.odd_texts import short_texts

pytestmark = pytest.mark.timeout(400)

FLOOR = 0.99999
# So small that texts of neighbouring lengths share passes with padding, and long ones have passes
# of their own.
_SETTINGS = BackendSettings(device="cpu", precision="fp32", threads=2, token_budget=200)


def _made(architecture: str, folder: Path) -> tuple[Space, np.ndarray]:
    """A model's space, and what sentence-transformers itself makes of the texts."""
    # takes too long for those who only collect tests
    from sentence_transformers import SentenceTransformer

    model = tiny_model(architecture, folder)
    # In one batch: sentence-transformers itself fails on a batch of one text without tokens.
    reference = SentenceTransformer(str(model), device="cpu")
    expected = reference.encode_document(short_texts(), batch_size=99, show_progress_bar=False)
    # Vectors that were all alike would agree with any others.
    assert parity.lowest_cosine(expected[5:-1], expected[6:]) < 0.95
    return EncodingSpec(str(model)).resolve(), expected


def _vectors(backend: Backend, space: Space) -> tuple[np.ndarray, np.ndarray, Costs]:
    texts = short_texts()
    matrix = np.full((len(texts), space.dimension), np.nan, space.dtype)
    flags = np.empty(len(texts), np.uint8)
    metrics = backend.forward(backend.prepare(texts), Rows.of_all(matrix, flags), lambda: None)
    return matrix, flags, metrics


# Other models are compared with torch by `test_zoo.py`.
@pytest.mark.parametrize(
    "name", ["t5_with_dense", pytest.param("bert_several_poolings", marks=pytest.mark.soak)]
)
def test_vectors_equal_sentence_transformers_with_the_best_backend(
    name: str, tmp_path: Path
) -> None:
    space, expected = _made(name, tmp_path)
    best = "openvino" if importlib.util.find_spec("openvino") is not None else "torch"
    loaded = load_backend(space, _SETTINGS, "auto")
    assert loaded.backend.name == best
    assert loaded.notes == ()
    assert loaded.lowest_cosine is not None
    assert loaded.lowest_cosine >= FLOOR
    vectors, flags, metrics = _vectors(loaded.backend, space)
    assert parity.lowest_cosine(vectors, expected) >= FLOOR
    assert metrics.padded_tokens > metrics.tokens
    assert flags[4] == 1
    assert flags.sum() < len(flags)


def test_vectors_and_flags_go_to_the_rows_of_their_texts_and_to_no_other(tmp_path: Path) -> None:
    """Takes some 10 s, as torch is imported and the model converted."""
    folder = tiny_model("bert_cls", tmp_path)
    space = EncodingSpec(str(folder), max_length=12, dimension=16, dtype="float16").resolve()
    settings = BackendSettings(device="cpu", precision="fp32", threads=2, token_budget=64)
    backends = [
        make_backend("torch", space, settings),
        ReferenceBackend(space, load_reference(space, "cpu"), "torch"),
    ]
    if importlib.util.find_spec("openvino") is not None:
        backends.append(make_backend("openvino", space, settings))
    for backend in backends:
        expected, flags, _ = _vectors(backend, space)
        places = np.flatnonzero(np.arange(3 * len(flags)) % 3 == 1)
        matrix = np.full((3 * len(flags), 16), 7, np.float16)
        truncated = np.full(3 * len(flags), 7, np.uint8)
        backend.forward(
            backend.prepare(short_texts()), Rows(matrix, truncated, places), lambda: None
        )
        assert np.array_equal(matrix[places], expected)
        assert truncated[places].tolist() == flags.tolist() and 0 < flags.sum() < len(flags)
        assert (np.delete(matrix, places, axis=0) == 7).all() and (
            np.delete(truncated, places) == 7
        ).all()


def test_texts_with_names_of_special_tokens_equal_sentence_transformers_where_these_are_split(
    tmp_path: Path,
) -> None:
    folder = tiny_model("bert_cls", tmp_path)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"split_special_tokens": True}))
    space = EncodingSpec(str(folder)).resolve()
    assert "[SEP]" in " ".join(parity.PARITY_TEXTS)
    loaded = load_backend(space, _SETTINGS, "torch")
    assert isinstance(loaded.backend, ReferenceBackend)
    assert loaded.lowest_cosine is not None
    assert loaded.lowest_cosine >= FLOOR


def test_reference_backend_counts_cut_texts(tmp_path: Path) -> None:
    space = EncodingSpec(str(tiny_model("bert_cls", tmp_path)), max_length=12).resolve()
    backend = ReferenceBackend(space, load_reference(space, "cpu"), "torch")
    texts = ["steel", "steel bottle", "steel " * 40, ""]
    matrix = np.empty((4, space.dimension), space.dtype)
    flags = np.empty(4, np.uint8)
    metrics = backend.forward(backend.prepare(texts), Rows.of_all(matrix, flags), lambda: None)
    assert flags.tolist() == [0, 0, 1, 0]
    assert metrics.tokens > 12


def test_decoder_with_left_padding_works_with_a_measured_token_budget(tmp_path: Path) -> None:
    space, expected = _made("qwen2_last_token", tmp_path)
    settings = BackendSettings(device="cpu", precision="fp32", threads=2)
    loaded = load_backend(space, settings, "auto")
    assert loaded.lowest_cosine is not None and loaded.notes == ()
    found = _vectors(loaded.backend, space)[0]
    assert parity.lowest_cosine(found, expected) >= FLOOR
    assert loaded.calibration.read("token_budget") >= 256
    # The empty text has no token at all here; sentence-transformers' answer is a row of zeros.
    assert not found[0].any()
