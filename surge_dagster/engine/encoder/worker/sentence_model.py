"""The model as sentence-transformers loads it, whose vectors others are compared with.

Everything that sentence-transformers decides about a model (modules, prompts, special cases of the
tokenizer) is taken from its loaded object and not decided again here.
"""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from surge_dagster.engine.model.code import untrusted
from surge_dagster.engine.model.digest import read_document
from surge_dagster.engine.model.prompts import CONFIG_FILE, stated_prompts
from surge_dagster.engine.model.spec import Space

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

# Small, because padding costs a CPU much. The library fails on a batch that has a single text of no
# tokens, which the 16 texts of the parity check have not.
_BATCH_TEXTS = 4


def load_reference(space: Space, device: str) -> SentenceTransformer:
    """Load sentence-transformers' own model in fp32, with the space's length and normalization."""
    _quiet_libraries()
    import torch
    from sentence_transformers import SentenceTransformer

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
    # Without the empty prompts that the library fills in, its own rule chooses among the prompts
    # that the model states.
    own = read_document(Path(space.model_path) / CONFIG_FILE) or {}
    model.prompts = dict[str, str | None](stated_prompts(own, Path(space.model_path)))
    first: Any = model[0]
    if type(first).__name__ == "Transformer":
        first.max_seq_length = space.max_length
    if not space.normalize:
        for name, module in list(model.named_children()):
            if type(module).__name__ == "Normalize":
                delattr(model, name)
    return model


def _quiet_libraries() -> None:
    """Keep libraries from printing, and from asking the hub: all files are in the folder."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ["HF_HUB_OFFLINE"] = "1"
    warnings.filterwarnings("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()


def reference_vectors(model: SentenceTransformer, space: Space, texts: list[str]) -> np.ndarray:
    """float32 [texts, dimension]; a prompt that was not requested is left to the library."""
    encode = model.encode_document
    prompt = space.requested.document_prompt
    if space.task == "query":
        encode = model.encode_query
        prompt = space.requested.query_prompt
    return encode(
        texts,
        prompt=prompt,
        batch_size=_BATCH_TEXTS,
        normalize_embeddings=space.normalize,
        truncate_dim=space.dimension,
        convert_to_numpy=True,
        show_progress_bar=False,
    ).astype("float32")
