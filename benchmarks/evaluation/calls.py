"""Section 4.1: the fixed cost of a call of this engine's pool and of sentence-transformers', by `fixed_costs`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.fixed_costs import PEER_SIZES, SIZES, peer_call_cost, pool_call_cost
from surge_dagster.engine.encoder.devices import usable_cores

_PEER_SIZES = PEER_SIZES[:4]  # the larger ones take most of the time


@dataclass(frozen=True, slots=True)
class Call:
    """c_ipc with its 95 % interval, in milliseconds, with an encoder that computes nothing."""

    name: str
    milliseconds: float
    low: float
    high: float


def calls(rounds: int) -> Iterator[Call]:
    """Both pools; every size is timed in each round."""
    for name, cost in (
        ("this engine", pool_call_cost(SIZES, rounds)),
        ("sentence-transformers", peer_call_cost(_PEER_SIZES, rounds, usable_cores())),
    ):
        yield Call(name, *(1_000 * seconds for seconds in (cost.intercept, cost.low, cost.high)))
