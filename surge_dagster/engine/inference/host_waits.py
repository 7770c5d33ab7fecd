"""Calls of libraries that would let the host wait for the device, answered without it."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

YES, NO = torch.tensor(True), torch.tensor(False)  # on the host


class PackedPooling(TorchFunctionMode):
    """Pools texts that lie one behind the other, of `tokens` tokens, `kept` of which follow the prompts of their texts.

    Sums the tokens of each text in their order, not in any order; torch's own deterministic sums sort them and wait.
    """

    def __init__(self, tokens: int, kept: int) -> None:
        super().__init__()
        self._tokens, self._kept = tokens, kept

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.index_add:
            zeros, _, numbers, values = args  # the numbers of texts ascend
            borders = torch.searchsorted(numbers, torch.arange(len(zeros) + 1, device=numbers.device))
            return torch.segment_reduce(values, "sum", offsets=borders, axis=0, initial=0, unsafe=True)
        if func is torch.repeat_interleave and not kwargs:
            return func(*args, output_size=self._tokens)
        if func is torch.Tensor.__getitem__ and getattr(args[1], "dtype", None) is torch.bool:
            counts = args[1].cumsum(0)
            return args[0][torch.searchsorted(counts, torch.arange(1, self._kept + 1, device=counts.device))]
        return func(*args, **(kwargs or {}))


class KnownPadding(TorchFunctionMode):
    """Answers what libraries ask about the tokens of a pass of this shape, to take a shorter way where they can.

    `mask.all()` holds without padding, and so do positions in a row. No sum has the number that it is compared with:
    the longer way is right in any case.
    """

    def __init__(self, shape: torch.Size, *, is_padded: bool) -> None:
        super().__init__()
        self._shape, self._all = shape, NO if is_padded else YES

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.all and len(args) == 1 and not kwargs and args[0].shape == self._shape[: args[0].dim()]:
            return self._all
        if func is torch.Tensor.__eq__ and isinstance(args[1], int) and not args[0].dim():
            return NO
        return func(*args, **(kwargs or {}))
