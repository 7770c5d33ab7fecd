"""The torch backend on a device that only queues its work, as a GPU does, and copies as late as it
may."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surge_dagster.engine.encoder.worker import parity
from surge_dagster.engine.encoder.worker.backends import BackendSettings, Rows
from surge_dagster.engine.encoder.worker.parity import reference_vectors
from surge_dagster.engine.inference.torch_backend import TorchBackend, load_model, tokenizer_facts
from surge_dagster.engine.model.spec import EncodingSpec
from tests.engine.encoder.conftest import tiny_model

TEXTS = [
    "",
    "a",
    "steel bottle",
    "word " * 80,
    *(f"oak table {'lamp ' * (number % 9)}" for number in range(40)),
]
PLACES = np.arange(len(TEXTS))[::-1] * 2 + 1


def late_backend(folder: Path) -> tuple[TorchBackend, Any, np.ndarray]:
    """The backend, its device, and sentence-transformers' own vectors."""
    from tests.engine.inference.late_device import LateDevice

    space = EncodingSpec(str(folder)).resolve()
    settings = BackendSettings("cpu", "fp32", 1, token_budget=60)
    model = load_model(space, settings)
    facts = tokenizer_facts(model, space)
    assert facts is not None
    device = LateDevice()
    return (
        TorchBackend(space, settings, model, facts, device),
        device,
        reference_vectors(model, space, TEXTS),
    )


def encode(backend: TorchBackend, dimension: int, progress: Any = lambda: None) -> np.ndarray:
    """Into every second row, from the last one to the first."""
    rows = Rows(
        np.full((2 * len(TEXTS), dimension), np.nan, np.float32),
        np.zeros(2 * len(TEXTS), np.uint8),
        PLACES,
    )
    costs = backend.forward(backend.prepare(TEXTS), rows, progress)
    assert 0 < costs.tokens <= costs.padded_tokens
    assert np.isnan(rows.matrix[::2]).all()
    return rows.matrix[PLACES]


@pytest.mark.parametrize(
    "name",
    ["mpnet_mean", "t5_with_dense", "bert_prompt_left_out_of_the_mean", "llama_weighted_mean"],
)
def test_vectors_are_read_when_the_device_has_copied_them(name: str, tmp_path: Path) -> None:
    backend, device, expected = late_backend(tiny_model(name, tmp_path))
    assert backend.machine == device.name and backend.budget_candidates[-1] == 262_144
    for _ in range(2):  # the second portion lands in the buffer of the first
        found = encode(backend, expected.shape[1])
        assert parity.lowest_cosine(found, expected) >= parity.LOWEST_COSINE["fp32"]


def test_passes_are_queued_two_ahead_of_the_device(tmp_path: Path) -> None:
    backend, device, expected = late_backend(tiny_model("bert_cls", tmp_path))
    ahead: list[int] = []
    encode(backend, expected.shape[1], lambda: ahead.append(device.marks - device.reached))
    assert len(ahead) > 5 and max(ahead) == 2
