"""The model as sentence-transformers loads it, and ReferenceBackend, which encodes with it. Only workers import this.

Everything that sentence-transformers decides about a model (modules, prompts, special cases of the tokenizer) is taken
from its loaded object and not decided again here.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from surge_dagster.engine.encoder.metrics import Costs
from surge_dagster.engine.encoder.worker.backends.base import Progress, Rows
from surge_dagster.engine.encoder.worker.tokenization import PROBES, TokenizerFacts, digest_of_tokens
from surge_dagster.engine.model.code import untrusted
from surge_dagster.engine.model.digest import read_document
from surge_dagster.engine.model.prompts import CONFIG_FILE, stated_prompts
from surge_dagster.engine.model.spec import Space

if TYPE_CHECKING:
    import torch
    from sentence_transformers import SentenceTransformer

_TEXTS_PER_STEP = 256


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
    try:
        model = SentenceTransformer(
            space.model_path,
            device=device,
            local_files_only=True,
            trust_remote_code=space.requested.trust_remote_code is not None,
            model_kwargs={"use_safetensors": True, "torch_dtype": torch.float32},
        )
    except ValueError as error:
        if "trust_remote_code" in str(error):
            raise untrusted(Path(space.model_path), "needs code of its own") from error
        raise
    model.eval()
    # Without the empty prompts that the library fills in, its own rule chooses among the prompts that the model states.
    own = read_document(Path(space.model_path) / CONFIG_FILE) or {}
    model.prompts = dict[str, str | None](stated_prompts(own, Path(space.model_path)))
    # max_length is that of documents: a Router's route for queries keeps its own.
    if space.side == "document" or space.requested.max_length is not None:
        for first in (chain[0] for chain in _chains(model)):
            if type(first).__name__ == "Transformer":
                first.max_seq_length = space.max_length
    if not space.normalize:
        for chain in _chains(model):
            for name in [name for name, module in chain.named_children() if type(module).__name__ == "Normalize"]:
                delattr(chain, name)
    return model


def _chains(model: SentenceTransformer) -> list[Any]:
    """The model's modules, and those of the routes within it."""
    routers: list[Any] = [module for module in model if type(module).__name__ == "Router"]
    return [model, *(route for router in routers for route in router.sub_modules.values())]


def reference_vectors(model: SentenceTransformer, space: Space, texts: list[str]) -> np.ndarray:
    """float32 [texts, dimension]; a prompt that was not requested is left to the library."""
    is_query = space.task == "query"
    return (model.encode_query if is_query else model.encode_document)(
        texts,
        prompt=space.requested.query_prompt if is_query else space.requested.document_prompt,
        batch_size=8,
        normalize_embeddings=space.normalize,
        truncate_dim=space.dimension,
        convert_to_numpy=True,
        show_progress_bar=False,
    ).astype("float32")


class ReferenceBackend:
    """Computes vectors through sentence-transformers' `encode`, for models without plain rows of token ids.

    Examples are static embeddings, chat templates and tokenizers without a fast version. A text that fills the model
    counts as cut, because the model's preprocessing does not say which of these texts were longer.
    """

    name = "torch"

    def __init__(self, space: Space, reference: SentenceTransformer, detail: str) -> None:
        self._space = space
        self._reference = reference
        self.detail = f"{detail}, through sentence-transformers' encode"
        features = [reference.preprocess([text], task=space.task) for text in PROBES]
        self.tokens_digest = digest_of_tokens([each["input_ids"].tolist() for each in features if "input_ids" in each])

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
        return Costs(tokens=tokens, padded_tokens=tokens, forward_seconds=time.perf_counter() - started)

    def _lengths(self, texts: list[str]) -> np.ndarray:
        """Tokens that the model reads of each text; zeros for a model without a limit."""
        features = self._reference.preprocess(texts, prompt=self._space.prompt or None, task=self._space.task)
        mask = features.get("attention_mask")
        return np.zeros(len(texts), np.int64) if mask is None else mask.sum(1).cpu().numpy()


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
