"""sentence-transformers' own `encode`, for models whose texts do not become plain rows of token ids.

Static embeddings, chat templates and tokenizers without a fast version are of this kind. There is nothing to batch
here: texts go in a few at a time, so that the worker's progress can be seen. Whether a text was cut is read from what
the model's own preprocessing makes of it: one that fills the model counts as cut, since nothing tells the two apart.
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

_TEXTS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class PreparedTexts:
    """A chunk's texts as they are."""

    texts: list[str]


class ReferenceBackend:
    """The worker's side of a model that only sentence-transformers itself can feed."""

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
        for start in range(0, len(prepared.texts), _TEXTS_AT_ONCE):
            piece = prepared.texts[start : start + _TEXTS_AT_ONCE]
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
        """Tokens of each text as the model reads it; zeros for a model that reads texts of any length (static ones)."""
        features = self._reference.preprocess(texts, prompt=self._space.prompt or None)
        mask = features.get("attention_mask")
        return np.zeros(len(texts), np.int64) if mask is None else mask.sum(1).cpu().numpy()
