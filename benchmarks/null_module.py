"""The null backend's counterpart for sentence-transformers: a model of one module that computes nothing.

Its multi-process pool spawns processes that import this module by name, so it stands alone.
"""

from __future__ import annotations

import torch

DIMENSION = 8


class NullModule(torch.nn.Module):
    """Zeros for every text; the parameter is there because a model without one has no device."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(1))

    def preprocess(self, texts: list[str], **_: object) -> dict[str, torch.Tensor]:
        return {"rows": torch.zeros(len(texts), DIMENSION)}

    tokenize = preprocess

    def forward(self, features: dict[str, torch.Tensor], **_: object) -> dict[str, torch.Tensor]:
        features["sentence_embedding"] = features["rows"]
        return features
