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
    """Return the whole model as one module: ids and mask [batch, length] → [batch, dimension].

    Without a mask every token counts, and attention may use a faster kernel.
    """
    import torch

    tokenizer = getattr(model[0], "tokenizer", None)
    # Some tokenizers, as of most decoders, add no special token: an empty text is a row of padding
    # only.
    rows_may_be_empty = tokenizer is not None and not tokenizer.backend_tokenizer.encode("").ids

    class Embedder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(
            self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
        ) -> torch.Tensor:
            features: dict = {"input_ids": input_ids}
            if attention_mask is not None:
                features["attention_mask"] = attention_mask
            if prompt_length is not None:
                features["prompt_length"] = prompt_length
            if rows_may_be_empty and attention_mask is not None:
                features = self._pool_nothing_from_empty_rows(features, attention_mask)
            else:
                features = self.model(features)
            vectors = features["sentence_embedding"][..., : space.dimension].float()
            return (
                torch.nn.functional.normalize(vectors, p=2.0, dim=-1)
                if space.normalize
                else vectors
            )

        def _pool_nothing_from_empty_rows(
            self, features: dict, attention_mask: torch.Tensor
        ) -> dict:
            """Lets an empty row attend to its first padding: attention to no token is nan in some
            kernels.

            Pooling still sees the row as empty, so the result equals that of sentence-transformers.
            """
            attended = torch.cat(
                [torch.ones_like(attention_mask[:, :1]), attention_mask[:, 1:]], dim=1
            )
            transformer, *others = self.model
            features = transformer(features | {"attention_mask": attended})
            features["attention_mask"] = attention_mask
            for module in others:
                features = module(features)
            return features

    return Embedder().eval()
