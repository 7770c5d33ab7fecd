"""What is asked of CUDA, held against recorders in its place: nothing here has a GPU."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest


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


# As libtorch_cpu.so of torch 2.6.0 declares it, the oldest one that is allowed.
OLDEST = (
    "aten::_flash_attention_forward(Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, Tensor? cum_seq_k, "
    "SymInt max_q, SymInt max_k, float dropout_p, bool is_causal, bool return_debug_mask, *, float? scale=None, "
    "SymInt? window_size_left=None, SymInt? window_size_right=None, Tensor? seqused_k=None, Tensor? alibi_slopes=None)"
    " -> (Tensor output, Tensor softmax_logsumexp, Tensor philox_seed, Tensor philox_offset, Tensor debug_attn_mask)"
)


@pytest.mark.parametrize("torch_version", ["oldest", "installed"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("window", [-1, 4])
def test_flash_attention_is_given_what_its_arguments_are_named_for(
    is_causal: bool, window: int, torch_version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from surge_dagster.engine.inference.packed_attention import packed_attention

    class OnGpu(torch.Tensor):
        is_cuda = True  # pyright: ignore

    installed: Any = torch.ops.aten._flash_attention_forward.default._schema
    schema: Any = torch._C.parse_schema(OLDEST) if torch_version == "oldest" else installed
    declared = schema.arguments
    positional = [one.name for one in declared if not one.kwarg_only]
    named = {one.name for one in declared if one.kwarg_only}
    given: dict[str, Any] = {}

    def flash(*arguments: Any, **settings: Any) -> list[Any]:
        assert set(settings) <= named
        given.update(zip(positional, arguments, strict=True), **settings)
        return [given["query"]]

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash)
    query, key, value = (torch.empty(1, heads, 10, 8).as_subclass(OnGpu) for heads in (6, 2, 3))
    borders = torch.empty(3, dtype=torch.int32)
    attended = packed_attention._init_fn(query, key, value, borders, 128, 0.3, is_causal, window)
    assert attended.shape == (1, 10, 6, 8)
    assert [given.pop(name).shape for name in ("query", "key", "value")] == [
        (10, 6, 8),
        (10, 2, 8),
        (10, 3, 8),
    ]
    assert given.pop("cum_seq_q") is borders and given.pop("cum_seq_k") is borders
    assert (given.pop("window_size_left", None), given.pop("window_size_right", None)) == (
        (None, None) if window < 0 else (4, 0 if is_causal else 4)
    )
    lengths = {"max_q": 128, "max_k": 128}
    assert given == lengths | {
        "dropout_p": 0.0,
        "is_causal": is_causal,
        "return_debug_mask": False,
        "scale": 0.3,
    }
