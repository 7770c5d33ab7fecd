"""Passes that do not fit into memory: the budget shrinks for good, and no vector is lost."""

from __future__ import annotations

import numpy as np
import pytest

from surge_dagster.engine.encoder.worker.backends import is_out_of_memory
from surge_dagster.engine.errors import EncoderError
from tests.engine.encoder.small_device import Device, SmallDeviceBackend, encode, expected_vectors


def _texts(count: int = 400, longest: int = 30) -> list[str]:
    rng = np.random.default_rng(11)
    return [
        " ".join(rng.choice(["one", "two", "three"], int(size)))
        for size in rng.integers(0, longest, count)
    ]


def test_budget_beyond_memory_is_halved_until_passes_fit_and_stays_so() -> None:
    device = Device(limit=100)
    backend = SmallDeviceBackend(device, token_budget=1_000)
    vectors, metrics = encode(backend, _texts())
    lowered = backend.token_budget
    assert np.array_equal(vectors, expected_vectors(_texts()))
    assert lowered <= 100 < 2 * lowered + 60
    assert max(device.passes) <= 100
    assert metrics.padded_tokens == sum(device.passes)
    assert len(device.refused) <= 8
    device.refused.clear()
    vectors, _ = encode(backend, _texts()[::-1])
    assert np.array_equal(vectors, expected_vectors(_texts()[::-1]))
    assert (device.refused, backend.token_budget) == ([], lowered)


def test_streams_that_share_memory_give_the_same_vectors() -> None:
    device = Device(limit=150)
    backend = SmallDeviceBackend(device, token_budget=600, streams=3)
    vectors, metrics = encode(backend, _texts(2_000))
    assert np.array_equal(vectors, expected_vectors(_texts(2_000)))
    assert metrics.padded_tokens == sum(device.passes)
    assert backend.token_budget <= 150


def test_text_over_the_budget_gets_a_pass_of_its_own() -> None:
    device = Device(limit=40)
    texts = ["one " * 40, "two " * 39, "three"]
    vectors, _ = encode(SmallDeviceBackend(device, token_budget=1), texts)
    assert np.array_equal(vectors, expected_vectors(texts))
    assert sorted(device.passes) == [1, 39, 40]


def test_single_text_is_tried_again_when_no_other_pass_runs() -> None:
    device = Device(limit=1_000, refuse_once=77)
    texts = ["one " * 77, *_texts()]
    vectors, _ = encode(SmallDeviceBackend(device, token_budget=100), texts)
    assert np.array_equal(vectors, expected_vectors(texts))
    assert device.refused == [77]
    assert device.passes[-1] == 77


@pytest.mark.parametrize("streams", [1, 2])
def test_single_text_that_does_not_fit_is_a_clear_error(streams: int) -> None:
    device = Device(limit=50)
    backend = SmallDeviceBackend(device, token_budget=100, streams=streams)
    with pytest.raises(
        EncoderError, match=r"a text of 60 tokens does not fit .* 1 row .*smaller max_length"
    ):
        encode(backend, ["one " * 60, *_texts()])
    assert backend.token_budget >= 1
    vectors, _ = encode(backend, _texts())
    assert np.array_equal(vectors, expected_vectors(_texts()))


@pytest.mark.parametrize("streams", [1, 3])
def test_other_errors_end_the_portion_unchanged(streams: int) -> None:
    backend = SmallDeviceBackend(
        Device(limit=1_000, error=KeyError("broken")), token_budget=50, streams=streams
    )
    with pytest.raises(KeyError, match="broken"):
        encode(backend, _texts())
    assert backend.token_budget == 50


def test_texts_without_tokens_get_vectors() -> None:
    vectors, metrics = encode(SmallDeviceBackend(Device(limit=100), token_budget=50), ["", "", " "])
    assert np.array_equal(vectors, np.zeros((3, 4), np.float32))
    assert metrics.tokens == 0


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError(
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 128000000 bytes."
        ),
        RuntimeError(
            "Exception from src/plugins/intel_cpu/src/node.cpp:794:\n"
            "Failed to allocate 786432000 bytes"
        ),
        RuntimeError("std::bad_alloc"),
    ],
)
def test_out_of_memory_messages_of_libraries_are_recognized(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: an illegal memory access"), ValueError("out of memory")]
)
def test_other_errors_are_not_recognized_as_out_of_memory(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def test_message_of_torch_is_recognized() -> None:
    import torch

    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 50)
    assert is_out_of_memory(raised.value)
