"""The asset `current_space`: what is after it reads the old space until the job switches, and the
new one then."""

from __future__ import annotations

import dagster as dg
import pytest

from surge_dagster import Embeddings
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.output.current_space import CurrentSpace, read_current, write_current
from surge_dagster.engine.output.spaces import find_space
from surge_dagster.engine.store import open_store
from surge_dagster.orchestration.launch import config_of
from tests.dagster import private_dagster
from tests.dagster.conftest import INS, NAMES, Ran, Workbench, data_version, values_of
from tests.spaces import KEYS, ROWS, Spaces


@pytest.fixture
def made(bench: Workbench, three_spaces: Spaces) -> Spaces:
    """A catalog in two spaces; the first one is current, the settings mean the second one."""
    made = three_spaces.copy_to(bench.root, ("hash://16", "hash://24"))
    write_current(made.store, made.of("hash://16").name, seen=None)
    bench.settings["model"] = "hash://24"
    return made


def own_space(bench: Workbench) -> str:
    """The name of the space that the settings mean."""
    own = find_space(open_store(bench.output), EncodingSpec(bench.settings["model"]))
    assert own is not None
    return own.name


def switch_elsewhere(bench: Workbench) -> None:
    """Switch to the space of the settings without Dagster."""
    store = open_store(bench.output)
    write_current(store, own_space(bench), seen=read_current(store))


def switch(bench: Workbench, space: str | None = None) -> Ran:
    """Launch the job that switches, to a named space or to that of the settings."""
    space = space or own_space(bench)
    return bench.run(NAMES.switch_job, config_of(NAMES.current_space_op, {"space": space}))


def test_downstream_asset_reads_the_new_space_only_after_the_switch(
    bench: Workbench, made: Spaces
) -> None:
    seen: list[str] = []

    @dg.asset(ins=INS)
    def report(embeddings: Embeddings) -> None:
        seen.append(embeddings.space.name)

    current = dg.AssetIn(key=NAMES.current_space, input_manager_key="embeddings_input")

    @dg.asset(ins={"embeddings": current})
    def report_of_the_pointer(embeddings: Embeddings) -> None:
        seen.append(embeddings.space.name)

    assert bench.run_downstream(report, report_of_the_pointer).success
    assert switch(bench).success
    assert bench.run_downstream(report, report_of_the_pointer).success

    first = made.of("hash://16").name
    second = made.of("hash://24").name

    assert seen == [first, first, second, second]


def test_event_of_a_switch_names_the_space_that_leads_back(bench: Workbench, made: Spaces) -> None:
    first = made.of("hash://16").name
    second = made.of("hash://24").name

    event = switch(bench).materialized(NAMES.current_space)[None]

    metrics = values_of(event)

    assert metrics["space"] == second
    assert metrics["previous_space"] == first
    assert metrics["partitions"] == len(KEYS)
    assert data_version(event) == second
    assert switch(bench, metrics["previous_space"]).success
    assert read_current(made.store) == CurrentSpace(first, second, 3)


def test_switch_makes_downstream_assets_stale(bench: Workbench, made: Spaces) -> None:
    @dg.asset(deps=[NAMES.current_space])
    def report() -> None: ...

    definitions = dg.Definitions.merge(bench.definitions, dg.Definitions(assets=[report]))
    graph = definitions.get_repository_def().asset_graph

    assert graph.executable_asset_keys == {NAMES.embeddings, report.key}
    assert graph.external_asset_keys >= {NAMES.current_space}

    def status() -> str:
        return private_dagster.stale_status(bench.instance, definitions, report.key, None)

    assert switch(bench, made.of("hash://16").name).success
    assert bench.run_downstream(report).success
    assert status() == "FRESH"
    assert switch(bench).success
    assert status() == "STALE"
    assert bench.run_downstream(report).success
    assert status() == "FRESH"


def test_refused_switch_lists_what_is_missing_and_changes_nothing(
    bench: Workbench, made: Spaces
) -> None:
    before = read_current(made.store)
    made.file("hash://24", "b").unlink()

    ran = switch(bench)

    assert not ran.success
    assert "of 3 partitions, 1 missing: 'b'" in ran.failure()
    assert not ran.will_retry
    assert read_current(made.store) == before
    assert not ran.materialized(NAMES.current_space)
    assert "has no space 'x'; it holds" in switch(bench, "x").failure()


def test_current_space_is_the_first_of_all_spaces_and_has_rows_and_a_path(
    bench: Workbench, made: Spaces
) -> None:
    event = switch(bench).materialized(NAMES.current_space)[None]

    table = event.metadata["spaces"]
    assert isinstance(table, dg.TableMetadataValue)
    [current, other] = [record.data for record in table.records]

    assert current["current"] == "✓"
    assert current["space"] == made.of("hash://24").name
    assert current["path"] == made.store.location(made.of("hash://24").name)
    assert other["current"] == ""
    assert event.metadata["dagster/row_count"].value == ROWS * len(KEYS)


def test_event_of_the_current_space_appears_when_something_has_changed(bench: Workbench) -> None:
    def shown() -> list[str]:
        records = bench.instance.fetch_materializations(NAMES.current_space, limit=9).records
        events = [record.asset_materialization for record in reversed(records)]
        return [values_of(event)["space_title"] for event in events if event]

    bench.write("a")

    assert bench.refresh().success
    assert bench.refresh().success

    first = "hash-16, 16 float32"
    assert shown() == [first]

    bench.settings["model"] = "hash://24"
    assert bench.refresh().success
    assert shown() == [first, first], "a space was added, and readers stay with theirs"

    assert switch(bench).success
    assert bench.refresh().success
    assert shown() == [first, first, "hash-24, 24 float32"]
