"""The simulator of fleets: no work is lost, no machine is faster than it is, and a seed gives one
result."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.fleet_costs import FleetCosts
from benchmarks.fleet_simulation import Catalog, Faults, Fleet
from benchmarks.fleet_ways import RayWay
from surge_dagster.catalogs.synthetic import MEAN_BYTES

COSTS = FleetCosts(2.0, 0.2, 0.005, 5e-6, {1: 0.001}, {40_000: 1.0}, {1: 0.001, 1_000: 0.005})
FREE = FleetCosts(0, 0, 0, 0, {1: 0}, {1: 0}, {1: 0})
NONE = Faults(spread=0.0, slow=0.0, lost_per_hour=0.0, cold_seconds=0.0)
SPEED = 700.0 * MEAN_BYTES
WAYS = ("one by one", "two at a time")


def fleet_of(
    way: str, catalog: Catalog, machines: int, faults: Faults, costs: FleetCosts, seed: int = 0
) -> Fleet:
    return RayWay(catalog, machines, SPEED, costs, faults, seed, held=1 if way == WAYS[0] else 2)


@settings(deadline=None, max_examples=30)
@given(
    way=st.sampled_from(WAYS),
    machines=st.integers(1, 12),
    partitions=st.integers(1, 80),
    sigma=st.sampled_from((0.0, 1.0, 2.5)),
    lost_per_hour=st.sampled_from((0.0, 0.5, 4.0)),
    wave=st.sampled_from((0.0, 0.3, 1.0)),
    seed=st.integers(0, 99),
)
def test_every_partition_is_done_or_fails_by_name_whatever_machines_are_lost(
    way: str,
    machines: int,
    partitions: int,
    sigma: float,
    lost_per_hour: float,
    wave: float,
    seed: int,
) -> None:
    catalog = Catalog.of(500_000, partitions, sigma)
    fleet = fleet_of(
        way, catalog, machines, Faults(lost_per_hour=lost_per_hour, wave=wave), COSTS, seed
    )
    outcome = fleet.run()
    assert fleet.done | fleet.failed == catalog.partitions.keys() and not fleet.done & fleet.failed
    assert outcome.failed == 0 or outcome.lost >= 3, "a partition is given up after three machines"
    assert outcome.done_bytes == catalog.text_bytes or outcome.failed
    assert 0 < outcome.efficiency <= 1
    assert outcome.encoded_bytes >= outcome.done_bytes * (1 - 1e-9)
    again = fleet_of(
        way, catalog, machines, Faults(lost_per_hour=lost_per_hour, wave=wave), COSTS, seed
    )
    assert again.run() == outcome


@pytest.mark.parametrize("way", WAYS)
def test_machines_without_faults_and_costs_take_what_the_texts_take(way: str) -> None:
    catalog = Catalog.of(3_000_000, 6_000, 1.0)
    alone = 3_000_000 / 700
    one = fleet_of(way, catalog, 1, NONE, FREE).run()
    assert alone <= one.seconds < alone + 1.1, "a driver looks for machines each second"
    assert one.encoded_bytes == pytest.approx(catalog.text_bytes)
    eight = fleet_of(way, catalog, 8, NONE, FREE).run()
    assert alone / 8 <= eight.seconds < alone / 8 + 70, "the last stretch at most"
