"""A run's memory does not follow the number of partitions."""

from __future__ import annotations

import pytest

from benchmarks.dagster_refresh import GROWTH_MB, growth_mb, refreshed_project


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_memory_of_a_run_over_forty_thousand_partitions_stays_flat() -> None:
    """Takes some four minutes: eighty thousand events."""
    with refreshed_project(40_000) as project:
        assert len(list((project.folder / "output").glob("*/*.parquet"))) == 40_000
        assert growth_mb(project.refreshed) <= GROWTH_MB, project.refreshed
