"""A straight line through timings, and how far its intercept can be trusted.

The fixed cost of a call is what is left at size zero. Timings on a machine that others use are off by a share of
themselves, so that one long call would outvote all the short ones that know the fixed cost; each point is therefore
weighted by 1 / seconds², which makes the sum of squares one of relative errors.

Weighted least squares, with numpy alone:

    beta = (XᵀWX)⁻¹ XᵀW y            X = [1, size], W = diag(w)
    s²   = Σ w (y - X beta)² / (n - 2)
    interval of the intercept = beta₀ ± t(0.975, n - 2) · sqrt(s² · [(XᵀWX)⁻¹]₀₀)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

_T_OF_FEW = (12.7062, 4.3027, 3.1824, 2.7764)


@dataclass(frozen=True, slots=True)
class Line:
    """seconds = intercept + slope · size, with the 95 % interval of the intercept; all in seconds."""

    intercept: float
    slope: float
    low: float
    high: float

    def __call__(self, size: np.ndarray) -> np.ndarray:
        return self.intercept + self.slope * size


def fit_line(sizes: Sequence[float], seconds: Sequence[float], *, relative: bool = True) -> Line:
    """The line through timings; `relative` weighs each by 1 / seconds², else all weigh the same.

    Raises:
        ValueError: fewer than three different sizes, which leave nothing to judge the line by.
    """
    if len(sizes) != len(seconds) or len(set(sizes)) < 3:
        raise ValueError(f"a line needs a timing for each of at least three sizes, not {len(seconds)} for {sizes}")
    y = np.asarray(seconds, np.float64)
    x = np.column_stack([np.ones(len(y)), np.asarray(sizes, np.float64)])
    weights = 1 / y**2 if relative else np.ones(len(y))
    inverse = np.linalg.inv(x.T @ (weights[:, None] * x))
    intercept, slope = inverse @ (x.T @ (weights * y))
    freedom = len(y) - 2
    variance = float(weights @ (y - intercept - slope * x[:, 1]) ** 2) / freedom
    margin = student_t(freedom) * float(np.sqrt(variance * inverse[0, 0]))
    return Line(float(intercept), float(slope), float(intercept) - margin, float(intercept) + margin)


def student_t(freedom: int) -> float:
    """The 97.5 % point of Student's t.

    From the table up to 4 degrees of freedom, then the Cornish-Fisher expansion around the normal's point, which is
    within 0.1 % there.
    """
    if freedom <= len(_T_OF_FEW):
        return _T_OF_FEW[freedom - 1]
    z = NormalDist().inv_cdf(0.975)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    fourth = (79 * z**9 + 776 * z**7 + 1_482 * z**5 - 1_920 * z**3 - 945 * z) / 92_160
    return z + first / freedom + second / freedom**2 + third / freedom**3 + fourth / freedom**4
