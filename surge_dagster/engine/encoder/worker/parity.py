"""The parity check: compares a backend's vectors with those of sentence-transformers, once.

A few texts that often break an implementation are encoded by the backend and by
sentence-transformers' own methods in fp32; the lowest cosine between the two must reach the promise
of the precision, and vectors must be as long: a cosine does not show a normalization too few or too
many.
"""

from __future__ import annotations

import numpy as np

from surge_dagster.engine.encoder.calibration import Calibration
from surge_dagster.engine.encoder.worker.backends.base import (
    Backend,
    BackendSettings,
    encode_texts,
)
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.support.cosines import LOWEST_COSINE, cosines

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
    if lowest is None or length is None:
        vectors, _ = encode_texts(backend, PARITY_TEXTS, space.dimension, space.dtype)
        reference = _reference(space)
        lowest = lowest_cosine(vectors, reference)
        length = _length(vectors, reference)
        facts = {"space": space.name, "backend": backend.detail}
        calibration.write(lowest_cosine=lowest, length=length, **facts)

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


def _reference(space: Space) -> np.ndarray:
    """Return fp32 vectors, from the CPU: a device may have no room for the model a second time."""
    from surge_dagster.engine.encoder.worker.sentence_model import load_reference, reference_vectors

    return reference_vectors(load_reference(space, "cpu"), space, PARITY_TEXTS)


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
