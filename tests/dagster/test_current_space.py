"""The asset `current_space`: what is after it reads the old space until it is materialized, and the new one then."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pytest

from surge_dagster import Embeddings
from surge_dagster.engine.output.current_space import CurrentSpace, read_current, write_current
from tests.dagster.conftest import NAMES, Ran, Workbench
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
    """Launch the job that switches, to a named space or to the one that the settings mean."""
    config = {"ops": {NAMES.current_space_op: {"config": {"space": space}}}} if space else {}
    return bench.run(NAMES.switch_job, config)


def read_by(bench: Workbench, *assets: dg.AssetsDefinition) -> None:
    """Materialize assets that are after the catalog, in one run."""
    job = dg.define_asset_job("downstream", selection=list(assets))
    definitions = dg.Definitions.merge(bench.definitions, dg.Definitions(assets=assets, jobs=[job]))
    quiet = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
    assert (
        definitions.resolve_job_def("downstream").execute_in_process(instance=bench.instance, run_config=quiet).success
    )


def test_downstream_asset_reads_the_new_space_only_after_the_switch(bench: Workbench, made: Spaces) -> None:
    first, second = made.of("hash://16").name, made.of("hash://24").name
    seen: list[Any] = []

    @dg.asset(ins=INS)
    def report(embeddings: Embeddings) -> None:
        seen.append((embeddings.space.name, embeddings.keys()))

    current = dg.AssetIn(key=NAMES.current_space, input_manager_key="embeddings_input")

    @dg.asset(ins={"embeddings": current})
    def report_of_the_pointer(embeddings: Embeddings) -> None:
        seen.append((embeddings.space.name, embeddings.keys()))

    read_by(bench, report, report_of_the_pointer)
    ran = switch(bench)
    assert ran.success
    read_by(bench, report, report_of_the_pointer)
    assert seen == [(first, list(KEYS))] * 2 + [(second, list(KEYS))] * 2
    event = ran.materialized(NAMES.current_space)[None]
    metrics: dict[str, Any] = {name: value.value for name, value in event.metadata.items()}
    assert (metrics["space"], metrics["previous_space"], metrics["partitions"]) == (second, first, len(KEYS))
    assert (event.tags or {})["dagster/data_version"] == second
    assert switch(bench, metrics["previous_space"]).success
    assert read_current(made.store) == CurrentSpace(first, second, 3)


def test_run_keeps_its_space_when_another_becomes_current(bench: Workbench, made: Spaces) -> None:
    first, second = made.of("hash://16").name, made.of("hash://24").name
    seen: list[str] = []

    @dg.asset(ins=INS)
    def early(embeddings: Embeddings) -> None:
        seen.append(embeddings.space.name)
        if len(seen) == 1:
            write_current(made.store, second, seen=read_current(made.store))

    @dg.asset(ins=INS, deps=[early])
    def late(embeddings: Embeddings) -> None:
        seen.append(embeddings.space.name)

    read_by(bench, early, late)
    read_by(bench, late)
    assert seen == [first, first, second]


def test_refused_switch_lists_what_is_missing_and_changes_nothing(bench: Workbench, made: Spaces) -> None:
    before = read_current(made.store)
    made.file("hash://24", "b").unlink()
    ran = switch(bench)
    assert not ran.success and "of 3 partitions, 1 missing: 'b'" in ran.failure()
    assert ran.count(dg.DagsterEventType.STEP_UP_FOR_RETRY) == 0
    assert read_current(made.store) == before and not ran.materialized(NAMES.current_space)
    bench.settings["model"] = "hash://8"
    assert "Launch catalog_refresh, then switch" in switch(bench).failure()
    assert "has no space 'x'; it holds" in switch(bench, "x").failure()
