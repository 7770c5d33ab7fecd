"""A catalog over several nightly runs: each embeds exactly what is due, and the UI shows it."""

from __future__ import annotations

import shutil

import pytest

from tests.dagster.conftest import Workbench, numbered_keys, shown
from tests.small_catalogs import partition_folder


@pytest.fixture
def second_night(bench: Workbench) -> Workbench:
    """A catalog that was embedded and has changed since in every way."""
    bench.settings |= {"b_min": 4, "b_max": 8}
    bench.fill("abcdefgh", 5)
    assert bench.nightly().success

    bench.write("a", 6, version="v2")  # one text is new
    bench.write("b", 5, version="v2")  # only the version is new
    bench.write("c", [("x", None)], version="v2")
    bench.write("new", 30)
    shutil.rmtree(partition_folder(bench.catalog, "d"))
    return bench


def test_nightly_run_embeds_exactly_what_is_due(second_night: Workbench) -> None:
    ran = second_night.nightly()

    actions = {key: event.metadata["action"].value for key, event in ran.materialized().items()}

    assert actions == {"a": "encoded", "b": "republished", "new": "encoded"}
    assert ran.metrics()["texts_encoded"] == 31


def test_pages_show_what_a_nightly_run_embedded_and_refused(second_night: Workbench) -> None:
    second_night.nightly()

    assert shown(second_night) == ({"a", "b", "d", "e", "f", "g", "h", "new"}, {"c"})


def test_partition_that_was_repaired_is_embedded_by_the_next_night(second_night: Workbench) -> None:
    second_night.nightly()
    second_night.write("c", 5, version="v3")

    ran = second_night.nightly()

    assert ran.success
    assert set(ran.materialized()) == {"c"}
    assert shown(second_night)[1] == set()


def test_events_of_a_nightly_run_follow_its_work_and_not_the_catalog(bench: Workbench) -> None:
    bench.fill(numbered_keys(60), 1)

    assert bench.nightly().success

    idle = bench.nightly()
    assert idle.materialized() == {}
    assert len(bench.instance.all_logs(idle.run_id)) < 40
