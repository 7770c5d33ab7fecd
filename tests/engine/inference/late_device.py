"""A device whose copies arrive as late as they may. Tests import it where they use it, because it
imports torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from surge_dagster.engine.inference.device import Device


class LateDevice(Device):
    """A device whose copies to the host happen when a mark behind them is waited for, as late as
    they may.

    Until then their buffers hold nan, also after they held something else: a real device may write
    to them at any time.

    Attributes:
        queue: copies that have not happened yet.
        uploaded: what lies on the device besides the model and what it computed.
    """

    queues = True

    def __init__(self) -> None:
        self.queue: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.uploaded: list[torch.Tensor] = []
        self.launching = False
        self.marks = self.reached = 0

    def upload(self, array: np.ndarray) -> torch.Tensor:
        self.uploaded.append(super().upload(array))
        return self.uploaded[-1]

    def landing(self, vectors: torch.Tensor) -> torch.Tensor:
        return _Landing.of(torch.full_like(vectors, torch.nan), self)

    def mark(self) -> Any:
        return _LateMark(self)


class _LateMark:
    def __init__(self, device: LateDevice) -> None:
        self._device = device
        device.marks += 1
        self._number = device.marks

    @property
    def is_reached(self) -> bool:
        return self._number <= self._device.reached

    def wait(self) -> None:
        assert not self._device.launching, "the host waits for the device inside a portion"
        self._device.reached = max(self._device.reached, self._number)
        with torch.inference_mode():
            for number, (landing, content) in list(self._device.queue.items()):
                if number < self._number:
                    torch.Tensor.copy_(landing, content)
                    del self._device.queue[number]
                else:
                    landing.fill_(torch.nan)

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
        self.late.queue[self.late.marks] = self, source.clone()
        self.fill_(torch.nan)
        return self


class HostWaits(TorchDispatchMode):
    """Collects the calls that would let the host wait for a GPU, and those that add up numbers in
    any order there."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        kind = func.overloadpacket
        kwargs = kwargs or {}
        if kind in (aten._local_scalar_dense, aten.item, aten.is_nonzero):
            waits = True
        elif kind is aten.repeat_interleave:
            waits = isinstance(args[-1], torch.Tensor) and kwargs.get("output_size") is None
        elif kind in (aten.index, aten.index_put, aten.index_put_):
            # A single value for the chosen places is filled in without counting them.
            is_filled = len(args) > 2 and args[2].numel() == 1
            waits = not is_filled and any(
                one is not None and one.dtype is torch.bool for one in args[1]
            )
        else:
            waits = kind in (
                aten.nonzero,
                aten.masked_select,
                aten.unique_consecutive,
                aten._unique2,
                aten.index_add,
            )
        if waits:
            self.found.append(str(func))
        return func(*args, **kwargs)
