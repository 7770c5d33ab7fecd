"""Costs per unit, and a pace, that explain measured seconds."""

from __future__ import annotations

import numpy as np

_LEAST_SECONDS = 1e-6


def fit_costs(amounts: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return the cost of each column of `amounts`, at least 0, by weighted least squares.

    A measurement weighs 1/seconds, because long times vary by more. Costs below 0 are left out, the
    lowest first, until all others are above 0.
    """
    costs = np.zeros(amounts.shape[1])
    is_used = np.asarray((amounts != 0).any(axis=0))
    weights = 1 / np.sqrt(np.maximum(seconds, _LEAST_SECONDS))
    while is_used.any():
        columns = amounts[:, is_used]
        # Columns of equal size: a few measurements are explained by all of them.
        scales = columns.mean(axis=0)
        found = np.linalg.lstsq(columns / scales * weights[:, None], seconds * weights)[0]
        if (found >= 0).all():
            costs[is_used] = found / scales
            break
        is_used[np.flatnonzero(is_used)[found.argmin()]] = False
    return costs


def pace(seconds: np.ndarray, expected: np.ndarray) -> float:
    """Return how many times longer than expected most of the expected seconds took.

    A single measurement that was stalled does not change it.
    """
    ratios = seconds / expected
    order = np.argsort(ratios)
    before = np.cumsum(expected[order])
    middle = np.searchsorted(before, before[-1] / 2)
    return float(ratios[order[middle]])
