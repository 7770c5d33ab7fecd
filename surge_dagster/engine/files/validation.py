"""What is checked of vectors before they are published and again when they are verified."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

# Rounding: a float32 vector of length 1 misses it slightly, and float16 rounds each component to 11
# bits.
_NORM_TOLERANCE = {np.dtype("float32"): 1e-3, np.dtype("float16"): 5e-3}
_CHUNK_ROWS = 1024


def invalid_row(
    matrix: np.ndarray,
    *,
    normalized: bool,
    may_be_zero: Callable[[int], bool] = lambda row: False,
) -> tuple[int, str] | None:
    """Return the first row of a [rows, dimension] matrix that cannot be an embedding, and why; None
    if all can.

    Args:
        normalized: whether every vector must have length 1.
        may_be_zero: whether a row may be all zeros: models without a token for a blank text give it
            such a vector.
    """
    if matrix.dtype.itemsize == 1:  # every byte is a valid int8 value, and every bit
        return None
    tolerance = _NORM_TOLERANCE[matrix.dtype]
    for start in range(0, len(matrix), _CHUNK_ROWS):
        chunk = matrix[start : start + _CHUNK_ROWS].astype(np.float32, copy=False)
        with np.errstate(over="ignore"):
            lengths = np.sqrt(np.vecdot(chunk, chunk))
        # The comparison fails if a component is NaN or infinite.
        valid = np.abs(lengths - 1) <= tolerance if normalized else np.isfinite(lengths)
        for row in np.flatnonzero(~valid).tolist():
            if not np.isfinite(chunk[row]).all():
                return start + row, "its vector is not finite"
            # else its components are finite and only the square of its length is not
            is_blank = not chunk[row].any() and may_be_zero(start + row)
            if normalized and not is_blank:
                return start + row, f"its vector has length {float(lengths[row]):.4f}; expected 1"
    return None
