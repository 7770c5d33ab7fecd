"""The parts of a sentence-transformers model: its tokenizer, and all modules as one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surge_dagster.engine.encoder.worker.tokenization import TokenizerFacts
from surge_dagster.engine.model.spec import Space

if TYPE_CHECKING:
    import torch
    from sentence_transformers import SentenceTransformer


def tokenizer_facts(model: SentenceTransformer, space: Space) -> TokenizerFacts | None:
    """None where texts do not go through a plain fast tokenizer."""
    first = model[0]
    tokenizer = getattr(first, "tokenizer", None)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    modality_config = getattr(first, "modality_config", {"text": {}})
    if type(first).__name__ != "Transformer" or backend is None or "message" in modality_config:
        return None
    # The serialized tokenizer does not keep this setting.
    if getattr(tokenizer, "split_special_tokens", False):
        return None
    features = model.preprocess(["a probe"])
    type_ids = features.get("token_type_ids")
    if type_ids is not None and bool(type_ids.any()):
        return None
    prompt_length = None
    if space.prompt:
        counted = model.preprocess(["a probe"], prompt=space.prompt).get("prompt_length")
        prompt_length = None if counted is None else int(counted)
    return TokenizerFacts(
        tokenizer_json=backend.to_str(),
        truncation_side=getattr(tokenizer, "truncation_side", "right"),
        pad_id=getattr(tokenizer, "pad_token_id", None) or 0,
        prompt_length=prompt_length,
    )


def embedder(
    model: SentenceTransformer, space: Space, prompt_length: int | None
) -> torch.nn.Module:
    """Return the whole model as one module."""
    from surge_dagster.engine.inference.embedder import Embedder

    return Embedder(model, space, prompt_length).eval()
