"""A model that computes nothing, for the processes of sentence-transformers' multi-process pool."""

from __future__ import annotations

import torch

_DIMENSION = 8


class NullModule(torch.nn.Module):
    """A sentence-transformers model of one module that gives zeros for every text."""

    def __init__(self) -> None:
        super().__init__()
        # a model without a parameter has no device
        self.unused = torch.nn.Parameter(torch.zeros(1))

    def preprocess(self, texts: list[str], **_: object) -> dict[str, torch.Tensor]:
        return {"rows": torch.zeros(len(texts), _DIMENSION)}

    tokenize = preprocess

    def forward(self, features: dict[str, torch.Tensor], **_: object) -> dict[str, torch.Tensor]:
        features["sentence_embedding"] = features["rows"]
        return features
