"""ReferenceBackend, for models without plain token ids: sentence-transformers encodes itself."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from surge_dagster.engine.encoder.metrics import Costs
from surge_dagster.engine.encoder.worker.backends.base import Progress, Rows
from surge_dagster.engine.encoder.worker.sentence_model import reference_vectors
from surge_dagster.engine.encoder.worker.tokenization import PROBES, digest_of_tokens
from surge_dagster.engine.inference.model_parts import require_known_tokens
from surge_dagster.engine.model.spec import Space

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

_TEXTS_PER_STEP = 256


class ReferenceBackend:
    """Computes vectors through sentence-transformers' `encode`, for models without plain rows of
    token ids.

    Examples are static embeddings, chat templates and tokenizers without a fast version. A text
    that fills the model counts as cut, because the model's preprocessing does not say which of
    these texts were longer.
    """

    name = "torch"

    def __init__(self, space: Space, reference: SentenceTransformer, detail: str) -> None:
        self._space = space
        self._reference = reference
        self.detail = f"{detail}, through sentence-transformers' encode"
        features = [reference.preprocess([text], task=space.task) for text in PROBES]
        ids = [each["input_ids"] for each in features if "input_ids" in each]
        for each in ids:
            require_known_tokens(reference, each.ravel().tolist(), space)
        self.tokens_digest = digest_of_tokens([each.tolist() for each in ids])

    def prepare(self, texts: list[str]) -> list[str]:
        return texts

    def forward(self, prepared: list[str], rows: Rows, progress: Progress) -> Costs:
        started = time.perf_counter()
        tokens = 0
        for start in range(0, len(prepared), _TEXTS_PER_STEP):
            piece = prepared[start : start + _TEXTS_PER_STEP]
            places = rows.places[start : start + len(piece)]
            lengths = self._lengths(piece)
            rows.truncated[places] = lengths >= self._space.max_length
            tokens += int(lengths.sum())
            rows.matrix[places] = reference_vectors(self._reference, self._space, piece)
            progress()
        return Costs(
            tokens=tokens, padded_tokens=tokens, forward_seconds=time.perf_counter() - started
        )

    def _lengths(self, texts: list[str]) -> np.ndarray:
        """Tokens that the model reads of each text; zeros for a model without a limit."""
        features = self._reference.preprocess(
            texts, prompt=self._space.prompt or None, task=self._space.task
        )
        mask = features.get("attention_mask")
        if mask is None:
            return np.zeros(len(texts), np.int64)
        return mask.sum(1).cpu().numpy()
