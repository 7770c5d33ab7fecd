"""Tests of the run config: typed keys, files of keys, and partitions selected by their state."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
from dagster._core.storage.asset_check_execution_record import AssetCheckExecutionRecordStatus
from dagster._core.storage.tags import PARENT_RUN_ID_TAG, RESUME_RETRY_TAG, ROOT_RUN_ID_TAG

from surge_dagster.engine.errors import ConfigError
from surge_dagster.orchestration.launch import LaunchConfig, Select, catalog_keys, read_keys
from surge_dagster.orchestration.partition_keys import to_partition_key
from tests.dagster.conftest import NAMES, Workbench

NULL_TEXT = [("x", None)]


def test_two_hundred_scattered_keys_are_embedded_by_one_run(bench: Workbench) -> None:
    """Takes over 10 s where a machine is busy: Dagster stores an event of each partition, twice."""
    keys = [f"part {number:03}, of 400" for number in range(400)]
    bench.fill(keys, 1)
    chosen = random.Random(11).sample(keys, 200)
    typed = [key if place % 2 else to_partition_key(key) for place, key in enumerate(chosen)]
    ran = bench.embed_keys(keys=typed)
    partition_keys = {to_partition_key(key) for key in chosen}
    assert ran.success and set(ran.materialized()) == partition_keys == set(ran.sources())
    assert (ran.metrics()["partitions_written"], ran.metrics()["texts_encoded"]) == (200, 200)
    assert ran.checks()[NAMES.run_check.name].passed
    assert bench.instance.get_materialized_partitions(NAMES.embeddings) == partition_keys
    assert len(list(bench.output.glob("*/*.parquet"))) == 200
    tags = next(iter(ran.materialized().values())).tags or {}
    assert tags["dagster/input_data_version/source_partitions"] == "v1"
    assert tags["dagster/input_event_pointer/source_partitions"].isdigit()


def test_keys_that_are_not_in_the_catalog_are_refused_by_name_before_anything_is_encoded(bench: Workbench) -> None:
    bench.fill("abc")
    bench.instance.add_dynamic_partitions("catalog", ["left the catalog"])
    ran = bench.embed_keys(keys=["a", "A", "left the catalog", "c"])
    assert not ran.success and ran.count(dg.DagsterEventType.STEP_UP_FOR_RETRY) == 0
    assert "does not have 2 keys" in ran.failure()
    assert "'A'" in ran.failure() and "'left the catalog'" in ran.failure() and "'c'" not in ran.failure()
    assert not list(bench.output.glob("*")) and not ran.materialized()


@pytest.mark.parametrize("launched", ["job", "asset"])
def test_run_with_a_mistyped_key_evaluates_no_check(bench: Workbench, launched: str) -> None:
    bench.fill("ab")
    assert bench.refresh().success
    ran = bench.embed_keys(keys=["A"]) if launched == "job" else bench.embed("a", "b", keys=["A"])
    assert not ran.success and ran.checks() == {} and "does not have 1 key: 'A'" in ran.logged()[0]


def test_job_with_a_mistyped_key_leaves_the_checks_as_they_are(bench: Workbench) -> None:
    bench.fill("ab")
    assert bench.refresh().success

    bench.embed_keys(keys=["A"])

    latest = bench.instance.event_log_storage.get_latest_asset_check_execution_by_key([NAMES.run_check])
    assert latest[NAMES.run_check].status is AssetCheckExecutionRecordStatus.SUCCEEDED


@pytest.mark.parametrize("missing", ["catalog", "output"])
def test_missing_source_or_output_fails_the_check_also_where_keys_are_typed(bench: Workbench, missing: str) -> None:
    bench.write("a")
    assert bench.refresh().success
    (bench.root / missing).rename(bench.root / "elsewhere")
    if missing == "output":
        bench.output.write_text("a file")
    ran = bench.embed_keys(keys=["a"])
    check = ran.checks()[NAMES.run_check.name]
    assert not ran.success and not check.passed
    assert ("no catalog at" if missing == "catalog" else "is a file") in str(check.description)


def test_typed_key_is_accepted_in_both_spellings_unless_they_match_two_partitions() -> None:
    known = ["a,b", "a%2Cb", "100%", "plain"]
    assert catalog_keys(["100%", "100%25", "a,b", "a%252Cb", "plain"], known, "catalog") == [
        *("100%", "a,b", "a%2Cb", "plain"),
    ]
    with pytest.raises(ConfigError, match=r"unclear: 'a%2Cb' .*'a%252Cb'.* of 'a,b'"):
        catalog_keys(["a%2Cb"], known, "catalog")


def test_keys_file_holds_a_json_list_or_a_key_per_line(tmp_path: Path) -> None:
    listed = tmp_path / "keys"
    for text, keys in (
        ('["a, b", "ü"]', ["a, b", "ü"]),
        ("a, b\r\n\n  ü \n", ["a, b", "  ü "]),
        ("", []),
        ("\ufeffshoes\r\nhats\r\n", ["shoes", "hats"]),  # as editors on Windows write it
        ('\ufeff["shoes"]', ["shoes"]),
    ):
        listed.write_text(text, newline="")
        assert read_keys(str(listed)) == keys
    for text in ('["a",', "[1] one\n[2] two\n"):
        listed.write_text(text)
        with pytest.raises(ConfigError, match="JSON list"):
            read_keys(str(listed))


def test_launch_with_an_empty_list_of_keys_is_refused_with_a_remedy(bench: Workbench) -> None:
    bench.write("a")
    ran = bench.embed_keys(keys=[], select=None)  # a state that is left empty is not given
    assert not ran.success and "keys holds no partition key" in ran.failure() and "leave keys and" in ran.failure()
    (bench.root / "empty").write_text("\n\n")
    given: dict[str, Any] = {"keys_file": str(bench.root / "empty"), "select": None}
    assert LaunchConfig(**given).select is Select.all
    with pytest.raises(ConfigError, match=r"keys_file '.*empty' holds no partition key"):
        LaunchConfig(**given).named_keys({})
    given["keys"] = ["a"]
    assert LaunchConfig(**given).named_keys({}) == ["a"]


def test_state_selects_among_the_partitions_of_a_launch(bench: Workbench) -> None:
    bench.fill(("a", "b"))
    bench.write("bad", NULL_TEXT)
    assert not bench.refresh().success
    bench.write("a", 4, version="v2")
    bench.write("b", 5, version="v2")
    bench.write("c", 6)
    bench.write("bad", 7, version="v2")
    fixed = bench.embed_keys(select="failed")
    assert fixed.success and (set(fixed.materialized()), fixed.metrics()["texts_encoded"]) == ({"bad"}, 7)
    listed = bench.root / "keys"
    listed.write_text("b\nc\n")
    stale = bench.embed_keys(keys=["bad"], keys_file=str(listed), select="stale")
    assert stale.success and (set(stale.materialized()), stale.metrics()["texts_encoded"]) == ({"b"}, 2)
    missing = bench.refresh(select="missing")
    assert missing.success and (set(missing.materialized()), missing.metrics()["texts_encoded"]) == ({"c"}, 6)
    forced = bench.embed_keys(keys=["b", "c"], select="all", force=True)
    assert set(forced.materialized()) == {"b", "c"} and forced.metrics()["texts_encoded"] == 11
    assert bench.embed_keys(select="failed").metrics()["texts_encoded"] == 0


def test_forced_run_that_continues_another_encodes_only_the_rest(bench: Workbench) -> None:
    bench.write("a", 3)
    bench.write("b", 4)
    bench.refresh()
    bench.write("b", NULL_TEXT, version="v2")
    first = bench.embed_keys(force=True)
    assert not first.success and first.metrics()["texts_encoded"] == 3
    bench.write("b", 5, version="v3")
    parent = {PARENT_RUN_ID_TAG: first.run_id, ROOT_RUN_ID_TAG: first.run_id}
    resumed = bench.embed_keys({**parent, RESUME_RETRY_TAG: "true"}, force=True)
    assert resumed.success and (set(resumed.materialized()), resumed.metrics()["texts_encoded"]) == ({"b"}, 5)
    whole = bench.embed_keys(parent, force=True)
    assert whole.metrics()["texts_encoded"] == 8, "executed again as a whole, it begins anew"


def test_run_with_a_config_that_the_launchpad_kept_names_the_settings_that_differ(bench: Workbench) -> None:
    bench.write("a")
    job = bench.definitions.resolve_job_def(NAMES.refresh_job)
    kept = {
        name: {"config": dict(job.resource_defs[name].config_schema.default_value)}
        for name in ("catalog", "encoder", "output")
    }
    same = bench.run(NAMES.refresh_job, {"resources": kept})
    assert same.success and not [line for line in same.logged() if "other settings" in line]
    bench.settings |= {"include_text": False, "grace_seconds": 5.5}  # edited since
    ran = bench.run(NAMES.refresh_job, {"resources": kept})
    [warning, line] = [line for line in ran.logged() if "other settings than the code location: " in line]
    assert "encoder.grace_seconds, output.include_text. " in warning and "5.5" not in warning
    check = ran.checks()[NAMES.run_check.name]
    assert check.description == line and line.endswith("encoder.grace_seconds, output.include_text")
    assert check.metadata["differing_settings"].value == ["encoder.grace_seconds", "output.include_text"]
    assert "differing_settings" not in bench.refresh().metrics()


def test_operator_sees_no_option_that_only_sensors_and_schedules_set() -> None:
    assert set(LaunchConfig.model_fields) == {"force", "keys", "keys_file", "select"}
