"""What is checked of vectors before they are published and again when they are verified."""

from __future__ import annotations

import numpy as np

# A float32 vector of length 1 misses it by rounding alone; float16 rounds each component to 11 bits.
_NORM_TOLERANCE = {np.dtype("float32"): 1e-3, np.dtype("float16"): 5e-3}
# float32 is read as it lies, as fast as main memory gives it: the longer the way, the better. float16 is widened before
# it is squared, a few rows at a time, so that they stay in the processor's cache.
_CHUNK_ROWS = {np.dtype("float32"): 16_384, np.dtype("float16"): 128}
_FINITE_SQUARES = {np.dtype("float32"): float(np.finfo(np.float32).max), np.dtype("float16"): 65_535.0**2}


def invalid_row(matrix: np.ndarray, *, normalized: bool) -> tuple[int, str] | None:
    """The first row of a [rows, dimension] matrix that cannot be an embedding, and why; None when all can.

    Args:
        normalized: whether every vector must have length 1.
    """
    tolerance = _NORM_TOLERANCE[matrix.dtype]
    least, most = 0.0, _FINITE_SQUARES[matrix.dtype]
    if normalized:
        least, most = (1 - tolerance) ** 2, (1 + tolerance) ** 2
    step = _CHUNK_ROWS[matrix.dtype]
    with np.errstate(over="ignore"):
        for start in range(0, len(matrix), step):
            chunk = matrix[start : start + step]
            squares = _squared_lengths(chunk)
            # A NaN or an infinity in a row makes its square one too, or large, so the matrix is walked once; a NaN
            # fails any comparison. What is suspected is looked at again.
            if squares.min() >= least and squares.max() <= most:
                continue
            found = _first_invalid(chunk.astype(np.float32, copy=False), tolerance if normalized else None)
            if found is not None:
                return start + found[0], found[1]
    return None


def _squared_lengths(chunk: np.ndarray) -> np.ndarray:
    """The square of each vector's length, float32; for a float16 vector that is not finite at least 65,536 squared."""
    if chunk.dtype == np.float32:
        return np.vecdot(chunk, chunk)
    # Numpy takes three times as long to convert float16. These are its bits, without the sign, where float32 has them;
    # the exponent's origin differs by 112, and that of an infinity is an ordinary one.
    bits = np.bitwise_and(chunk.view(np.uint16), 0x7FFF, dtype=np.uint32, casting="unsafe")
    bits <<= 13
    values = bits.view(np.float32)
    values *= np.float32(2.0**112)
    return np.vecdot(values, values)


def _first_invalid(chunk: np.ndarray, tolerance: float | None) -> tuple[int, str] | None:
    """The same of a few rows of float32; a tolerance is for the length of 1."""
    lengths = np.sqrt(np.vecdot(chunk, chunk))
    sound = np.isfinite(lengths) if tolerance is None else np.abs(lengths - 1.0) <= tolerance
    for row in np.flatnonzero(~sound):
        if not np.isfinite(chunk[row]).all():
            return int(row), "its vector is not finite"
        if tolerance is not None:  # else it is finite and the square of its length is not
            return int(row), f"its vector has length {float(lengths[row]):.4f}; expected 1"
    return None
