"""What a run does and what Dagster knows afterwards."""

from __future__ import annotations

import re

import dagster as dg
import pytest

from tests.dagster.conftest import NAMES, Workbench, data_version, stale_status, values_of
from tests.small_catalogs import assert_embedded, numbered_rows


def test_launch_without_keys_embeds_unregistered_partitions_too(bench: Workbench) -> None:
    bench.fill(("a", "b", 'Köln, "x" [1]'), 5)

    ran = bench.refresh()

    assert ran.success
    assert set(ran.materialized()) == {"a", "b", "Köln%2C %22x%22 %5B1%5D"}
    assert ran.sources() == dict.fromkeys(ran.materialized(), "v1")
    assert set(bench.instance.get_dynamic_partitions("catalog")) == set(ran.materialized())

    assert_embedded(bench.output, bench.space, "b", numbered_rows("b", 5))


def test_superbatches_report_their_metrics(bench: Workbench) -> None:
    bench.write("a", 5)
    bench.write("b", 7)

    batch = values_of(bench.refresh().materialized(NAMES.superbatches)[None])

    assert batch["texts"] == 12
    assert batch["partitions"] == 2
    assert batch["space"] == bench.space
    assert batch["space_title"] == "hash-16, 16 float32"

    plotted = ("texts_per_second", "duty_cycle", "overlap_ratio", "fill_ratio", "upload_seconds")
    assert all(isinstance(batch[name], int | float) for name in plotted)


def test_check_of_a_run_has_its_metrics(bench: Workbench) -> None:
    bench.write("a", 5)
    bench.write("b", 7)

    ran = bench.refresh()

    metrics = ran.metrics()

    assert ran.checks()[NAMES.run_check.name].passed
    assert metrics["partitions_written"] == 2
    assert metrics["texts_encoded"] == metrics["max_in_flight_texts"] == 12
    assert metrics["superbatches"] == 1
    assert metrics["device"] == "cpu"


def test_a_second_launch_succeeds_without_encoding_or_repeating_anything(bench: Workbench) -> None:
    bench.write("a")
    bench.refresh()

    again = bench.refresh()

    assert again.success
    assert again.checks()[NAMES.run_check.name].passed
    assert again.materialized() == {}
    assert again.materialized(NAMES.superbatches) == {}
    assert again.sources() == {}
    assert again.metrics()["space_title"] == "hash-16, 16 float32"
    assert again.metrics()["partitions_skipped"] == 1
    assert again.metrics()["pool_start_seconds"] == 0.0


def test_run_says_in_one_line_what_it_did_with_each_partition(bench: Workbench) -> None:
    bench.fill(("a", "bad", "fresh", "equal"), 5)
    bench.refresh()
    bench.write("a", 7, version="v2")
    bench.write("equal", 5, version="v2")
    bench.write("bad", [("1", ""), ("1", "twice")], version="v2")
    ran = bench.refresh()
    done = r"4 partitions: 1 encoded \(2 texts, 10 others kept their vectors\), 1 up to date"
    expected = done + r", 1 republished, 1 failed \(bad\), [\d.]+ s"
    [line] = [line for line in ran.logged() if re.fullmatch(expected, line)]

    assert ran.summary() == f"Last run: {line}"

    seconds = ran.metrics()["run_seconds"]
    assert line.endswith(f", {seconds:,.1f} s"), "one duration per run"
    assert "wall_seconds" not in ran.metrics()

    selected = bench.refresh(select="missing")
    assert "3 up to date, 1 left out by select, 0 failed" in selected.summary()


def test_run_with_nothing_to_do_materializes_no_partition(bench: Workbench) -> None:
    bench.settings["derived"] = [{"dtype": "int8"}]
    bench.write("a")
    bench.refresh()
    assert bench.run(NAMES.derive_job, tags=hand_over_tags(bench)).success

    again = bench.refresh()

    [newest] = bench.instance.fetch_materializations(NAMES.embeddings, limit=1).records
    assert newest.run_id == again.run_id, "which a freshness policy looks at"
    assert newest.partition_key is None
    assert stale_status(bench, "a") == "FRESH"
    assert bench.tick(NAMES.hand_over_sensor).run_requests == []


def hand_over_tags(bench: Workbench) -> dict[str, str]:
    [request] = bench.tick(NAMES.hand_over_sensor).run_requests
    return dict(request.tags)


def test_last_line_of_a_run_that_could_not_begin_has_the_reason(bench: Workbench) -> None:
    bench.fill("ab")
    bench.settings["devices"] = "cuda:7"

    ran = bench.refresh()

    assert not ran.success
    assert "2 not reached" in ran.summary()
    assert "ended by ConfigError: " in ran.summary()
    assert "cuda:7 not found" in ran.summary()


def test_partition_with_equal_content_keeps_its_data_version(bench: Workbench) -> None:
    bench.write("a")
    first = bench.refresh()
    bench.write("a", version="v2")

    second = bench.refresh()

    assert second.metrics()["texts_encoded"] == 0
    assert second.metrics()["partitions_republished"] == 1

    event = second.materialized()["a"]
    assert event.metadata["action"].value == "republished"
    assert data_version(event) == data_version(first.materialized()["a"])
    assert stale_status(bench, "a") == "FRESH"


def test_a_range_embeds_its_partitions_and_named_keys_nothing_else_in_it(bench: Workbench) -> None:
    bench.fill("abcde")

    bench.instance.add_dynamic_partitions("catalog", list("abcde"))

    assert set(bench.embed("b", "d", keys=["c"]).materialized()) == {"c"}
    assert set(bench.embed("b", "d").materialized()) == {"b", "d"}


def test_in_a_backfill_fresh_partitions_have_an_event_too(bench: Workbench) -> None:
    bench.fill("abc")
    first = bench.refresh()
    bench.write("b", 9, version="v2")

    ran = bench.embed("a", "c", backfill="x")

    assert ran.success

    events = ran.materialized()
    assert set(events) == {"a", "b", "c"}
    actions = {key: event.metadata["action"].value for key, event in events.items()}
    assert actions == {"a": "fresh", "b": "encoded", "c": "fresh"}

    assert data_version(events["a"]) == data_version(first.materialized()["a"])
    assert ran.metrics()["texts_encoded"] == 6
    assert ran.metrics()["rows_reused"] == 3


def test_unattended_run_begins_no_second_space(bench: Workbench) -> None:
    bench.write("a")
    bench.refresh(unattended=True)  # the first space of an empty output
    bench.write("b")
    bench.settings["model"] = "hash://24"

    refused = bench.refresh(unattended=True)

    assert not refused.success
    assert "launch catalog_refresh by hand" in refused.failure()
    assert not refused.will_retry


def test_last_line_of_a_terminated_run_says_who_embeds_the_rest(
    bench: Workbench, terminated: None
) -> None:
    bench.settings |= {"b_min": 3, "b_max": 3}
    bench.fill("abcd")

    ran = bench.refresh()
    published = len(list(bench.output.glob("*/*.parquet")))
    line = ran.logged()[-1]

    assert not ran.success
    assert line.startswith(f"Terminated. 4 partitions: {published} encoded (")
    assert "ended by" not in line
    assert f"{4 - published} not reached" in line or published == 4
    assert "Launch catalog_refresh for the rest" in line
    assert "the sensor new_partitions leaves it alone until its source changes" in line


@pytest.mark.parametrize(
    ("what", "reason"),
    [("catalog", "no catalog at"), ("model", "no-such-model"), ("output", "Not a directory")],
)
def test_wrong_setting_ends_a_run_without_retries_and_with_a_remedy(
    bench: Workbench, what: str, reason: str
) -> None:
    bench.write("a")
    if what == "catalog":
        bench.catalog.rename(bench.root / "elsewhere")
    elif what == "model":
        bench.settings["model"] = str(bench.root / "no-such-model")
    else:
        bench.output.write_text("a file")

    ran = bench.refresh()

    assert not ran.success
    assert not ran.will_retry
    assert reason in ran.failure()
    assert "Traceback" not in ran.failure()
    assert not ran.checks()[NAMES.run_check.name].passed


def test_definitions_load_without_catalog_output_or_model(bench: Workbench) -> None:
    bench.settings["model"] = "nobody/nothing"
    repository = bench.definitions.get_repository_def()

    repository.load_all_definitions()

    assert not bench.catalog.exists()
    assert not bench.output.exists()


_SLOW = "SuperBatch 0: its 3 texts took 0.0 s, 3.0 times as long as usual."


def test_slow_call_is_a_warning_in_the_log_of_the_run(bench: Workbench, slow_pace: None) -> None:
    bench.fill("a")
    ran = bench.refresh()

    logged = bench.instance.all_logs(ran.run_id)
    warned = [entry.user_message for entry in logged if entry.level == 30]

    assert len([message for message in warned if message.startswith(_SLOW)]) == 1


def test_slow_call_fails_the_check_of_the_run_as_a_warning(
    bench: Workbench, slow_pace: None
) -> None:
    bench.fill("a")
    check = bench.refresh().checks()["encode_not_slow"]

    assert not check.passed
    assert check.severity == dg.AssetCheckSeverity.WARN
    assert check.metadata["slowest_pace_ratio"].value == 3.0
    assert _SLOW in str(check.metadata["slow"].value)
