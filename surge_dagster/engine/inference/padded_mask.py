"""The attention masks of padded passes on torch, made without waiting for the device.

transformers leaves a mask out if it hides no token, which it asks the device for. A pass that has a
mask hides some here, so it is always used. Passes without padding have none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import AttentionMaskInterface
from transformers.masking_utils import eager_mask, sdpa_mask


def keep_masks() -> None:
    """Let attention keep every mask, in this process."""
    for implementation, make_mask in (("sdpa", sdpa_mask), ("eager", eager_mask)):
        AttentionMaskInterface.register(implementation, partial(_kept, make_mask))


def _kept(
    make_mask: Callable[..., torch.Tensor | None],
    attention_mask: torch.Tensor | None = None,
    **settings: Any,
) -> torch.Tensor | None:
    if attention_mask is not None:
        settings |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return make_mask(attention_mask=attention_mask, **settings)
