"""Encoders that compute nothing, for this engine's pool and for sentence-transformers' multi-process pool.

A call with one of them costs what a call costs by itself. The processes of both pools import this module by its name.
"""

from __future__ import annotations

import numpy as np
import torch

from surge_dagster.engine.encoder.worker.backends.base import BackendSettings, ChunkMetrics, Progress
from surge_dagster.engine.model.spec import Space

BACKEND = "benchmarks.null_encoders:NullBackend"
_DIMENSION = 8


class NullBackend:
    """A worker's backend that reports every row as done and leaves the matrix as it is."""

    name = "null"
    detail = "no vectors"

    def __init__(self, space: Space, settings: BackendSettings) -> None:
        pass

    def prepare(self, texts: list[str]) -> int:
        return len(texts)

    def forward(self, prepared: int, matrix: np.ndarray, truncated: np.ndarray, progress: Progress) -> ChunkMetrics:
        truncated[:] = 0
        progress()
        return ChunkMetrics(tokens=prepared, padded_tokens=prepared, forward_seconds=0.0)


class NullModule(torch.nn.Module):
    """A sentence-transformers model of one module that gives zeros for every text."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(1))  # a model without a parameter has no device

    def preprocess(self, texts: list[str], **_: object) -> dict[str, torch.Tensor]:
        return {"rows": torch.zeros(len(texts), _DIMENSION)}

    tokenize = preprocess

    def forward(self, features: dict[str, torch.Tensor], **_: object) -> dict[str, torch.Tensor]:
        features["sentence_embedding"] = features["rows"]
        return features
