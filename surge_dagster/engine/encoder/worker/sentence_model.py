"""The model as sentence-transformers loads it, prepared for the backends. Imports torch, so only workers use it.

Everything that sentence-transformers decides about a model (modules, prompts, special cases of the tokenizer) is taken
from its loaded object and not decided again here.
"""

from __future__ import annotations

import logging
import os
import warnings
from typing import TYPE_CHECKING

from surge_dagster.engine.encoder.worker.tokenization import TokenizerFacts
from surge_dagster.engine.model.spec import Space

if TYPE_CHECKING:
    import numpy as np
    import torch
    from sentence_transformers import SentenceTransformer


def load_reference(space: Space, device: str) -> SentenceTransformer:
    """sentence-transformers' own model in fp32, with the space's length and normalization, from safetensors only."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # All files are in the folder: a request to the hub would take time, or hang without a network.
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    import torch
    from sentence_transformers import SentenceTransformer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    model = SentenceTransformer(
        space.model_path,
        device=device,
        local_files_only=True,
        trust_remote_code=False,
        model_kwargs={"use_safetensors": True, "torch_dtype": torch.float32},
    )
    model.eval()
    if type(model[0]).__name__ == "Transformer":
        model.max_seq_length = space.max_length
    if not space.normalize:
        names = [name for name, module in model.named_children() if type(module).__name__ == "Normalize"]
        for name in names:
            delattr(model, name)
    return model


def reference_vectors(model: SentenceTransformer, space: Space, texts: list[str]) -> np.ndarray:
    """The vectors of sentence-transformers' `encode` for `texts` in this space, float32 [texts, dimension]."""
    return model.encode(
        texts,
        prompt=space.prompt,
        batch_size=8,
        normalize_embeddings=space.normalize,
        truncate_dim=space.dimension,
        convert_to_numpy=True,
        show_progress_bar=False,
    ).astype("float32")


def tokenizer_facts(model: SentenceTransformer, space: Space) -> TokenizerFacts | None:
    """The model's tokenizer; None where texts do not go through a plain fast tokenizer."""
    first = model[0]
    tokenizer = getattr(first, "tokenizer", None)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    modality_config = getattr(first, "modality_config", {"text": {}})
    if type(first).__name__ != "Transformer" or backend is None or "message" in modality_config:
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


def embedder(model: SentenceTransformer, space: Space, prompt_length: int | None) -> torch.nn.Module:
    """[batch, length] token ids and their mask → [batch, dimension] vectors: the whole model as one module.

    Without a mask every token counts, and attention may use a faster kernel.
    """
    import torch

    tokenizer = getattr(model[0], "tokenizer", None)
    # Some tokenizers, as of most decoders, add no special token: an empty text is a row of padding only.
    rows_may_be_empty = tokenizer is not None and not tokenizer.backend_tokenizer.encode("").ids

    class Embedder(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
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
            return torch.nn.functional.normalize(vectors, p=2.0, dim=-1) if space.normalize else vectors

        def _pool_nothing_from_empty_rows(self, features: dict, attention_mask: torch.Tensor) -> dict:
            """Lets an empty row attend to its first padding: attention to no token is nan in some kernels.

            Pooling still sees the row as empty, so the result equals that of sentence-transformers.
            """
            attended = torch.cat([torch.ones_like(attention_mask[:, :1]), attention_mask[:, 1:]], dim=1)
            transformer, *others = self.model
            features = transformer(features | {"attention_mask": attended})
            features["attention_mask"] = attention_mask
            for module in others:
                features = module(features)
            return features

    return Embedder().eval()
