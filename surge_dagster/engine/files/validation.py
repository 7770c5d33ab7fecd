"""What is checked of vectors before they are published and again when they are verified."""

from __future__ import annotations

import numpy as np

# A float32 vector of length 1 misses it by rounding alone; float16 rounds each component to 11 bits.
_NORM_TOLERANCE = {np.dtype("float32"): 1e-3, np.dtype("float16"): 5e-3}
_CHUNK_ROWS = 1024


def invalid_row(matrix: np.ndarray, *, normalized: bool) -> tuple[int, str] | None:
    """The first row of a [rows, dimension] matrix that cannot be an embedding, and why; None when all can.

    Args:
        normalized: whether every vector must have length 1.
    """
    if matrix.dtype.itemsize == 1:  # every byte is a valid int8 value, and every bit
        return None
    tolerance = _NORM_TOLERANCE[matrix.dtype] if normalized else None
    least, most = 0.0, float(np.finfo(np.float32).max)
    if tolerance is not None:
        least, most = (1 - tolerance) ** 2, (1 + tolerance) ** 2
    for start in range(0, len(matrix), _CHUNK_ROWS):
        chunk = matrix[start : start + _CHUNK_ROWS].astype(np.float32, copy=False)
        with np.errstate(over="ignore"):
            squares = np.vecdot(chunk, chunk)
        # The comparisons fail where a component is NaN or infinite. Only such a chunk is looked at row by row.
        if not (squares.min() >= least and squares.max() <= most):
            found = _first_invalid(chunk, squares, tolerance)
            if found is not None:
                return start + found[0], found[1]
    return None


def _first_invalid(chunk: np.ndarray, squares: np.ndarray, tolerance: float | None) -> tuple[int, str] | None:
    """The first invalid row of a few rows; `tolerance` is the one for the length of 1, where that is expected."""
    lengths = np.sqrt(squares)
    valid = np.isfinite(lengths) if tolerance is None else np.abs(lengths - 1.0) <= tolerance
    for row in np.flatnonzero(~valid):
        if not np.isfinite(chunk[row]).all():
            return int(row), "its vector is not finite"
        if tolerance is not None:  # else its components are finite and only the square of its length is not
            return int(row), f"its vector has length {float(lengths[row]):.4f}; expected 1"
    return None
