"""What a backend needs of a device: copies that do not stop it, and marks in its stream of work.

Work on a GPU is only queued. A mark is reached when all work queued before it is done; until then a
buffer that this work reads or writes belongs to the device. On the CPU work is done when it is
queued: packed passes are compared there.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch


class Mark:
    """A place in a device's stream; on the CPU it is reached at once."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    @property
    def is_reached(self) -> bool:
        return True

    def wait(self) -> None:
        """Until the device has reached the mark."""

    def seconds_since(self, earlier: Any) -> float:
        """Of the device, between two marks that it has reached."""
        return self.at - earlier.at


class Device:
    """The CPU, and what holds for each device with the one stream of work that a worker queues.

    Attributes:
        queues: whether work is only queued; else it is done when the call returns.
    """

    queues = False
    torch_device = torch.device("cpu")
    name = "cpu"

    def upload(self, array: np.ndarray) -> torch.Tensor:
        """A copy on the device; the array may be changed at once."""
        return torch.from_numpy(array.copy())

    def landing(self, vectors: torch.Tensor) -> torch.Tensor:
        """A buffer of the host, like these, that the device writes to without stopping."""
        return torch.empty(vectors.shape, dtype=vectors.dtype)

    def mark(self) -> Mark:
        """In the stream, behind everything queued so far."""
        return Mark()

    def free_memory(self) -> None:
        """Return what the device's allocator keeps in reserve."""


class _CudaMark(Mark):
    def __init__(self) -> None:
        # A thread that spins while it waits takes a core from the tokenizer.
        self.event = torch.cuda.Event(enable_timing=True, blocking=True)
        self.event.record()

    @property
    def is_reached(self) -> bool:
        return self.event.query()

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: Any) -> float:
        return earlier.event.elapsed_time(self.event) / 1e3


class CudaDevice(Device):
    queues = True

    def __init__(self, name: str) -> None:
        self.torch_device = torch.device(name)
        self.name = torch.cuda.get_device_name(self.torch_device)

    def upload(self, array: np.ndarray) -> torch.Tensor:
        # torch keeps the pinned copy until the device has read it.
        return torch.from_numpy(array).pin_memory().to(self.torch_device, non_blocking=True)

    def landing(self, vectors: torch.Tensor) -> torch.Tensor:
        # torch keeps pinned memory for the next portion, once the device is done with it
        return torch.empty(vectors.shape, dtype=vectors.dtype, pin_memory=True)

    def mark(self) -> Mark:
        return _CudaMark()

    def free_memory(self) -> None:
        torch.cuda.empty_cache()


def open_device(name: str) -> Device:
    """Return "cpu", or "cuda:N"."""
    return Device() if name == "cpu" else CudaDevice(name)
