"""The parity check: compares a backend's vectors with those of sentence-transformers, once.

A few texts that often break an implementation are encoded by the backend and by
sentence-transformers' own methods in fp32; the lowest cosine between the two must reach the promise
of the precision, and vectors must be as long: a cosine does not show a normalization too few or too
many.

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

from surge_dagster.engine.encoder.calibration import Calibration
from surge_dagster.engine.encoder.worker.backends import Backend, BackendSettings, encode_texts
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.digest import read_document, untrusted
from surge_dagster.engine.model.prompts import CONFIG_FILE, stated_prompts
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.support.cosines import LOWEST_COSINE, cosines

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

# Small, because padding costs a CPU much. The library fails on a batch that has a single text of no
# tokens, which the 16 texts of the parity check have not.
_BATCH_TEXTS = 4

# Half precision moves a length by less than one percent.
_LENGTH_TOLERANCE = 0.05

_SENTENCE = (
    "The quick brown fox jumps over the lazy dog "
    "while seven wizards quietly mix 42 strange potions. "
)
PARITY_TEXTS = [
    "",
    " ",
    "word",
    "Between <pad> and [PAD]<pad> are words",
    "A row ends with [SEP] and </s> and begins with [CLS]",
    "<mask> and [MASK] <mask>",  # ESM scales a text by its share of mask tokens
    "Größe 43, naïve façade, Ærøskøbing",
    "東京の夜景 пример текста مثال 🚀🚀",
    "def f(x: int) -> str:\n    return f'{x!r}'  # comment",
    "a " * 40,
    "a " * 41,
    _SENTENCE,
    _SENTENCE * 3,
    _SENTENCE * 60,
    "antidisestablishmentarianism" * 8,
    "Return the number of rows.\n\nArgs:\n    table: where to look.\n",
]


def check_parity(
    space: Space, backend: Backend, settings: BackendSettings, calibration: Calibration
) -> float:
    """Return the lowest cosine, cached or measured.

    Raises:
        ConfigError: it is too low, or vectors are longer or shorter.
    """
    lowest = calibration.read("lowest_cosine")
    length = calibration.read("length")
    if lowest is None:
        vectors, _ = encode_texts(backend, PARITY_TEXTS, space)
        # in fp32 and on the CPU: a device may have no room for the model a second time
        reference = reference_vectors(load_reference(space, "cpu"), space, PARITY_TEXTS)
        lowest = lowest_cosine(vectors, reference)
        length = _length(vectors, reference)
        calibration.write(lowest_cosine=lowest, length=length, space=space.name)

    differs = f"{backend.detail} in {settings.precision} differs from sentence-transformers"
    remedy = "use another precision, or devices of another kind"
    if settings.precision == "fp16":
        remedy = "activations of some models overflow fp16: set precision to bf16"
    promised = LOWEST_COSINE[settings.precision]
    if lowest < promised:
        raise ConfigError(
            f"{differs} (lowest cosine {lowest:.7f}, promised {promised:.5f}); {remedy}"
        )
    if abs(length - 1) > _LENGTH_TOLERANCE:
        raise ConfigError(f"{differs}: a vector is {length:.3g} times as long; {remedy}")
    return lowest


def lowest_cosine(one: np.ndarray, other: np.ndarray) -> float:
    """Return the lowest cosine between rows of equal index; 1 for two rows of zeros."""
    return float(cosines(one, other).min())


def _length(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the length of a row relative to the same row of the other: that farthest from 1."""
    one = np.linalg.norm(ours.astype(np.float64), axis=1)
    other = np.linalg.norm(theirs.astype(np.float64), axis=1)
    has_length = other > 0
    ratios = one[has_length] / other[has_length]
    if not len(ratios):
        return 1.0
    return float(ratios[np.abs(ratios - 1).argmax()])


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
