"""One setup builds the runs of every machine."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from surge_dagster.config.run_setup import RunSetup
from surge_dagster.config.settings import load_settings
from surge_dagster.engine.errors import ConfigError
from tests.small_catalogs import assert_embedded, numbered_rows, write_catalog


@pytest.fixture
def setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunSetup:
    """With places that are relative to the working folder."""
    monkeypatch.chdir(tmp_path)
    settings = load_settings(source="catalog", output="out", model="hash://16", devices="cpu")
    return RunSetup(settings, settings, settings, settings.source, settings.output)


def test_setup_that_has_travelled_builds_a_run(
    setup: RunSetup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_catalog(tmp_path / "catalog", {"a": numbered_rows("a", 5)})
    travelled: RunSetup = pickle.loads(pickle.dumps(setup.for_machines()))
    monkeypatch.chdir("/")

    with travelled.open_pool() as pool:
        run = travelled.new_run(travelled.open_source(), pool)
        assert [receipt.key for receipt in run] == ["a"]
    assert_embedded(tmp_path / "out", run.space.name, "a", numbered_rows("a", 5))


def test_runs_of_a_process_share_its_memory(setup: RunSetup) -> None:
    encoder = setup.encoder.model_copy(update={"memory_limit_bytes": 1_000})
    setup = replace(setup, encoder=encoder)
    with setup.open_pool() as pool:
        assert setup.new_run([], pool).memory_limit_bytes == 1_000
        assert setup.new_run([], pool, at_once=2).memory_limit_bytes == 500


def test_model_in_a_folder_has_an_absolute_path_on_machines(
    setup: RunSetup, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    for model, expected in {
        "model": str(tmp_path / "model"),
        "intfloat/e5-large": "intfloat/e5-large",
    }.items():
        encoder = setup.encoder.model_copy(update={"model": model})
        assert replace(setup, encoder=encoder).for_machines().encoder.model == expected


@pytest.mark.parametrize("source", ["asset://products", "frame://python"])
def test_catalog_of_this_process_is_refused_by_machines(setup: RunSetup, source: str) -> None:
    with pytest.raises(ConfigError, match="machines of a cluster cannot read it"):
        replace(setup, source=source).for_machines()
