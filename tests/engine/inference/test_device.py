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
