"""The token budget of a forward pass, measured once for a kind of device and cached.

Up to some number of tokens, the saturation point, a pass takes nearly the same time. It depends on
the model, the kernels and the device; smaller passes waste the device, much larger ones only need
memory and, on a CPU, caches. So a first start encodes the same texts, of one length, at three
budgets, and takes the smallest budget within 3 % of the best rate. The better of two rounds counts.
This takes some seconds; a model that is too slow for it keeps the backend's default.
"""

from __future__ import annotations

from surge_dagster.engine.encoder.calibration import MEASURING_LOCK, Calibration
from surge_dagster.engine.encoder.worker.backends.base import (
    Backend,
    BackendSettings,
    BudgetedBackend,
    encode_texts,
)
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.support import disk_cache

_CLOSE_ENOUGH = 0.97
_ROUNDS = 2
_MOST_SECONDS = 6.0
_TEXT = "cotton shirt, long sleeves, garden green, size 42"


def set_token_budget(
    space: Space, backend: Backend, settings: BackendSettings, calibration: Calibration
) -> None:
    """Give the backend the best budget for this machine, unless one was requested."""
    if settings.token_budget is not None or not isinstance(backend, BudgetedBackend):
        return
    # Workers that start together measure once, and not concurrently.
    with disk_cache.lock(MEASURING_LOCK):
        budget = calibration.read("token_budget")
        if budget is None:
            budget = measured_budget(backend, space)
            calibration.write(token_budget=budget, space=space.name)
    backend.token_budget = budget


def measured_budget(backend: BudgetedBackend, space: Space) -> int:
    """Return the smallest budget with nearly the best rate; the default if measuring takes long."""
    default = backend.token_budget
    budgets = backend.budget_candidates
    length = int(backend.prepare([_TEXT]).lengths[0])
    # Packed passes lie below their budget by a text; these few texts less keep all passes full.
    texts = backend.streams * (budgets[-1] // length) - budgets[-1] // budgets[0]

    first_rate = _tokens_per_second(backend, space, backend.streams * (budgets[0] // length))
    if _ROUNDS * len(budgets) * texts * length / first_rate > _MOST_SECONDS:
        return default

    rates = dict.fromkeys(budgets, 0.0)
    for _ in range(_ROUNDS):
        for budget in budgets:
            backend.token_budget = budget
            rate = _tokens_per_second(backend, space, texts)
            if backend.token_budget < budget:  # memory ran out
                return backend.token_budget
            rates[budget] = max(rates[budget], rate)
    enough = _CLOSE_ENOUGH * max(rates.values())
    return min(budget for budget, rate in rates.items() if rate >= enough)


def _tokens_per_second(backend: BudgetedBackend, space: Space, texts: int) -> float:
    _, costs = encode_texts(backend, [_TEXT] * texts, space.dimension, space.dtype)
    return costs.padded_tokens / max(costs.forward_seconds, 1e-6)
