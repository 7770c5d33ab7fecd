"""How many tokens a forward pass should have, measured once for a kind of device and remembered.

A pass has a price of its own: up to some number of tokens it takes nearly the same time, and from there on time grows
with the tokens. That number, the saturation point, depends on the model, the kernels and the device; passes below it
waste the device, passes far beyond it only cost memory and, on a CPU, caches. So a first start measures tokens per
second at a few budgets, through the backend's own `forward` on short texts of three lengths, and takes the smallest
budget that comes within 3 % of the best rate.

Every budget is measured in two rounds, one budget after the other, and its better rate counts: what slows the machine
down for a moment hits one round, not one budget. The profile has less than three seconds: where a slow model does
not get far enough in them, the answer is the backend's own default.
"""

from __future__ import annotations

import numpy as np

from surge_dagster.engine.encoder.worker.backends.base import Backend, BackendSettings
from surge_dagster.engine.encoder.worker.backends.token_backend import TokenBackend
from surge_dagster.engine.model.fingerprint import cache_key
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.support import disk_cache

_FOLDER = "token-budget"
_CLOSE_ENOUGH = 0.97
_ROUNDS = 2
_SECONDS_OF_A_ROUND = 1.3
# Small budgets are measured over as many tokens as this many passes of the smallest one, on each stream.
_SMALLEST_PASSES = 4
_TEXTS = (
    "steel travel mug with lid",
    "cotton shirt, long sleeves, garden green, size 42",
    "oak table lamp with a linen shade: warm light for a desk, a shelf or a quiet corner, with a cable of two metres",
)


def settle_token_budget(space: Space, backend: Backend, settings: BackendSettings) -> None:
    """Gives `backend` the best budget for this machine, unless one was asked for or it has none."""
    if settings.token_budget is not None or not isinstance(backend, TokenBackend):
        return
    key = cache_key("token budget", space.spec_sha256, backend.name, settings.precision, backend.machine)
    name = f"{_FOLDER}/{key}.json"
    kept = _kept_budget(name)
    if kept is None:
        # Workers that start together measure once, and not all at the same time.
        with disk_cache.lock(f"{_FOLDER}/.lock"):
            kept = _kept_budget(name)
            if kept is None:
                default = backend.token_budget
                rates = measure_rates(backend, space)
                kept = min(saturation_budget(rates, backend.budget_candidates, default), backend.token_budget)
                measured = {str(budget): round(rate) for budget, rate in rates.items()}
                disk_cache.write_json(name, {"token_budget": kept, "tokens_per_second": measured, "space": space.name})
    backend.token_budget = kept


def saturation_budget(rates: dict[int, float], candidates: tuple[int, ...], default: int) -> int:
    """The smallest budget whose rate is within 3 % of the best one.

    Where the budgets that were measured end below the default, or the rate still rises at their end, it is at least
    the default: nothing was seen that speaks against it.
    """
    if not rates:
        return default
    largest = max(rates)
    enough = _CLOSE_ENOUGH * max(rates.values())
    found = min(budget for budget, rate in rates.items() if rate >= enough)
    cut_short = largest < default or (found == largest and largest < candidates[-1])
    return max(found, default) if cut_short else found


def measure_rates(backend: TokenBackend, space: Space) -> dict[int, float]:
    """Tokens per second at each of the backend's budgets that can be measured in time and fits into memory.

    Leaves the backend with the largest budget that is known to fit, or its default where that is smaller.
    """
    default = backend.token_budget
    smallest = backend.budget_candidates[0]
    lengths = [int(length) for length in backend.prepare(list(_TEXTS), _nothing).tokens.lengths]
    # A first pass on each stream warms up, and says what can be afforded.
    fastest, _ = _run(backend, space, lengths, smallest, backend.streams)
    rates: dict[int, float] = {}
    candidates = backend.budget_candidates
    for round_number in range(_ROUNDS):
        spent = 0.0
        for budget in candidates:
            passes = backend.streams * max(1, _SMALLEST_PASSES * smallest // budget)
            if round_number == 0 and spent + passes * budget / fastest > _SECONDS_OF_A_ROUND:
                break
            rate, seconds = _run(backend, space, lengths, budget, passes)
            if backend.token_budget < budget:
                # Memory ran out: this budget and larger ones are out of the question, also in the next round.
                rates = {fitting: rate for fitting, rate in rates.items() if fitting < budget}
                default = min(default, backend.token_budget)
                break
            spent += seconds
            fastest = max(fastest, rate)
            rates[budget] = max(rate, rates.get(budget, 0.0))
        candidates = tuple(rates)
    backend.token_budget = max([*rates, default])
    return rates


def _run(backend: TokenBackend, space: Space, lengths: list[int], budget: int, passes: int) -> tuple[float, float]:
    """Tokens per second, and seconds, of so many full passes; the backend's budget is `budget` afterwards, or less."""
    texts: list[str] = []
    for number in range(passes):
        kind = number % len(_TEXTS)
        texts += [_TEXTS[kind]] * max(1, budget // max(1, lengths[kind]))
    backend.token_budget = budget
    matrix = np.empty((len(texts), space.dimension), space.dtype)
    figures = backend.forward(backend.prepare(texts, _nothing), matrix, np.empty(len(texts), np.uint8), _nothing)
    seconds = max(figures.forward_seconds, 1e-6)
    return figures.padded_tokens / seconds, seconds


def _kept_budget(name: str) -> int | None:
    document = disk_cache.read_json(name)
    found = document.get("token_budget") if document else None
    return found if isinstance(found, int) and found > 0 else None


def _nothing() -> None:
    return None
