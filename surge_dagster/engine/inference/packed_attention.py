"""Attention within each text of a packed pass, under a name that models of transformers can use.

On CUDA it is torch's own flash attention for texts of different lengths; elsewhere a loop over the
texts, which defines what it has to compute. The compiler sees one operator: a layer compiled once
serves every pass.
"""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface

from surge_dagster.engine.inference.packing import LONGEST_IN_CELLS

try:
    from torch.nn.attention import varlen
except ImportError:  # torch before 2.10
    varlen: Any = None

PACKED_ATTENTION = "surge_packed"
_NEEDED = {"scale", "window_size", "enable_gqa"}  # newer versions of torch have all of them
_NO_WINDOW = -1


def has_varlen_attention() -> bool:
    """Return whether this torch can attend within texts of different lengths on a GPU."""
    if varlen is None:
        return False
    return set(inspect.signature(varlen.varlen_attn).parameters) >= _NEEDED


@torch.library.custom_op("surge::packed_attention", mutates_args=())
def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    longest: int,
    scale: float,
    is_causal: bool,
    window: int,
    apart: torch.Tensor | None = None,
) -> torch.Tensor:
    """[1, heads, tokens, size] each, key and value with the same or fewer heads → [1, tokens,
    heads, size].

    Args:
        borders: the first token of each text and the number of tokens, int32 [texts + 1].
        longest: at least the tokens of the longest text.
        window: tokens on either side that a token attends to; -1 for all.
        apart: of texts that lie in cells, [cells, 1, size of a cell, the same]: minus infinity
            between tokens of two texts, else 0. Such texts are shorter than the window.
    """
    if apart is not None:
        size = apart.shape[-1]
        cells = (each[0].unflatten(1, (-1, size)).transpose(0, 1) for each in (query, key, value))
        mask = apart.expand(-1, query.shape[1], -1, -1)
        attended = functional.scaled_dot_product_attention(*cells, attn_mask=mask, scale=scale)
        return attended.transpose(1, 2).flatten(0, 1)[None].contiguous()
    if not query.is_cuda:
        return _text_by_text(query, key, value, borders, scale, is_causal, window)
    flat = (states.transpose(1, 2)[0] for states in (query, key, value))
    return varlen.varlen_attn(
        *flat,
        borders,
        borders,
        longest,
        longest,
        scale=scale,
        window_size=(window, 0 if is_causal else window),
        enable_gqa=key.shape[1] != query.shape[1],
    )[None]


@packed_attention.register_fake
def _(query: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], query.shape[3])


def _text_by_text(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    borders: torch.Tensor,
    scale: float,
    is_causal: bool,
    window: int,
) -> torch.Tensor:
    repeats = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(repeats, 1)
    value = value.repeat_interleave(repeats, 1)
    attended = torch.empty_like(query)
    for start, stop in pairwise(borders.tolist()):
        text = slice(start, stop)
        mask = None
        if 0 <= window < stop - start - 1 or is_causal:
            places = torch.arange(stop - start)
            ahead = places[:, None] - places
            widest = window if window >= 0 else stop
            mask = ahead.abs() <= widest
            if is_causal:
                mask &= ahead >= 0
        attended[:, :, text] = functional.scaled_dot_product_attention(
            query[:, :, text], key[:, :, text], value[:, :, text], attn_mask=mask, scale=scale
        )
    return attended.transpose(1, 2).contiguous()


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int = 0,
    apart: torch.Tensor | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer; NotImplementedError for a kind of attention that
    packed passes lack."""
    unknown = [
        name for name in ("softcap", "s_aux", "position_bias") if settings.get(name) is not None
    ]
    if attention_mask is not None or cu_seq_lens_q is None or unknown:
        raise NotImplementedError(
            f"packed passes have no attention with {' and '.join(unknown) or 'a mask'}"
        )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    # transformers counts the token itself as part of the window.
    window = _NO_WINDOW if sliding_window is None else sliding_window - 1
    if apart is not None and (causal or 0 <= window < LONGEST_IN_CELLS or key.shape != query.shape):
        raise NotImplementedError(
            "cells have no attention to some of a text's tokens only, and none of grouped heads"
        )
    attended = packed_attention(
        query, key, value, cu_seq_lens_q, max_length_q, scale, causal, window, apart
    )
    return attended, None


AttentionInterface.register(PACKED_ATTENTION, _attend)
