"""The parts of a sentence-transformers model: its tokenizer, and all modules as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from surge_dagster.engine.encoder.worker.tokenization import PROBES, TokenizerFacts
from surge_dagster.engine.errors import ConfigError
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
    for text in PROBES:
        require_known_tokens(model, backend.encode(text).ids, space)
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


def require_known_tokens(model: SentenceTransformer, ids: Sequence[int], space: Space) -> None:
    """Raise ConfigError if a model has no embedding for one of these ids of its tokenizer.

    torch says only that an index is out of range, and on a GPU not even that.
    """
    first: Any = model[0]
    module = getattr(first, "model", None)
    if module is None:
        return
    known = len(module.get_input_embeddings().weight)
    unknown = max(ids, default=0)
    if unknown < known:
        return
    tokenizer = first.tokenizer
    raise ConfigError(
        f"the tokenizer of {space.model_path} gives token {unknown} "
        f"({tokenizer.convert_ids_to_tokens(unknown)!r}), and the model knows {known} tokens, 0 to "
        f"{known - 1}; it was loaded as {type(tokenizer).__name__}, the tokenizer_class of "
        "tokenizer_config.json. Restore that file, or the tokenizer that the model was made with"
    )


def embedder(
    model: SentenceTransformer, space: Space, prompt_length: int | None
) -> torch.nn.Module:
    """Return the whole model as one module."""
    from surge_dagster.engine.inference.embedder import Embedder

    return Embedder(model, space, prompt_length).eval()
