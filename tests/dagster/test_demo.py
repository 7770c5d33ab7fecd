"""Tests of the whole demo, with small packages and the hash encoder instead of installed packages
and a model."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import dagster as dg
import pytest
from typer.testing import CliRunner

from surge_dagster.catalogs.demo import build_demo_catalog
from surge_dagster.commands.cli import app
from surge_dagster.demo import local_instance, run_demo
from tests.catalogs.installed import functions, install
from tests.dagster.conftest import ROOT, Ran, Workbench

pytestmark = pytest.mark.processes


@pytest.mark.timeout(180)
def test_demo_embeds_checks_and_searches_without_warnings_and_repeating_it_encodes_nothing(
    bench: Workbench,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    recwarn: pytest.WarningsRecorder,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SURGE_MODEL", "hash://16")
    monkeypatch.setenv("SURGE_B_MIN", "100")
    catalog, output, site = (
        str(tmp_path / "docstrings"),
        str(tmp_path / "vectors"),
        tmp_path / "site",
    )
    for number in range(30):
        install(site, f"package{number}", {f"package{number}.py": functions(3 * number + 1)})
    build = partial(build_demo_catalog, search_path=[str(site)])
    monkeypatch.setattr("surge_dagster.demo.build_demo_catalog", build)
    assert run_demo(catalog=catalog, output=output, limit=300) == 0
    printed = capfd.readouterr().out
    for part in (
        "docstrings of",
        "SuperBatch 0:",
        "texts/s",
        "rows and ids are those of the source",
        output,
        "'parse a date string'",
    ):
        assert part in printed, printed

    runs = {run.job_name: run for run in bench.instance.get_runs()}
    assert set(runs) == {"catalog_refresh", "catalog_check"}
    for run in runs.values():
        assert (
            run.status == dg.DagsterRunStatus.SUCCESS and run.run_id in printed
        ) or run.job_name == "catalog_check"
    packages = bench.instance.get_dynamic_partitions("catalog")
    assert set(bench.instance.get_materialized_partitions(dg.AssetKey("embeddings"))) == set(
        packages
    )
    assert len(packages) > 20

    screen = CliRunner().invoke(
        app,
        [
            "plan",
            catalog,
            str(tmp_path / "new"),
            "--model",
            "hash://16",
            "--b-min",
            "100",
            "--explain",
        ],
    )
    assert f"SuperBatches   {printed.count('  SuperBatch ')}, of 100 to" in screen.stdout
    assert len(screen.stdout.splitlines()) <= 24
    totals = Ran(bench.instance, runs["catalog_refresh"].run_id, success=True).totals()
    assert totals["predicted_wall_seconds"] > 0 < totals["wall_seconds"]

    assert run_demo(catalog=catalog, output=output, limit=300) == 0
    again = capfd.readouterr().out
    # Python hides deprecation warnings of libraries by default.
    assert [
        str(warning) for warning in recwarn if not issubclass(warning.category, DeprecationWarning)
    ] == []
    assert (
        f"{len(packages)} partitions; nothing was encoded again" in again
        and "SuperBatch" not in again
    )


def test_demo_creates_an_instance_with_the_settings_of_the_project(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    with local_instance() as instance:
        assert Path(instance.root_directory) == tmp_path / ".dagster"
        assert instance.run_retries_enabled and not instance.telemetry_enabled
    assert (tmp_path / ".dagster" / "dagster.yaml").read_text() == (
        ROOT / ".dagster" / "dagster.yaml"
    ).read_text()


def test_demo_with_a_failed_run_prints_the_reason_and_returns_one(
    bench: Workbench,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SURGE_MODEL", "nobody/nothing")
    monkeypatch.setattr("surge_dagster.demo.build_demo_catalog", lambda *_, **__: _Summary())
    bench.write("a")
    assert run_demo(catalog=str(bench.catalog), output=str(bench.output)) == 1
    printed = capfd.readouterr().out
    assert "Failed" in printed and "nobody/nothing" in printed and "Traceback" not in printed


class _Summary:
    texts, partitions = 3, 1
