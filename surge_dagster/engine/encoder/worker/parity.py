"""Whether this backend gives sentence-transformers' own vectors, asked once and remembered.

A handful of texts that stress what usually goes wrong (the empty text, one word, other scripts, a text that is cut,
many lengths at once) is encoded by the backend and by sentence-transformers' `encode` in fp32; the lowest cosine
between the two must reach what the precision promises. The answer is kept on disk under the spec, the precision, the
device and the library versions, because the reference alone costs as much as loading the model a second time.
"""

from __future__ import annotations

import numpy as np

from surge_dagster.engine.encoder.worker.backends.base import Backend, BackendSettings
from surge_dagster.engine.model.fingerprint import cache_key, processor
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.support import disk_cache

FLOORS = {"fp32": 0.99999, "fp16": 0.999, "bf16": 0.999}

_SENTENCE = "The quick brown fox jumps over the lazy dog while seven wizards quietly mix 42 strange potions. "
PARITY_TEXTS = [
    "",
    " ",
    "word",
    "Stainless steel bottle, 750 ml, keeps drinks cold for a day",
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


def parity_name(space: Space, backend: Backend, settings: BackendSettings) -> str:
    """Where the answer is kept."""
    machine = processor() if settings.device == "cpu" else settings.device.split(":")[0]
    return f"parity/{cache_key(space.spec_sha256, backend.name, backend.detail, settings.precision, machine)}.json"


def kept_parity(name: str) -> float | None:
    """The lowest cosine found before, if it was looked for."""
    document = disk_cache.read_json(name)
    found = document.get("lowest_cosine") if document else None
    return float(found) if isinstance(found, int | float) else None


def keep_parity(name: str, lowest: float, space: Space, backend: Backend) -> None:
    """Remembers the lowest cosine."""
    disk_cache.write_json(name, {"lowest_cosine": lowest, "space": space.name, "backend": backend.detail})


def backend_vectors(backend: Backend, space: Space, texts: list[str]) -> np.ndarray:
    """The backend's vectors of texts, in the space's stored type."""
    matrix = np.empty((len(texts), space.dimension), space.dtype)
    flags = np.empty(len(texts), np.uint8)
    backend.forward(backend.prepare(texts, _nothing), matrix, flags, _nothing)
    return matrix


def lowest_cosine(one: np.ndarray, other: np.ndarray) -> float:
    """The lowest cosine between rows of equal index; 1 for two rows of zeros."""
    return float(cosines(one, other).min())


def cosines(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Cosine of each row of one matrix to the same row of the other; 1 for two rows of zeros."""
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    products = np.einsum("ij,ij->i", ours, theirs)
    return np.where(lengths > 0, products / np.where(lengths > 0, lengths, 1), ours.any(1) == theirs.any(1))


def _nothing() -> None:
    return None
