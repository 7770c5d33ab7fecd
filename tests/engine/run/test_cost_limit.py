"""A run ends before its tokens cost more than they may, and the next one goes on."""

from __future__ import annotations

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


def _texts(count: int, size: int = 96) -> np.ndarray:
    """Bytes of texts, of which each has at most four tokens more."""
    return np.full(count, size)


def test_texts_count_with_a_token_for_each_byte() -> None:
    limit = CostLimit(PRICE, 1_050, 0)

    assert limit.reserve(_texts(20)) == 10


def test_prompt_counts_for_each_text() -> None:
    limit = CostLimit(PRICE, 1_050, 100)

    assert limit.reserve(_texts(20)) == 5


def test_answered_texts_count_with_their_own_tokens() -> None:
    limit = CostLimit(PRICE, 1_000, 0)
    limit.reserve(_texts(20))

    limit.settle(_texts(10), 200)

    assert limit.reserve(_texts(20)) == 8


def test_texts_under_way_count() -> None:
    limit = CostLimit(PRICE, 1_000, 0)
    limit.reserve(_texts(4))

    assert limit.fits(_texts(6))
    assert not limit.fits(_texts(7))


def test_nothing_is_sent_beside_a_superbatch_in_parts() -> None:
    limit = CostLimit(PRICE, 1_000, 0)
    limit.reserve(_texts(10))
    limit.settle(_texts(10), 0)
    assert limit.reserve(_texts(20)) == 10
    limit.settle(_texts(10), 0)

    assert not limit.fits(_texts(1))


def test_server_that_counts_more_tokens_than_bytes_is_expected_to_go_on() -> None:
    limit = CostLimit(PRICE, 10_000, 0)
    limit.reserve(_texts(10))
    limit.settle(_texts(10), 2_000)

    assert limit.reserve(_texts(100)) == 40


def test_tokens_without_a_price_have_no_limit() -> None:
    assert CostLimit(0.0, 1, 0).reserve(_texts(1_000)) == 1_000


def test_run_ends_before_the_limit_and_the_next_one_goes_on(output: Output) -> None:
    catalog = numbered_catalog([60] * 30)
    prices = Prices(per_million_tokens=PRICE, max_cost=4_000)
    run = output.run(in_memory(catalog), Thresholds(60, 120, first_b_min=60), prices=prices)

    with pytest.raises(MaxCostReached, match=r"the partitions from 'p\d+' on are left"):
        list(run)

    assert run.report.cost is not None
    assert 3_900 < run.report.cost <= 4_000
    published = output.keys()
    assert published

    again = output.embed(in_memory(catalog))
    assert again.report.texts_encoded <= 60 * (30 - len(published))
    assert run.report.texts_encoded + again.report.texts_encoded == 60 * 30
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
