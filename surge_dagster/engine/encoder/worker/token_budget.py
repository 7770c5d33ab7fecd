"""The token budget of a forward pass, measured once for a kind of device and cached.

Up to some number of tokens, the saturation point, a pass takes nearly the same time. It depends on
the model, the kernels and the device; smaller passes waste the device, much larger ones only need
memory and, on a CPU, caches. So a first start measures tokens per second at a few budgets, through
the backend's own `forward` on copies of one short text, and takes the smallest budget within 3 % of
the best rate. With one length all budgets have the same work, and the passes of every backend are
full.

Every budget is measured in two rounds and its better rate counts: a short slowdown of the machine
affects one round, not one budget. This takes less than three seconds; a model that is too slow for
it keeps the backend's default.
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
_SECONDS_OF_A_ROUND = 1.3
# Small budgets are measured over as many tokens as this many passes of the smallest one, on each
# stream.
_SMALLEST_PASSES = 4
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
            default = backend.token_budget
            rates = measure_rates(backend, space)
            best = saturation_budget(rates, backend.budget_candidates, default)
            budget = min(best, backend.token_budget)
            calibration.write(token_budget=budget, space=space.name)
    backend.token_budget = budget


def saturation_budget(rates: dict[int, float], candidates: tuple[int, ...], default: int) -> int:
    """Return the smallest budget whose rate is within 3 % of the best one.

    It is at least the default where the measured budgets end below the default, or the rate still
    rises at their end.
    """
    if not rates:
        return default
    largest = max(rates)
    enough = _CLOSE_ENOUGH * max(rates.values())
    saturated = min(budget for budget, rate in rates.items() if rate >= enough)
    cut_short = largest < default or (saturated == largest and largest < candidates[-1])
    return max(saturated, default) if cut_short else saturated


def measure_rates(backend: BudgetedBackend, space: Space) -> dict[int, float]:
    """Return tokens per second at each budget that fits into memory and can be measured in time.

    Sets the backend's budget to the largest one that fits, but at least to its default.
    """
    default = backend.token_budget
    smallest = backend.budget_candidates[0]
    length = max(1, int(backend.prepare([_TEXT]).lengths[0]))
    # A first pass on each stream warms up and shows how many budgets can be measured in time.
    fastest, _ = _run(backend, space, length, smallest, backend.streams)
    rates: dict[int, float] = {}
    candidates = backend.budget_candidates
    for round_number in range(_ROUNDS):
        spent = 0.0
        for budget in candidates:
            passes = backend.streams * max(1, _SMALLEST_PASSES * smallest // budget)
            if round_number == 0 and spent + passes * budget / fastest > _SECONDS_OF_A_ROUND:
                break
            rate, seconds = _run(backend, space, length, budget, passes)
            if backend.token_budget < budget:
                # Memory ran out: this budget and larger ones are not measured again in the next
                # round.
                rates = {fitting: rate for fitting, rate in rates.items() if fitting < budget}
                default = min(default, backend.token_budget)
                break
            spent += seconds
            fastest = max(fastest, rate)
            rates[budget] = max(rate, rates.get(budget, 0.0))
        candidates = tuple(rates)
    backend.token_budget = max([*rates, default])
    return rates


def _run(
    backend: BudgetedBackend, space: Space, length: int, budget: int, passes: int
) -> tuple[float, float]:
    """Return tokens per second and seconds of full passes; sets the backend's budget, or less."""
    # Packed passes of a chunk are equal, and each is a text below its budget: with one text more
    # they would be halved.
    texts = [_TEXT] * (passes * max(1, budget // length - 1))
    backend.token_budget = budget
    _, metrics = encode_texts(backend, texts, space.dimension, space.dtype)
    seconds = max(metrics.forward_seconds, 1e-6)
    return metrics.padded_tokens / seconds, seconds
