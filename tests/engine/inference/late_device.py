"""A device whose copies arrive as late as they may. Tests import it where they use it, because it imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from surge_dagster.engine.inference.device import HostDevice


class LateDevice(HostDevice):
    """A device whose copies to the host happen when a mark behind them is waited for, as late as they may."""

    queues = True

    def __init__(self) -> None:
        self.queue: list[Callable[[], None]] = []
        self.launching = False
        self.marks = self.reached = 0

    def landing(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        return _Landing.of(torch.full((rows, columns), torch.nan, dtype=dtype), self)

    def mark(self) -> Any:
        return _LateMark(self, len(self.queue))


class _LateMark:
    def __init__(self, device: LateDevice, place: int) -> None:
        self._device, self._place = device, place
        device.marks += 1
        self._number = device.marks

    @property
    def is_reached(self) -> bool:
        return self._number <= self._device.reached

    def wait(self) -> None:
        assert not self._device.launching, "the host waits for the device inside a chunk"
        self._device.reached = max(self._device.reached, self._number)
        for number in range(self._place):
            self._device.queue[number]()
            self._device.queue[number] = lambda: None

    def seconds_since(self, earlier: _LateMark) -> float:
        return 0.0


class _Landing(torch.Tensor):
    late: LateDevice

    @classmethod
    def of(cls, tensor: torch.Tensor, late: LateDevice) -> _Landing:
        landing = tensor.as_subclass(cls)
        landing.late = late
        return landing

    def __getitem__(self, rows: Any) -> torch.Tensor:
        return _Landing.of(super().__getitem__(rows), self.late)

    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:  # pyright: ignore
        assert non_blocking
        content = source.clone()

        def arrive() -> None:
            with torch.inference_mode():
                torch.Tensor.copy_(self, content)

        self.late.queue.append(arrive)
        return self
