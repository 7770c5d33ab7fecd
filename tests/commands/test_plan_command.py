"""`surge-dagster plan`: a few lines for people, one document for programs, and what it refuses."""

from __future__ import annotations

import json

import pytest

from tests.command import EMBED, MODEL, Command
from tests.small_catalogs import DIMENSION, numbered_rows, write_partition

SIZES = {"a": 30, "b": 5, "c": 200}
PLAN = ("plan", "catalog", "out")
ON_CPU = ("--devices", "cpu")


@pytest.fixture
def surge(surge: Command) -> Command:
    """In a folder with a catalog."""
    for key, rows in SIZES.items():
        write_partition(surge.root / "catalog", key, numbered_rows(key, rows))
    return surge


def shown(surge: Command, *options: object) -> str:
    """What a plan prints."""
    code, out, error = surge(*PLAN, *options)
    assert code == 0, error
    return out


def test_plan_prints_time_and_cost_first_and_what_they_follow_from_on_request(
    surge: Command,
) -> None:
    costs = ("--texts-per-second", 100, "--workers", 2, "--b-min", 100, "--price-per-hour", 3.6)
    lines = shown(surge, *costs, "--deadline", "1s").splitlines()
    assert lines == [
        "wall time      1.2 s, 200 texts/s; the first files after 1.2 s",
        "cost           0.001176 at 3.6 an hour; 5.004 per million texts",
        "work           3 partitions, 235 texts; about 879 tokens",
        "known from     235 texts of 3 partitions: tokens per byte as in earlier runs; costs as "
        "given; storage not "
        "measured yet on this output, counted as free",
        "Within 1.0 s: 3 workers on 1 machine, 784 ms.",
        "--explain has the costs, SuperBatches, storage and memory that this follows from.",
    ]
    explained = shown(surge, *costs, "--deadline", "1s", "--explain")
    assert explained.splitlines()[:5] == lines[:5]
    for expected in (
        "3 partitions, 235 texts, the largest has 200; texts of 15 bytes",
        "2 workers",
        "a call costs 1 ms, a text 10 ms of a worker",
        "SuperBatches   1, of 100 to 5,000 texts, the first of 100",
        "storage        not measured yet on this output, counted as free: --calibrate",
        "speedup 1.00 (alpha 0.003)",
        "SuperBatches make little difference here: they save less than 1% of the encoding time.",
        "The SURGE paper's table says of these: moderately beneficial.",
    ):
        assert expected in explained
    assert len(explained.splitlines()) <= 24
    assert not (surge.root / "out").exists()


def test_plan_with_a_model_knows_its_costs_its_memory_and_the_store(surge: Command) -> None:
    first = surge.json(*PLAN, *MODEL, *ON_CPU)
    assert first["partitions"] == 3
    assert first["texts"] == 235
    assert first["dimension"] == DIMENSION
    assert first["device"] == "cpu"
    assert first["peak_resident_bytes"] <= first["memory_limit_bytes"]
    assert not (surge.root / "out").exists(), "a plan writes nothing"

    calibrated = surge.json(*PLAN, *MODEL, *ON_CPU, "--calibrate")
    assert calibrated["publish_seconds"] > 0
    assert calibrated["workers_per_machine"] >= 1
    assert not (surge.root / "out").exists()

    _, out, _ = surge(*EMBED, *ON_CPU, "--json")
    report = json.loads(out.splitlines()[-1])
    assert report["superbatches"] == calibrated["superbatches"]
    assert report["predicted_wall_seconds"] > 0
    assert report["prediction_error"] is not None
    assert "were predicted) on cpu" in out


def test_plan_takes_the_price_from_the_settings(
    surge: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SURGE_PRICE_PER_HOUR", "3.6")

    assert "at 3.6 an hour; " in shown(surge, "--texts-per-second", 100)


def test_fresh_partitions_are_left_out_of_the_plan(surge: Command) -> None:
    surge.embed(*ON_CPU)
    assert shown(surge, *MODEL, *ON_CPU).splitlines()[-2:] == [
        "3 partitions fresh: not in this plan",
        "Nothing is left to encode.",
    ]
    write_partition(surge.root / "catalog", "b", numbered_rows("b", 7), version="v2")
    left = surge.json(*PLAN, *MODEL, *ON_CPU)
    assert left["partitions"] == 1
    assert left["texts"] == 7
    assert left["texts_encoded"] == 2
    assert "work           1 partition, 7 texts, about 2 of them to encode; about " in shown(
        surge, *MODEL, *ON_CPU
    )


def test_refused_partitions_are_named_with_the_reason_and_are_no_work(surge: Command) -> None:
    repeated = [*numbered_rows("b", 3), ("id-2", "again")]
    write_partition(surge.root / "catalog", "b", repeated)
    surge.error(*EMBED, *ON_CPU, expected=1)
    lines = shown(surge, *MODEL, *ON_CPU).splitlines()
    assert lines[-4:-2] == [
        "2 partitions fresh: not in this plan",
        "1 partition refused: not in this plan",
    ]
    assert "the id 'id-2' stands at row 2 already" in lines[-2]
    assert lines[-1] == "Every partition that is left to encode is refused."
    [refused] = surge.json(*PLAN, *MODEL, *ON_CPU)["partitions_refused"]
    assert refused["key"] == "b"


def test_large_numbers_have_no_exponents(surge: Command) -> None:
    explained = shown(surge, "--texts-per-second", 0.5, "--price-per-hour", 100, "--explain")
    assert "a text 2,000 ms of a worker" in explained
    assert "at 100 an hour; 55,560 per million texts" in explained


@pytest.mark.parametrize("deadline", ["soon", "2", "2 weeks", "0s", "-1h"])
def test_deadline_that_is_no_time_is_refused(surge: Command, deadline: str) -> None:
    given = (*PLAN, "--texts-per-second", 1, "--deadline", deadline)
    assert "90s, 30m or 2h" in surge.error(*given)


def test_calibration_of_another_machine_is_refused(surge: Command) -> None:
    given = (*PLAN, "--texts-per-second", 1, "--calibrate")
    assert "--texts-per-second describes another" in surge.error(*given)


def test_partitions_of_unknown_size_are_named(surge: Command) -> None:
    (surge.root / "lines").mkdir()
    (surge.root / "lines" / "a.jsonl").write_text('{"id": "1", "text": "one"}\n')
    where = ("plan", "lines", "out", "--texts-per-second", 1)
    assert surge(*where)[1].splitlines()[-2:] == [
        "1 partition of unknown size: not in this plan",
        "There is nothing to predict: the rows of these partitions are counted when they are read.",
    ]
    write_partition(surge.root / "lines", "b", numbered_rows("b", 5))
    assert "work           1 partition, 5 texts; about " in surge(*where)[1]
    assert surge.json(*where)["phi"] == 0
