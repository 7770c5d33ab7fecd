"""What is checked of vectors before they are published and again when they are verified."""

from __future__ import annotations

import numpy as np

_CHUNK_ROWS = 1024
# A float32 vector of length 1 misses it by rounding alone; float16 rounds each component to 11 bits.
_NORM_TOLERANCE = {np.dtype("float32"): 1e-3, np.dtype("float16"): 5e-3}


def invalid_row(matrix: np.ndarray, *, normalized: bool) -> tuple[int, str] | None:
    """The first row of a [rows, dimension] matrix that cannot be an embedding, and why; None when all can.

    Args:
        normalized: whether every vector must have length 1.
    """
    tolerance = _NORM_TOLERANCE[matrix.dtype]
    for start in range(0, len(matrix), _CHUNK_ROWS):
        chunk = matrix[start : start + _CHUNK_ROWS].astype(np.float32, copy=False)
        with np.errstate(over="ignore"):
            squares = np.vecdot(chunk, chunk)
        sound = np.abs(np.sqrt(squares) - 1.0) <= tolerance if normalized else np.isfinite(squares)
        if sound.all():
            continue
        # A NaN or an infinity in a row makes its sum of squares one too, so the matrix is walked once; a finite
        # float32 vector can overflow the sum, so what is suspected is looked at again.
        for row in np.flatnonzero(~np.isfinite(squares)):
            if not np.isfinite(chunk[row]).all():
                return start + int(row), "its vector is not finite"
        if normalized:
            off = np.flatnonzero(~sound)
            if off.size:
                return start + int(off[0]), f"its vector has length {float(np.sqrt(squares[off[0]])):.4f}; expected 1"
    return None
