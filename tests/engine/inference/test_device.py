"""What is asked of CUDA, held against recorders in its place: nothing here has a GPU."""

from __future__ import annotations

from unittest import mock

import pytest

from surge_dagster.engine.encoder.worker.backends import BackendSettings
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import EncodingSpec


@pytest.mark.parametrize(
    ("is_causal", "window", "sides"),
    [(False, -1, (-1, -1)), (True, -1, (-1, 0)), (False, 4, (4, 4)), (True, 4, (4, 0))],
)
def test_attention_on_a_gpu_is_torchs_own_for_texts_of_different_lengths(
    is_causal: bool, window: int, sides: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from torch.nn.attention import varlen

    from surge_dagster.engine.inference.packed_attention import packed_attention

    class OnGpu(torch.Tensor):
        is_cuda = True  # pyright: ignore

    attend = mock.create_autospec(varlen.varlen_attn, side_effect=lambda query, *_, **__: query)
    monkeypatch.setattr(varlen, "varlen_attn", attend)
    query, key, value = (torch.empty(1, heads, 10, 8).as_subclass(OnGpu) for heads in (6, 2, 2))
    borders = torch.empty(3, dtype=torch.int32)

    found = packed_attention._init_fn(query, key, value, borders, 128, 0.3, is_causal, window)

    assert found.shape == (1, 10, 6, 8)
    (*states, starts, ends, longest, longest_key), settings = attend.call_args
    assert [one.shape for one in states] == [(10, 6, 8), (10, 2, 8), (10, 2, 8)]
    assert starts is borders
    assert ends is borders
    assert (longest, longest_key) == (128, 128)
    assert settings == {"scale": 0.3, "window_size": sides, "enable_gqa": True}


def test_installed_torch_has_attention_for_texts_of_different_lengths() -> None:
    from surge_dagster.engine.inference.packed_attention import has_varlen_attention

    assert has_varlen_attention()


def test_older_torch_pads_texts_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from surge_dagster.engine.inference import packed_attention, packed_backend

    monkeypatch.setattr(packed_attention, "varlen", None)
    settings = BackendSettings("cuda:0", "fp16", 1)

    with pytest.raises(ConfigError, match="need a newer torch"):
        packed_backend.load_packed(EncodingSpec("hash://8").resolve(), settings)


def test_recordings_on_a_gpu_begin_after_first_calls_and_share_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

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

    device = CudaDevice("cuda:0")
    replay, found = device.recorded(work)
    device.recorded(work)

    assert found is result
    assert calls_before == [3, 7]
    [first, second] = recording.call_args_list
    assert replay == first.args[0].replay
    assert first.kwargs == second.kwargs
    assert first.kwargs["pool"] == (0, 1)
