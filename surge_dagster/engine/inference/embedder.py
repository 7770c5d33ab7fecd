"""A sentence-transformers model as one module: token ids in, vectors out."""

from __future__ import annotations

from typing import Any

import torch
from sentence_transformers import SentenceTransformer

from surge_dagster.engine.model.spec import Space


class Embedder(torch.nn.Module):
    """All modules of a model: ids and mask [batch, length] → [batch, dimension].

    Without a mask every token counts, and attention may use a faster kernel.
    """

    def __init__(self, model: SentenceTransformer, space: Space, prompt_length: int | None) -> None:
        super().__init__()
        self.model = model
        self._space = space
        self._prompt_length = prompt_length
        # Some tokenizers, as of most decoders, add no special token: an empty text is a row of
        # padding only.
        tokenizer = getattr(model[0], "tokenizer", None)
        self._rows_may_be_empty = (
            tokenizer is not None and not tokenizer.backend_tokenizer.encode("").ids
        )

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        features: dict[str, Any] = {"input_ids": input_ids}
        if self._prompt_length is not None:
            features["prompt_length"] = self._prompt_length
        if attention_mask is None:
            features = self.model(features)
        elif self._rows_may_be_empty:
            features = self._pool_nothing_from_empty_rows(features, attention_mask)
        else:
            features = self.model(features | {"attention_mask": attention_mask})

        vectors = features["sentence_embedding"][..., : self._space.dimension].float()
        if not self._space.normalize:
            return vectors
        return torch.nn.functional.normalize(vectors, p=2.0, dim=-1)

    def _pool_nothing_from_empty_rows(
        self, features: dict[str, Any], attention_mask: torch.Tensor
    ) -> dict[str, Any]:
        """Let an empty row attend to its first padding: attention to no token is nan in some
        kernels.

        Pooling still sees the row as empty, so the result equals that of sentence-transformers.
        """
        first = torch.ones_like(attention_mask[:, :1])
        attended = torch.cat([first, attention_mask[:, 1:]], dim=1)
        transformer, *others = self.model
        features = transformer(features | {"attention_mask": attended})
        features["attention_mask"] = attention_mask
        for module in others:
            features = module(features)
        return features
