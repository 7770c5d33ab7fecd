"""What is asked of CUDA, held against recorders in its place: nothing here has a GPU."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest

from surge_dagster.engine.encoder.worker.backends.base import BackendSettings
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import EncodingSpec


def test_waiting_for_a_gpu_does_not_spin_and_its_time_is_that_between_two_marks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    from surge_dagster.engine.inference.device import CudaDevice

    made: list[Any] = []

    def event(**settings: Any) -> Any:
        made.append(
            mock.Mock(spec=["record", "query", "synchronize", "elapsed_time"], settings=settings)
        )
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"GPU {device.index}")
    device = CudaDevice("cuda:1")
    assert (device.name, device.torch_device, device.queues) == (
        "GPU 1",
        torch.device("cuda:1"),
        True,
    )
    earlier, later = device.mark(), device.mark()
    for one in made:
        assert one.settings == {"enable_timing": True, "blocking": True}
        one.record.assert_called_once_with()
    made[0].elapsed_time.return_value = 1_500.0
    assert later.seconds_since(earlier) == 1.5
    made[0].elapsed_time.assert_called_once_with(made[1])
    made[1].query.return_value = True
    assert later.is_reached is True
    made[1].synchronize.assert_not_called()
    later.wait()
    made[1].synchronize.assert_called_once_with()


def test_copies_to_and_from_a_gpu_go_through_pinned_memory_and_do_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    from surge_dagster.engine.inference.device import CudaDevice

    monkeypatch.setattr(torch.cuda, "get_device_name", str)
    device = CudaDevice("cuda:1")
    pinned = mock.create_autospec(torch.Tensor, instance=True)
    monkeypatch.setattr(
        torch.Tensor, "pin_memory", lambda tensor: pinned if tensor.tolist() == [3, 4] else None
    )
    assert device.upload(np.array([3, 4])) is pinned.to.return_value
    pinned.to.assert_called_once_with(torch.device("cuda:1"), non_blocking=True)
    empty = mock.Mock()
    monkeypatch.setattr(torch, "empty", empty)
    assert device.landing(3, 4, torch.float16) is empty.return_value
    empty.assert_called_once_with((3, 4), dtype=torch.float16, pin_memory=True)
    freed = mock.Mock()
    monkeypatch.setattr(torch.cuda, "empty_cache", freed)
    device.free_memory()
    freed.assert_called_once_with()


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
