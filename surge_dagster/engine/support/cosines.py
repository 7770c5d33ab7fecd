"""Cosines between the rows of two matrices, which decide whether two encodings of a text agree."""

from __future__ import annotations

import numpy as np

# Lowest cosine between a vector and sentence-transformers' own fp32 vector of the same text, by the
# vector's precision.
LOWEST_COSINE = {"fp32": 0.99999, "fp16": 0.999, "bf16": 0.999}


def cosines(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Cosine of each row of one matrix to the same row of the other; 1 for two rows of zeros, -1
    where not finite."""
    finite = np.asarray(np.isfinite(np.hstack([ours, theirs])).all(axis=1))
    ours, theirs = (
        np.where(finite[:, None], matrix, 0).astype(np.float64) for matrix in (ours, theirs)
    )
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    products = np.einsum("ij,ij->i", ours, theirs)
    result = np.where(
        lengths > 0, products / np.where(lengths > 0, lengths, 1), ours.any(1) == theirs.any(1)
    )
    return np.where(finite, result, -1.0)
