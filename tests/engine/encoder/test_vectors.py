"""Vectors equal those of sentence-transformers, whatever a text was batched with.

The first test starts a pool with the real model, which imports torch in its worker, and
sentence-transformers in this process: together up to half a minute on two cores with cold caches.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

import numpy as np
import pytest

from surge_dagster.engine.encoder import schedule
from surge_dagster.engine.encoder.devices import choose_devices
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.worker import parity
from surge_dagster.engine.encoder.worker.backends import BackendSettings, Rows
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.inference.torch_backend import load_torch
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.support import disk_cache
from tests.engine.encoder.conftest import encode, filled_slot
from tests.engine.odd_texts import odd_texts

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

# Importing torch and converting the model take most of the time, several times more on a busy
# machine.
pytestmark = pytest.mark.timeout(400)

FLOOR = 0.99999
# Those of a pool's worker.
_SETTINGS = BackendSettings("cpu", "fp32", choose_devices("cpu").threads)


@pytest.mark.processes
def test_vectors_equal_sentence_transformers_for_texts_of_all_lengths(
    model_pool: EncoderPool, reference: SentenceTransformer
) -> None:
    texts = odd_texts()
    with filled_slot(model_pool, texts) as slot:
        costs = model_pool.encode(slot).costs
        flags = slot.truncation(0, len(texts)).tolist()
        found = slot.matrix(0, len(texts)).copy()
    assert parity.lowest_cosine(found, reference.encode(texts)) >= FLOOR
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    lengths = [len(ids) for ids in reference.tokenizer(texts, truncation=False)["input_ids"]]
    assert flags == [length > 256 for length in lengths]
    assert sum(flags) >= 4
    assert costs.tokens == sum(min(length, 256) for length in lengths)
    assert costs.tokens <= costs.padded_tokens <= 1.15 * costs.tokens


@pytest.mark.processes
def test_vector_depends_neither_on_its_batch_nor_on_the_portions(
    model_pool: EncoderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = odd_texts()
    together = encode(model_pool, texts)
    assert parity.lowest_cosine(together, encode(model_pool, texts[::-1])[::-1]) >= FLOOR
    for row in range(0, len(texts), 31):
        assert (
            parity.lowest_cosine(encode(model_pool, [texts[row]]), together[row : row + 1]) >= FLOOR
        )
    monkeypatch.setattr(schedule, "PORTIONS", replace(schedule.PORTIONS, texts=7))
    assert parity.lowest_cosine(encode(model_pool, texts), together) >= FLOOR


def test_start_checks_parity_and_measures_speed(model_pool: EncoderPool) -> None:
    facts = model_pool.start()
    assert facts.lowest_cosine is not None
    assert facts.lowest_cosine >= FLOOR
    assert model_pool.speed.texts_per_second > 0
    assert facts.backend in ("openvino", "torch")
    assert facts.backend in facts.device_reason
    assert model_pool.space.name.startswith("all-MiniLM-L6-v2-")


def test_prompt_length_dimension_and_type_have_the_effect_they_have_in_sentence_transformers(
    demo_folder: Path, reference: SentenceTransformer
) -> None:
    """All options of a spec together, on torch."""
    spec = EncodingSpec(
        str(demo_folder), document_prompt="query: ", max_length=12, dimension=100, dtype="float16"
    )
    texts = odd_texts()
    space = spec.resolve()
    backend = load_torch(space, _SETTINGS)
    found = np.empty((len(texts), space.dimension), space.dtype)
    flags = np.empty(len(texts), np.uint8)
    backend.forward(backend.prepare(texts), Rows.of_all(found, flags), lambda: None)
    before = reference.max_seq_length
    try:
        reference.max_seq_length = 12
        expected = reference.encode(
            texts, prompt="query: ", truncate_dim=100, normalize_embeddings=True
        )
    finally:
        reference.max_seq_length = before
    assert found.dtype == np.float16
    assert found.shape == (len(texts), 100)
    assert parity.lowest_cosine(found, expected) >= FLOOR
    assert flags.sum() > 50


@pytest.mark.parametrize(
    ("precision", "promised"), [("fp32", 0.99999), ("fp16", 0.999), ("bf16", 0.999)]
)
def test_every_precision_has_its_own_promise(precision: str, promised: float) -> None:
    """No machine computes in all of them; the answer of the comparison is given."""
    settings = BackendSettings("cpu", precision, 1, None)
    space = EncodingSpec("hash://8").resolve()
    for lowest in (promised, promised - 1e-6):
        answer = {"lowest_cosine": lowest, "length": 1.0}
        known = mock.Mock(read=answer.get)
        if lowest >= promised:
            assert parity.check_parity(space, mock.Mock(), settings, known) == lowest
        else:
            with pytest.raises(ConfigError, match=f"promised {promised:.5f}"):
                parity.check_parity(space, mock.Mock(), settings, known)


@pytest.mark.usefixtures("model_pool")  # its start cached the answer
def test_pool_below_the_promised_cosine_does_not_start(
    demo_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache_folder: Path
) -> None:
    # The cached answer says that this backend is wrong. Hidden files belong to other processes of
    # the tests.
    shutil.copytree(cache_folder, tmp_path / "cache", ignore=shutil.ignore_patterns(".*"))
    monkeypatch.setenv("SURGE_CACHE_DIR", str(tmp_path / "cache"))
    cached = list((tmp_path / "cache" / "calibration").glob("*.json"))
    assert cached
    for file in cached:
        disk_cache.write_json(
            f"calibration/{file.name}",
            {"lowest_cosine": 0.98, "length": 1.0},
        )
    pytest.importorskip("openvino", reason="not installed: the extra 'cpu'")
    spec = EncodingSpec(str(demo_folder))
    assert spec.resolve().model_path == str(demo_folder)
    with pytest.raises(ConfigError, match=r"lowest cosine 0\.98.*use another precision"):
        EncoderPool(spec, devices="cpu", backend="openvino").start()


def test_model_that_changed_after_its_digest_was_computed_is_refused(
    demo_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(demo_folder, folder)
    space = EncodingSpec(str(folder)).resolve()
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"gelu"', '"relu"'))
    with pytest.raises(ConfigError, match="changed while the pool was starting"):
        EncoderPool(space, devices="cpu").start()
