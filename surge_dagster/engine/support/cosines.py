"""Cosines between the rows of two matrices, which decide whether two encodings of a text agree."""

from __future__ import annotations

import numpy as np

# Lowest cosine between a vector and sentence-transformers' own fp32 vector of the same text, by the
# vector's precision. Of a model behind HTTP, whose precision is not known, between two answers.
LOWEST_COSINE = {"fp32": 0.99999, "fp16": 0.999, "bf16": 0.999, "http": 0.999}


def cosines(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Return the cosine of each row of one matrix to the same row of the other: 1 for two rows of
    zeros, -1 for a row that is not finite."""
    finite = np.asarray(np.isfinite(np.hstack([ours, theirs])).all(axis=1))
    ours = np.where(finite[:, None], ours, 0).astype(np.float64)
    theirs = np.where(finite[:, None], theirs, 0).astype(np.float64)
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    has_length = lengths > 0
    products = np.einsum("ij,ij->i", ours, theirs) / np.where(has_length, lengths, 1)
    result = np.where(has_length, products, ours.any(1) == theirs.any(1))
    return np.where(finite, result, -1.0)
