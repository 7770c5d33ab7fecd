"""A change of the model: the new space's files are shown by `next_space` until readers use them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import dagster as dg
import pytest

from surge_dagster import Embeddings
from surge_dagster.engine.output.current_space import read_current
from surge_dagster.engine.store import open_store
from surge_dagster.orchestration.records import read_catalogued
from tests.dagster.conftest import (
    INS,
    NAMES,
    Ran,
    Workbench,
    data_version,
    execute,
    requested,
    shown,
    stale_status,
)
from tests.dagster.test_current_space import switch, switch_elsewhere


@pytest.fixture
def began(bench: Workbench) -> Workbench:
    """A catalog in the space of hash://16; the settings mean hash://24, whose space a run began."""
    bench.fill("ab")
    assert bench.refresh().success
    bench.settings["model"] = "hash://24"
    bench.write("new")
    assert bench.refresh(keys=["a"]).success
    return bench


def versions(ran: Ran, asset: dg.AssetKey = NAMES.embeddings) -> dict[str | None, str]:
    return {key: data_version(event) for key, event in ran.materialized(asset).items()}


def last_versions(bench: Workbench, asset: dg.AssetKey) -> dict[str, str]:
    return read_catalogued(NAMES, asset, bench.instance).embedded


def test_files_of_another_space_than_that_of_readers_are_shown_apart(began: Workbench) -> None:
    ran = began.refresh()

    assert set(ran.materialized(NAMES.next_space)) == {"b", "new"}
    assert ran.materialized() == {}
    assert shown(began) == ({"a", "b"}, set())


def test_run_into_another_space_skips_what_is_fresh_there(began: Workbench) -> None:
    began.refresh()

    again = began.refresh()

    assert again.metrics()["partitions_skipped"] == 3
    assert again.materialized(NAMES.next_space) == {}
    assert requested(began.tick()) == []


def test_refusal_in_another_space_is_shown_by_next_space(began: Workbench) -> None:
    began.write("bad", [("x", None)])

    assert not began.refresh().success
    assert shown(began) == ({"a", "b"}, set())
    assert "1 refused" in began.tick().skip_message


def test_backfill_into_another_space_leaves_embeddings_as_they_are(began: Workbench) -> None:
    """Dagster fails a backfill if a partition has no event in it."""
    before = last_versions(began, NAMES.embeddings)

    ran = began.embed("a", "b", backfill="x")

    assert ran.success
    assert set(ran.materialized(NAMES.next_space)) == {"a", "b"}
    assert versions(ran) == before


def test_switch_reports_the_files_of_the_space_as_embeddings(began: Workbench) -> None:
    assert began.refresh().success

    assert switch(began).success

    assert last_versions(began, NAMES.embeddings) == last_versions(began, NAMES.next_space)
    for key in ("a", "b", "new"):
        assert stale_status(began, key) == "FRESH"


def test_switch_back_reports_the_files_of_the_first_space_again(bench: Workbench) -> None:
    bench.fill("ab")
    first = versions(bench.refresh())
    space = bench.space
    bench.settings["model"] = "hash://24"
    assert bench.refresh().success
    assert switch(bench).success

    assert versions(switch(bench, space)) == first


def test_run_after_a_switch_elsewhere_reports_the_files_of_the_space(began: Workbench) -> None:
    assert began.refresh().success
    switch_elsewhere(began)

    [ran] = began.launch(began.tick())

    assert ran.metrics()["texts_encoded"] == 0
    assert versions(ran) == last_versions(began, NAMES.next_space)


def as_inputs(versions: Mapping[str | None, str]) -> dict[str | None, str]:
    """Return what Dagster records of the input of an asset that has one partition as its input."""
    return {key: hashlib.sha256(each.encode()).hexdigest() for key, each in versions.items()}


class Eager:
    """An eager asset after `embeddings`, and what Dagster's daemon would launch for it."""

    def __init__(self, bench: Workbench) -> None:
        self.read: dict[str, str] = {}
        self._bench = bench
        self._cursor: dg.AutomationConditionCursor | None = None

        @dg.asset(
            ins=INS,
            partitions_def=NAMES.partitions,
            automation_condition=dg.AutomationCondition.eager(),
        )
        def index(context, embeddings: Embeddings) -> None:
            self.read[context.partition_key] = embeddings.space.name

        self._asset = index

    @property
    def _definitions(self) -> dg.Definitions:
        return dg.Definitions.merge(self._bench.definitions, dg.Definitions(assets=[self._asset]))

    def launch(self) -> dict[str | None, str]:
        """Launch what its condition requests; return the input version of each partition."""
        result = dg.evaluate_automation_conditions(
            self._definitions, self._bench.instance, cursor=self._cursor
        )
        self._cursor = result.cursor
        recorded: dict[str | None, str] = {}
        for key in result.get_requested_partitions(self._asset.key):
            ran = execute(
                self._bench.instance,
                self._definitions.resolve_implicit_global_asset_job_def(),
                tags={"dagster/partition": str(key)},
                asset_selection=[self._asset.key],
            )
            [event] = ran.materialized(self._asset.key).values()
            recorded[key] = (event.tags or {})["dagster/input_data_version/embeddings"]
        return recorded


def test_eager_asset_reads_what_its_recorded_input_version_says(bench: Workbench) -> None:
    eager = Eager(bench)
    eager.launch()
    bench.fill("ab")
    first = bench.refresh()

    assert eager.launch() == as_inputs(versions(first))

    bench.settings["model"] = "hash://24"
    bench.write("new")
    filled = bench.refresh()

    assert eager.launch() == {}

    assert switch(bench).success

    assert eager.launch() == as_inputs(versions(filled, NAMES.next_space))
    current = read_current(open_store(bench.output))
    assert current is not None
    assert eager.read == dict.fromkeys(("a", "b", "new"), current.space)
