"""Tests of the whole demo, with small packages and the hash encoder instead of installed packages
and a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from surge_dagster.catalogs.demo import build_demo_catalog
from surge_dagster.demo import local_instance, run_demo
from tests.catalogs.installed import functions, install
from tests.dagster.conftest import NAMES, ROOT, Workbench

pytestmark = pytest.mark.processes


@pytest.fixture
def small_demo(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[[], int]:
    """Runs the demo over thirty small packages, with the hash model."""
    monkeypatch.setenv("DAGSTER_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SURGE_MODEL", "hash://16")
    monkeypatch.setenv("SURGE_B_MIN", "100")
    site = tmp_path / "site"
    for number in range(30):
        install(site, f"package{number}", {f"package{number}.py": functions(3 * number + 1)})
    build = partial(build_demo_catalog, search_path=[str(site)])
    monkeypatch.setattr("surge_dagster.demo.build_demo_catalog", build)
    places = {"catalog": str(tmp_path / "docstrings"), "output": str(tmp_path / "vectors")}
    return partial(run_demo, **places, limit=300)


@pytest.mark.timeout(180)
def test_demo_embeds_checks_and_searches_and_encodes_nothing_again(
    bench: Workbench, small_demo: Callable[[], int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert small_demo() == 0

    printed = capfd.readouterr().out
    assert "docstrings of" in printed
    assert "SuperBatch 0:" in printed
    assert "rows and ids are those of the source" in printed
    assert "'parse a date string'" in printed

    runs = {run.job_name: run for run in bench.instance.get_runs()}
    assert set(runs) == {"catalog_refresh", "catalog_check"}
    assert all(run.is_success for run in runs.values())
    assert runs["catalog_refresh"].run_id in printed

    packages = bench.instance.get_dynamic_partitions("catalog")
    assert bench.instance.get_materialized_partitions(NAMES.embeddings) == set(packages)

    assert small_demo() == 0

    again = capfd.readouterr().out
    assert f"0 encoded, {len(packages)} up to date, 0 failed" in again
    assert "SuperBatch" not in again


@pytest.mark.timeout(180)
def test_demo_gives_no_warnings(
    small_demo: Callable[[], int], recwarn: pytest.WarningsRecorder
) -> None:
    assert small_demo() == 0

    # Python hides deprecation warnings of libraries by default.
    shown = [each for each in recwarn if not issubclass(each.category, DeprecationWarning)]

    assert shown == []


def test_demo_creates_an_instance_with_the_settings_of_the_project(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("DAGSTER_HOME", raising=False)
    with local_instance() as instance:
        assert Path(instance.root_directory) == tmp_path / ".dagster"
        assert instance.run_retries_enabled
        assert not instance.telemetry_enabled

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
    assert "Failed" in printed
    assert "nobody/nothing" in printed
    assert "Traceback" not in printed


class _Summary:
    texts = 3
    partitions = 1
