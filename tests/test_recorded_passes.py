"""Recorded passes on the CPU, which runs the work again in place of a graph: their vectors are
those of other passes, and nothing of a pass stays for the next one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import pytest

from surge_dagster.engine.encoder.worker.backends import BackendSettings, encode_texts
from surge_dagster.engine.inference.packing import pack_texts
from surge_dagster.engine.inference.torch_backend import load_model, tokenizer_facts
from surge_dagster.engine.model.spec import EncodingSpec
from tests.engine.encoder.conftest import tiny_model

if TYPE_CHECKING:
    import torch

    from surge_dagster.engine.inference.packed_backend import PackedBackend

# Each pools or counts positions in another way, or attends in no cells.
MODELS = (
    "bert_cls",
    "bert_several_poolings",
    "bert_prompt_left_out_of_the_mean",
    "xlm_roberta_with_dense",
    "modernbert_cls",
    "qwen3_last_token",
    "llama_weighted_mean",
)
PORTIONS = (
    ["a"],
    ["steel", "a bottle of oak " * 12, "", "the lid", "key " * 30],
    ["return the rows of the index"] * 20,
    ["rows " * 50] * 7,
    ["key"],
)


def _backend(folder: Path) -> PackedBackend:
    from surge_dagster.engine.inference.device import Device
    from surge_dagster.engine.inference.packed_backend import PackedBackend, PackedOptions

    space = EncodingSpec(str(folder)).resolve()
    settings = BackendSettings("cpu", "fp32", threads=1, token_budget=1_000)
    model = load_model(space, settings)
    facts = tokenizer_facts(model, space)
    assert facts is not None
    options = PackedOptions(is_compiled=False)
    return PackedBackend(space, settings, model, facts, Device(), options)


@pytest.mark.parametrize("name", MODELS)
def test_recorded_passes_give_the_vectors_of_other_passes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.gpu import recorded_passes

    folder = tiny_model(name, tmp_path)
    space = EncodingSpec(str(folder)).resolve()
    plain = _backend(folder)
    recorded = _backend(folder)
    recorded_passes.record_passes(recorded)
    calls = list[int]()
    content = recorded_passes.RecordedPass._content

    def counted(self: Any, tokens: Any, pack: Any) -> np.ndarray:
        calls.append(pack.tokens)
        return content(self, tokens, pack)

    monkeypatch.setattr(recorded_passes.RecordedPass, "_content", counted)
    for texts in PORTIONS:
        calls.clear()
        found, costs = encode_texts(recorded, texts, space)
        expected, _ = encode_texts(plain, texts, space)

        assert sum(calls) == costs.tokens
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-6)


def test_recorded_pass_keeps_nothing_of_the_pass_before(tmp_path: Path) -> None:
    from benchmarks.gpu.recorded_passes import record_passes

    folder = tiny_model("bert_cls", tmp_path)
    space = EncodingSpec(str(folder)).resolve()
    backend = _backend(folder)
    record_passes(backend)
    first, _ = encode_texts(backend, PORTIONS[1], space)

    encode_texts(backend, PORTIONS[2], space)
    again, _ = encode_texts(backend, PORTIONS[1], space)

    assert np.array_equal(again, first)


def test_larger_passes_are_not_recorded(tmp_path: Path) -> None:
    from benchmarks.gpu.recorded_passes import record_passes

    folder = tiny_model("bert_cls", tmp_path)
    space = EncodingSpec(str(folder)).resolve()
    backend = _backend(folder)
    assert {shape.tokens for shape in record_passes(backend)} == {128, 256, 384, 512}
    texts = ["rows " * 60] * 12
    [pack] = pack_texts(backend.prepare(texts).lengths, 1_000, cells=True)
    assert pack.padded_tokens > 512

    found, _ = encode_texts(backend, texts, space)

    np.testing.assert_allclose(found[1:], found[:-1], rtol=1e-4, atol=2e-6)
    assert abs(np.linalg.norm(found, axis=1) - 1).max() < 1e-5


def test_recordings_on_a_gpu_begin_after_first_calls_and_share_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    from benchmarks.gpu.recorded_passes import Recorder
    from surge_dagster.engine.inference.device import CudaDevice

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "current_stream", mock.Mock())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: mock.Mock())
    monkeypatch.setattr(torch.cuda, "stream", mock.MagicMock())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", mock.Mock)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", mock.Mock(return_value=(0, 1)))
    recording = mock.create_autospec(torch.cuda.graph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    calls_before: list[int] = []
    calls: list[None] = []
    result = torch.ones(2)
    recording.return_value.__enter__.side_effect = lambda: calls_before.append(len(calls))

    def work() -> torch.Tensor:
        calls.append(None)
        return result

    recorder = Recorder(CudaDevice("cuda:0"))
    replay, found = recorder.record(work)
    recorder.record(work)

    assert found is result
    assert calls_before == [3, 7]
    [first, second] = recording.call_args_list
    assert replay == first.args[0].replay
    assert first.kwargs == second.kwargs
    assert first.kwargs["pool"] == (0, 1)
