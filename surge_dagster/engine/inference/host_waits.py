"""Calls of libraries that would let the host wait for the device, answered without it."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

NO = torch.tensor(False)  # on the host


class PackedPooling(TorchFunctionMode):
    """Pools texts that lie one behind the other, of `tokens` tokens, `kept` of which follow the
    prompts of their texts.

    Sums the tokens of each text in their order, not in any order; torch's own deterministic sums
    sort them and wait.
    """

    def __init__(self, tokens: int, kept: int) -> None:
        super().__init__()
        self._tokens, self._kept = tokens, kept

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.index_add:
            zeros, _, numbers, values = args  # the numbers of texts ascend
            borders = torch.searchsorted(
                numbers, torch.arange(len(zeros) + 1, device=numbers.device)
            )
            return torch.segment_reduce(
                values, "sum", offsets=borders, axis=0, initial=0, unsafe=True
            )
        if func is torch.repeat_interleave and not kwargs:
            return func(*args, output_size=self._tokens)
        if func is torch.Tensor.__getitem__ and getattr(args[1], "dtype", None) is torch.bool:
            counts = args[1].cumsum(0)
            return args[0][
                torch.searchsorted(counts, torch.arange(1, self._kept + 1, device=counts.device))
            ]
        return func(*args, **(kwargs or {}))


class MaskWithPadding(TorchFunctionMode):
    """Answers transformers, which asks whether a pass's mask, of this shape, leaves out any token:
    it does."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self._shape = shape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (
            func is torch.Tensor.all
            and len(args) == 1
            and not kwargs
            and args[0].shape == self._shape
        ):
            return NO
        return func(*args, **(kwargs or {}))
