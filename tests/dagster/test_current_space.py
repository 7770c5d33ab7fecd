"""The asset `current_space`: what is after it reads the old space until the job switches, and the
new one then."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pytest
from dagster._core.definitions.data_version import CachingStaleStatusResolver, StaleStatus
from dagster._core.loader import LoadingContextForTest

from surge_dagster import Embeddings
from surge_dagster.engine.output.current_space import CurrentSpace, read_current, write_current
from surge_dagster.engine.store import open_store
from tests.dagster.conftest import NAMES, Ran, Workbench, values_of
from tests.spaces import KEYS, Spaces

INS = {"embeddings": dg.AssetIn(key=NAMES.embeddings, input_manager_key="embeddings_input")}


@pytest.fixture
def made(bench: Workbench, three_spaces: Spaces) -> Spaces:
    """A catalog in two spaces of which the first one is current; the settings mean the second one."""
    made = three_spaces.copy_to(bench.root, ("hash://16", "hash://24"))
    write_current(made.store, made.of("hash://16").name, seen=None)
    bench.settings["model"] = "hash://24"
    return made


def switch(bench: Workbench, space: str | None = None) -> Ran:
    """Launch the job that switches, to a named space or to the confirmed one of the settings."""
    config = {"space": space} if space else {"confirm": True}
    return bench.run(NAMES.switch_job, {"ops": {NAMES.current_space_op: {"config": config}}})


def test_downstream_asset_reads_the_new_space_only_after_the_switch(
    bench: Workbench, made: Spaces
) -> None:
    first, second = made.of("hash://16").name, made.of("hash://24").name
    seen: list[Any] = []

    @dg.asset(ins=INS)
    def report(embeddings: Embeddings) -> None:
        seen.append((embeddings.space.name, embeddings.keys()))

    current = dg.AssetIn(key=NAMES.current_space, input_manager_key="embeddings_input")

    @dg.asset(ins={"embeddings": current})
    def report_of_the_pointer(embeddings: Embeddings) -> None:
        seen.append((embeddings.space.name, embeddings.keys()))

    assert bench.run_downstream(report, report_of_the_pointer).success
    ran = switch(bench)
    assert ran.success
    assert bench.run_downstream(report, report_of_the_pointer).success
    assert seen == [(first, list(KEYS))] * 2 + [(second, list(KEYS))] * 2
    event = ran.materialized(NAMES.current_space)[None]
    assert event.description and event.description.startswith(
        f"hash-24, 24 float32 ({second}) is now the current space"
    )
    metrics: dict[str, Any] = values_of(event)
    assert (metrics["space"], metrics["previous_space"], metrics["partitions"]) == (
        second,
        first,
        len(KEYS),
    )
    assert (event.tags or {})["dagster/data_version"] == second
    assert switch(bench, metrics["previous_space"]).success
    assert read_current(made.store) == CurrentSpace(first, second, 3)


def test_current_space_is_materialized_by_a_switch_alone_and_makes_downstream_assets_stale(
    bench: Workbench, made: Spaces
) -> None:
    @dg.asset(deps=[NAMES.current_space])
    def report() -> None: ...

    graph = (
        dg.Definitions.merge(bench.definitions, dg.Definitions(assets=[report]))
        .get_repository_def()
        .asset_graph
    )
    assert graph.executable_asset_keys == {NAMES.embeddings, report.key}
    assert graph.external_asset_keys >= {NAMES.current_space}

    def status() -> StaleStatus:
        loading = LoadingContextForTest(bench.instance)
        return CachingStaleStatusResolver(bench.instance, graph, loading).get_status(report.key)

    assert switch(bench, made.of("hash://16").name).success
    assert bench.run_downstream(report).success
    assert status() is StaleStatus.FRESH
    assert switch(bench).success and status() is StaleStatus.STALE
    assert bench.run_downstream(report).success
    assert status() is StaleStatus.FRESH


@pytest.mark.parametrize("config", [{}, {"confirm": False}, {"space": ""}])
def test_switch_without_a_space_and_a_confirmation_is_refused(
    bench: Workbench, made: Spaces, config: dict[str, Any]
) -> None:
    before = read_current(made.store)
    ran = bench.run(
        NAMES.switch_job, {"ops": {NAMES.current_space_op: {"config": config}}} if config else {}
    )
    name = made.of("hash://24").name
    assert not ran.success and ran.failure().startswith("nothing was switched")
    assert f"Give `space: {name}`, or `confirm: true`" in ran.failure()
    assert read_current(made.store) == before and not ran.materialized(NAMES.current_space)


def test_refused_switch_lists_what_is_missing_and_changes_nothing(
    bench: Workbench, made: Spaces
) -> None:
    before = read_current(made.store)
    made.file("hash://24", "b").unlink()
    ran = switch(bench)
    assert not ran.success and "of 3 partitions, 1 missing: 'b'" in ran.failure()
    assert not ran.will_retry
    assert read_current(made.store) == before and not ran.materialized(NAMES.current_space)
    bench.settings["model"] = "hash://8"
    assert "Launch catalog_refresh, then switch" in switch(bench).failure()
    assert "has no space 'x'; it holds" in switch(bench, "x").failure()


def test_first_run_shows_the_space_that_readers_use_and_later_runs_what_has_changed(
    bench: Workbench,
) -> None:
    def reported() -> list[dict[str, Any]]:
        records = bench.instance.fetch_materializations(
            NAMES.current_space, limit=9, ascending=True
        ).records
        return [values_of(event) for record in records if (event := record.asset_materialization)]

    def listed(event: dict[str, Any]) -> list[tuple[str, bool]]:
        return [
            (record.data["title"], record.data["is_current"]) for record in event["spaces"].records
        ]

    bench.write("a")
    assert bench.refresh().success and bench.refresh().success
    [first] = reported()
    assert first["space"] == bench.space and listed(first) == [("hash-16, 16 float32", True)]
    bench.settings["model"] = "hash://24"
    assert bench.refresh().success
    _, second = reported()
    assert second["space"] == first["space"], "readers stay with their space"
    assert listed(second) == [("hash-16, 16 float32", True), ("hash-24, 24 float32", False)]
    assert switch(bench).success and bench.refresh().success
    store = open_store(bench.output)
    write_current(store, first["space"], seen=read_current(store))  # as `surge-dagster switch` does
    assert bench.refresh().success
    _, _, switched, outside = reported()
    titles = [event["space_title"] for event in (switched, outside)]
    assert titles == ["hash-24, 24 float32", "hash-16, 16 float32"]
