"""The asset `current_space`: what is after it reads the old space until it is materialized, and the new one then."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from unittest import mock

import dagster as dg
import pytest

from surge_dagster import Embeddings
from surge_dagster.automation import complete_space
from surge_dagster.engine.output.current_space import CurrentSpace, read_current, write_current
from surge_dagster.engine.switching import SwitchRefused
from surge_dagster.orchestration.active_runs import _PROCESS_TAG, _start_of_machine, process_tags
from tests.dagster.conftest import NAMES, Ran, Workbench
from tests.small_catalogs import numbered_rows, write_partition
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


def test_an_asset_after_it_reads_the_old_space_before_a_switch_and_the_new_one_after(
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

    read_by(bench, report, report_of_the_pointer)
    ran = switch(bench)
    assert ran.success
    read_by(bench, report, report_of_the_pointer)
    assert seen == [(first, list(KEYS))] * 2 + [(second, list(KEYS))] * 2
    event = ran.materialized(NAMES.current_space)[None]
    figures: dict[str, Any] = {name: value.value for name, value in event.metadata.items()}
    assert (figures["space"], figures["previous_space"], figures["partitions"]) == (second, first, len(KEYS))
    assert (event.tags or {})["dagster/data_version"] == second
    assert switch(bench, figures["previous_space"]).success
    assert read_current(made.store) == CurrentSpace(first, second, 3)


def test_a_run_goes_on_with_the_space_it_began_with(bench: Workbench, made: Spaces) -> None:
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


def test_a_switch_is_refused_with_what_is_missing_and_nothing_is_changed(bench: Workbench, made: Spaces) -> None:
    before = read_current(made.store)
    made.file("hash://24", "b").unlink()
    ran = switch(bench)
    assert not ran.success and "of 3 partitions, 1 missing: 'b'" in ran.failure()
    assert ran.count(dg.DagsterEventType.STEP_UP_FOR_RETRY) == 0
    assert read_current(made.store) == before and not ran.materialized(NAMES.current_space)
    bench.settings["model"] = "hash://8"
    assert "Launch catalog_refresh, then switch" in switch(bench).failure()
    assert "has no space 'x'; it holds" in switch(bench, "x").failure()


def look(bench: Workbench) -> Any:
    """One tick of the sensor that switches by itself."""
    repository, resources = bench.definitions.get_repository_def(), bench.definitions.resources
    with dg.build_sensor_context(bench.instance, repository_def=repository, resources=resources) as context:
        return repository.get_sensor_def(NAMES.switch_sensor).evaluate_tick(context)


def test_with_the_setting_a_space_becomes_current_once_it_is_complete_and_never_begins(
    bench: Workbench, made: Spaces
) -> None:
    assert not bench.definitions.get_repository_def().has_sensor_def(NAMES.switch_sensor)
    bench.settings["switch_when_complete"] = True
    write_partition(made.root / "catalog", "a", numbered_rows("a", 3), version="v2")
    found = look(bench)
    assert not found.run_requests and "has 2 of 3 partitions" in (found.skip_message or "")
    assert bench.refresh().success, "the explicit launch"
    [request] = look(bench).run_requests
    assert look(bench).run_requests[0].run_key == request.run_key, "Dagster launches it once"
    assert bench.run(NAMES.switch_job, request.run_config).success
    current = read_current(made.store)
    assert current and current.space == made.of("hash://24").name
    assert "which the settings mean" in (look(bench).skip_message or "")
    bench.settings["model"] = "hash://8"
    found = look(bench)
    assert not found.run_requests and "launch catalog_refresh by hand" in (found.skip_message or "")


def test_a_switch_that_ended_without_an_answer_is_asked_for_again_and_a_refused_one_is_not(
    bench: Workbench, made: Spaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.settings["switch_when_complete"] = True
    [request] = look(bench).run_requests

    def ended(status: dg.DagsterRunStatus) -> None:
        bench.pretend_run(NAMES.switch_job, status, tags=request.tags, run_config=request.run_config)

    asked = [request.run_key]
    for status in (dg.DagsterRunStatus.CANCELED, dg.DagsterRunStatus.FAILURE):
        ended(status)
        assert "is asked for again from" in (look(bench).skip_message or "")
        with monkeypatch.context() as patch:
            patch.setattr(complete_space, "_now", lambda: datetime.now(UTC) + timedelta(minutes=3))
            [again] = look(bench).run_requests
        asked.append(again.run_key)
    assert len(set(asked)) == 3

    monkeypatch.setattr(complete_space, "_now", lambda: datetime.now(UTC) + timedelta(days=2))
    [last] = look(bench).run_requests
    with monkeypatch.context() as patch:
        refusal = SwitchRefused("the new one", (), 3)
        patch.setattr("surge_dagster.assets.current_space.switch_space", mock.Mock(side_effect=refusal))
        assert not bench.run(NAMES.switch_job, last.run_config, last.tags).success
    assert [found.run_key for found in look(bench).run_requests] == [last.run_key], "which Dagster has launched"
    made.file("hash://24", "b").touch()
    assert look(bench).run_requests[0].run_key not in asked, "something has changed"


def test_while_a_switch_is_waiting_or_going_on_none_is_asked_for(bench: Workbench, made: Spaces) -> None:
    """One that was killed goes on in a run that Dagster launches; of two at once the later one would fail."""
    bench.settings["switch_when_complete"] = True
    [request] = look(bench).run_requests

    def pretend(status: dg.DagsterRunStatus) -> dg.DagsterRun:
        return bench.pretend_run(NAMES.switch_job, status, tags=request.tags, run_config=request.run_config)

    killed = pretend(dg.DagsterRunStatus.STARTED)
    bench.instance.report_run_failed(killed)
    again = pretend(dg.DagsterRunStatus.QUEUED)
    with mock.patch.object(complete_space, "_now", return_value=datetime.now(UTC) + timedelta(days=2)):
        found = look(bench)
        assert not found.run_requests and f"going on already: run {again.run_id}" in (found.skip_message or "")
        bench.instance.report_run_canceled(again)
        by_hand = bench.pretend_run(NAMES.switch_job, dg.DagsterRunStatus.STARTED)
        assert by_hand.run_id in (look(bench).skip_message or "")
        nobody = f"0@0/{_start_of_machine()}"
        bench.instance.add_run_tags(by_hand.run_id, process_tags() | {_PROCESS_TAG: nobody})
        assert len(look(bench).run_requests) == 1, "and it was declared lost"
