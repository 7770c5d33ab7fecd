"""A run ends before its tokens cost more than they may, and the next one goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest

from surge_dagster.engine.encoder.metrics import Costs
from surge_dagster.engine.errors import MaxCostReached
from surge_dagster.engine.run.cost_limit import CostLimit
from surge_dagster.engine.run.report import Prices, RunReport
from surge_dagster.engine.run.thresholds import Thresholds
from tests.engine.runs import Output, in_memory
from tests.small_catalogs import numbered_catalog

PRICE = 1e6  # so that a token costs 1


@dataclass(frozen=True)
class _Slot:
    """Texts of 100 bytes, of which the last ones have vectors."""

    texts: int
    known: int = 0

    @property
    def offsets(self) -> np.ndarray:
        return 100 * np.arange(self.texts + 1)

    def is_known(self, start: int, stop: int) -> np.ndarray:
        return np.arange(start, stop) >= self.texts - self.known

    def __len__(self) -> int:
        return self.texts


def _take(limit: CostLimit, texts: int, known: int = 0) -> None:
    limit.take(cast(Any, _Slot(texts, known)), "a")


def test_first_superbatch_counts_twice_the_tokens_of_earlier_runs() -> None:
    _take(CostLimit(PRICE, 540, 0.25), 10)

    with pytest.raises(MaxCostReached, match="0 tokens have cost 0, and with the next 10 texts"):
        _take(CostLimit(PRICE, 539, 0.25), 10)


def test_answered_superbatches_count_with_their_own_tokens() -> None:
    limit = CostLimit(PRICE, 1_000, 0.25)
    for _ in range(5):
        _take(limit, 10)
        limit.answered(Costs(tokens=100))

    with pytest.raises(MaxCostReached, match="500 tokens have cost 500"):
        _take(limit, 40)


def test_superbatches_under_way_count() -> None:
    limit = CostLimit(PRICE, 1_000, 0.25)
    _take(limit, 10)

    with pytest.raises(MaxCostReached):
        _take(limit, 10)


def test_texts_with_a_vector_cost_nothing() -> None:
    limit = CostLimit(PRICE, 540, 0.25)

    _take(limit, 1_000, known=990)

    with pytest.raises(MaxCostReached, match="the next 1 texts"):
        _take(limit, 1)


def test_run_ends_before_the_limit_and_the_next_one_goes_on(output: Output) -> None:
    catalog = numbered_catalog([60] * 30)
    prices = Prices(per_million_tokens=PRICE, max_cost=4_000)
    run = output.run(in_memory(catalog), Thresholds(60, 120, first_b_min=60), prices=prices)

    with pytest.raises(MaxCostReached, match=r"the partitions from 'p\d+' on are left"):
        list(run)

    assert run.report.cost is not None
    assert 2_000 < run.report.cost <= 4_000
    published = output.keys()
    assert published
    assert run.report.texts_encoded == 60 * len(published)

    again = output.embed(in_memory(catalog))
    assert again.report.texts_encoded == 60 * (30 - len(published))
    output.check_all(catalog)


@pytest.mark.parametrize(
    ("prices", "cost", "words"),
    [
        (Prices(), None, ""),
        (Prices(per_hour=2.0), 1.0, "2 an hour"),
        (Prices(per_million_tokens=0.5), 1.5, "0.5 per million tokens"),
        (Prices(2.0, 0.5), 2.5, "2 an hour and 0.5 per million tokens"),
    ],
)
def test_cost_is_that_of_machines_and_tokens(
    prices: Prices, cost: float | None, words: str
) -> None:
    report = RunReport(costs=Costs(tokens=3_000_000), run_seconds=1_800, prices=prices)

    assert report.cost == cost
    assert str(prices) == words
