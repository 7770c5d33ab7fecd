"""Pooling of texts that lie one behind the other, as sentence-transformers pools padded texts.

Sums of a text are made in the order of its tokens, and nothing waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch

POOLING_MODES = ("cls", "lasttoken", "max", "mean", "mean_sqrt_len_tokens", "weightedmean")


class PackedPooling:
    """The pooling of one packed pass.

    Args:
        embeddings: of all tokens, [tokens, dimension].
        borders: the first token of each text and the number of tokens, int32 [texts + 1].
        positions: of each token in its text, [tokens].
        prompt_length: first tokens of each text that do not count.
    """

    def __init__(
        self,
        embeddings: torch.Tensor,
        borders: torch.Tensor,
        positions: torch.Tensor,
        prompt_length: int,
    ) -> None:
        self._embeddings = embeddings
        self._borders = borders.long()
        self._lengths = self._borders.diff()
        self._positions = positions
        self._prompt_length = prompt_length

    def pool(self, mode: str) -> torch.Tensor:
        """Return [texts, dimension]."""
        if mode == "cls":
            has_more = self._lengths > self._prompt_length
            return self._embeddings[self._borders[:-1] + has_more * self._prompt_length]
        if mode == "lasttoken":
            return self._embeddings[self._borders[1:] - 1]
        if mode == "max":
            return self._reduce(self._embeddings, "max", -torch.inf)
        if mode == "weightedmean":
            weights = (self._positions + 1).float()[:, None]
            weighted = self._reduce(self._embeddings * weights)
            return (weighted / self._reduce(weights).clamp(min=1e-9)).to(self._embeddings.dtype)
        counts = (self._lengths - self._prompt_length).clamp(min=1e-9)[:, None].float()
        divisor = counts.sqrt() if mode == "mean_sqrt_len_tokens" else counts
        return (self._reduce(self._embeddings.float()) / divisor).to(self._embeddings.dtype)

    def _reduce(
        self, values: torch.Tensor, kind: str = "sum", nothing: float = 0.0
    ) -> torch.Tensor:
        if self._prompt_length:
            is_prompt = self._positions < self._prompt_length
            values = values.masked_fill(is_prompt[:, None], nothing)
        return torch.segment_reduce(
            values, kind, offsets=self._borders, axis=0, initial=nothing, unsafe=True
        )


def modes_of(pooling: Any) -> tuple[str, ...]:
    """Return the modes of a sentence-transformers' `Pooling`, whose vectors are concatenated."""
    mode = pooling.pooling_mode
    return (mode,) if isinstance(mode, str) else tuple(mode)
