"""Calls of libraries that would let the host wait for the device, answered without it."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

NO = torch.tensor(False)  # on the host


class SumsInOrder(TorchFunctionMode):
    """Sums the tokens of each text in their order, where sentence-transformers' pooling would add them in any order.

    torch's own deterministic sums would do that too, but sort the tokens and let the host wait for the device.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.index_add:
            return func(*args, **(kwargs or {}))
        zeros, _, numbers, values = args  # the numbers of texts ascend
        borders = torch.searchsorted(numbers, torch.arange(len(zeros) + 1, device=numbers.device))
        return torch.segment_reduce(values, "sum", offsets=borders, axis=0, initial=0, unsafe=True)


class MaskWithPadding(TorchFunctionMode):
    """Answers transformers, which asks whether a pass's mask, of this shape, leaves out any token: it does."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self._shape = shape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.all and len(args) == 1 and not kwargs and args[0].shape == self._shape:
            return NO
        return func(*args, **(kwargs or {}))
