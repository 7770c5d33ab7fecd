"""Vectors of a derived space, computed from float32 vectors, and back for comparison with queries.

The conventions are those of sentence-transformers' `quantize_embeddings`, which tests compare bit
for bit. "int8" has 255 steps between the smallest and the largest value of each dimension, and
values beyond them are clipped. "binary" is its "ubinary": a bit per value, set if the value is
above zero, eight bits to a byte, the first one highest.
"""

from __future__ import annotations

import numpy as np

from surge_dagster.engine.model.spec import Space

_TINY = np.finfo(np.float32).tiny


def cut(matrix: np.ndarray, space: Space) -> np.ndarray:
    """Return the leading dimensions of float32 vectors, [rows, dimension].

    They are scaled to length 1 if the space normalizes; a vector of zeros stays zero. Vectors that
    keep all dimensions are returned as they are.
    """
    if matrix.shape[1] == space.dimension:
        return matrix
    kept = matrix[:, : space.dimension].copy()
    if space.normalize:
        kept /= np.maximum(np.sqrt(np.vecdot(kept, kept)), _TINY)[:, None]
    return kept


def convert(vectors: np.ndarray, space: Space) -> np.ndarray:
    """Return float32 vectors as the space stores them: [rows, dimension], or bits in bytes."""
    match space.dtype:
        case "int8":
            starts, steps = _steps(space)
            values = vectors - starts
            values /= steps
            np.clip(values, 0, 255, out=values)
            return (values.astype(np.uint8) ^ 128).view(np.int8)  # rounded down, less 128
        case "binary":
            return np.packbits(vectors > 0, axis=-1)
        case _:
            return vectors.astype(space.dtype, copy=False)


def comparable(stored: np.ndarray, space: Space) -> np.ndarray:
    """Return stored vectors as float32, [rows, dimension], for comparison with a query's.

    An int8 value is the lower end of its step, as in sentence-transformers; a bit is 1 or -1.
    """
    match space.dtype:
        case "int8":
            starts, steps = _steps(space)
            return (stored.view(np.int8).astype(np.float32) + 128) * steps + starts
        case "binary":
            return np.unpackbits(stored, axis=-1).astype(np.float32) * 2 - 1
        case _:
            return stored.astype(np.float32, copy=False)


def _steps(space: Space) -> tuple[np.ndarray, np.ndarray]:
    """Return where each dimension's steps begin, and how wide they are."""
    assert space.derived and space.derived.ranges
    least, most = np.array(space.derived.ranges, np.float32)
    steps = (most - least) / 255
    return least, np.where(steps == 0, np.float32(1), steps)
