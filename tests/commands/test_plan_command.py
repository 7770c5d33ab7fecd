"""`surge-dagster plan`: a few lines for people, one document for programs, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from surge_dagster.commands.cli import app
from surge_dagster.engine.errors import ConfigError
from tests.small_catalogs import DIMENSION, numbered_rows, write_partition

MODEL = ("--model", f"hash://{DIMENSION}", "--devices", "cpu")
SIZES = {"a": 30, "b": 5, "c": 200}


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("catalog")
    for key, rows in SIZES.items():
        write_partition(folder, key, numbered_rows(key, rows))
    return folder


def plan(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def document(*arguments: Any) -> dict[str, Any]:
    result = plan(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout.strip().splitlines()[-1])


def test_plan_prints_time_and_cost_first_and_what_they_follow_from_on_request(
    catalog: Path, tmp_path: Path
) -> None:
    given = (
        "--texts-per-second",
        100,
        "--workers",
        2,
        "--b-min",
        100,
        "--price-per-hour",
        3.6,
        "--deadline",
        "1s",
    )
    lines = plan(catalog, tmp_path, *given).stdout.splitlines()
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
    shown = plan(catalog, tmp_path, *given, "--explain").stdout
    assert shown.splitlines()[:5] == lines[:5]
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
        assert expected in shown
    assert len(shown.splitlines()) <= 24 and list(tmp_path.iterdir()) == []


def test_plan_with_a_model_knows_its_costs_its_memory_and_the_store(
    catalog: Path, tmp_path: Path
) -> None:
    first = document(catalog, tmp_path / "out", *MODEL)
    assert (first["partitions"], first["texts"], first["dimension"], first["device"]) == (
        3,
        235,
        DIMENSION,
        "cpu",
    )
    assert first["peak_resident_bytes"] <= first["memory_limit_bytes"]
    assert not (tmp_path / "out").exists(), "a plan writes nothing"
    calibrated = document(catalog, tmp_path / "out", *MODEL, "--calibrate")
    assert calibrated["publish_seconds"] > 0 and calibrated["workers_per_machine"] >= 1
    assert list(tmp_path.iterdir()) == []
    embedded = CliRunner().invoke(
        app, ["embed", str(catalog), str(tmp_path / "out"), *MODEL, "--json"]
    )
    report = json.loads(embedded.stdout.strip().splitlines()[-1])
    assert report["superbatches"] == calibrated["superbatches"]
    assert report["predicted_wall_seconds"] > 0 and report["prediction_error"] is not None
    assert "were predicted) on cpu" in embedded.stdout


def test_plan_takes_the_price_from_the_settings(
    catalog: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SURGE_PRICE_PER_HOUR", "3.6")

    shown = plan(catalog, tmp_path, "--texts-per-second", 100).stdout

    assert "at 3.6 an hour; " in shown


def test_fresh_partitions_are_left_out_of_the_plan(tmp_path: Path) -> None:
    for key, rows in SIZES.items():
        write_partition(tmp_path / "catalog", key, numbered_rows(key, rows))
    where = (tmp_path / "catalog", tmp_path / "out", *MODEL)
    assert CliRunner().invoke(app, ["embed", *map(str, where)]).exit_code == 0
    shown = plan(*where).stdout
    assert shown.splitlines()[-2:] == [
        "3 partitions fresh: not in this plan",
        "Nothing is left to encode.",
    ]
    write_partition(tmp_path / "catalog", "b", numbered_rows("b", 7), version="v2")
    left = document(*where)
    assert (left["partitions"], left["texts"], left["texts_encoded"]) == (1, 7, 2)
    assert (
        "work           1 partition, 7 texts, about 2 of them to encode; about "
        in plan(*where).stdout
    )


def test_refused_partitions_are_named_with_the_reason_and_are_no_work(tmp_path: Path) -> None:
    for key in ("a", "b"):
        write_partition(
            tmp_path / "catalog",
            key,
            [*numbered_rows(key, 3), ("id-2", "again")][: 3 if key == "a" else 4],
        )
    where = (tmp_path / "catalog", tmp_path / "out", *MODEL)
    assert CliRunner().invoke(app, ["embed", *map(str, where)]).exit_code == 1
    shown = plan(*where).stdout.splitlines()
    assert shown[-4:-2] == [
        "1 partition fresh: not in this plan",
        "1 partition refused: not in this plan",
    ]
    assert "the id 'id-2' stands at row 2 already" in shown[-2]
    assert shown[-1] == "Every partition that is left to encode is refused."
    [refused] = document(*where)["partitions_refused"]
    assert refused["key"] == "b"


def test_large_numbers_have_no_exponents(catalog: Path, tmp_path: Path) -> None:
    given = ("--texts-per-second", 0.5, "--price-per-hour", 100)
    shown = plan(catalog, tmp_path, *given, "--explain").stdout
    assert "a text 2,000 ms of a worker" in shown
    assert "at 100 an hour; 55,560 per million texts" in shown


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        *(
            (("--deadline", deadline), "90s, 30m or 2h")
            for deadline in ("soon", "2", "2 weeks", "0s", "-1h")
        ),
        (("--calibrate",), "--texts-per-second describes another"),
    ],
)
def test_deadline_that_is_no_time_and_calibration_of_another_machine_are_refused(
    catalog: Path, tmp_path: Path, given: tuple[str, ...], refusal: str
) -> None:
    result = plan(catalog, tmp_path, "--texts-per-second", 1, *given)
    assert isinstance(result.exception, ConfigError) and refusal in str(result.exception)


def test_partitions_of_unknown_size_are_named(tmp_path: Path) -> None:
    (tmp_path / "catalog").mkdir()
    (tmp_path / "catalog" / "a.jsonl").write_text('{"id": "1", "text": "one"}\n')
    where = (tmp_path / "catalog", tmp_path / "out", "--texts-per-second", 1)
    shown = plan(*where).stdout.splitlines()
    assert shown[-2:] == [
        "1 partition of unknown size: not in this plan",
        "There is nothing to predict: the rows of these partitions are counted when they are read.",
    ]
    write_partition(tmp_path / "catalog", "b", numbered_rows("b", 5))
    assert "work           1 partition, 5 texts; about " in plan(*where).stdout
    assert document(*where)["phi"] == 0
