"""ReferenceBackend: sentence-transformers' own `encode`, for models whose texts do not become plain rows of token ids.

Examples are static embeddings, chat templates and tokenizers without a fast version. Texts are encoded in small groups,
so that the worker reports progress. A text that fills the model counts as cut, because the model's preprocessing does
not say which of these texts were longer.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from surge_dagster.engine.encoder.worker.backends.base import ChunkMetrics, Progress
from surge_dagster.engine.encoder.worker.sentence_model import reference_vectors
from surge_dagster.engine.model.spec import Space

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

_TEXTS_PER_STEP = 256


@dataclass(frozen=True, slots=True)
class PreparedTexts:
    """The texts of a chunk."""

    texts: list[str]


class ReferenceBackend:
    """Computes vectors through sentence-transformers' `encode`."""

    name = "torch"
    token_budget = 0

    def __init__(self, space: Space, reference: SentenceTransformer, detail: str) -> None:
        self._space = space
        self._reference = reference
        self.detail = f"{detail}, through sentence-transformers' encode"

    def prepare(self, texts: list[str], progress: Progress) -> PreparedTexts:
        progress()
        return PreparedTexts(texts)

    def forward(
        self, prepared: PreparedTexts, matrix: np.ndarray, truncated: np.ndarray, progress: Progress
    ) -> ChunkMetrics:
        started = time.perf_counter()
        tokens = 0
        tokenize_seconds = 0.0
        for start in range(0, len(prepared.texts), _TEXTS_PER_STEP):
            piece = prepared.texts[start : start + _TEXTS_PER_STEP]
            rows = slice(start, start + len(piece))
            begun = time.perf_counter()
            lengths = self._lengths(piece)
            truncated[rows] = lengths >= self._space.max_length
            tokens += int(lengths.sum())
            tokenize_seconds += time.perf_counter() - begun
            matrix[rows] = reference_vectors(self._reference, self._space, piece)
            progress()
        return ChunkMetrics(
            tokens=tokens,
            padded_tokens=tokens,
            truncated=int(np.count_nonzero(truncated)),
            tokenize_seconds=tokenize_seconds,
            forward_seconds=time.perf_counter() - started - tokenize_seconds,
        )

    def _lengths(self, texts: list[str]) -> np.ndarray:
        """Tokens that the model reads of each text; zeros for a model without a limit (static embeddings)."""
        features = self._reference.preprocess(texts, prompt=self._space.prompt or None)
        mask = features.get("attention_mask")
        return np.zeros(len(texts), np.int64) if mask is None else mask.sum(1).cpu().numpy()
