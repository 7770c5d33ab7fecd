"""Grouping a table survives kills: what was done before is used, and the rows are the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from surge_dagster.engine.tables import grouping
from tests.engine.sources.tables import by_key, contents, shuffled_rows, table_of, write_csv


def test_table_whose_grouping_is_killed_at_every_step_has_all_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SURGE_CACHE_DIR", str(tmp_path / "cache"))
    rows = shuffled_rows(1_500, 20)
    path = write_csv(tmp_path / "t.csv", rows)
    command = [sys.executable, "-m", "tests.engine.tables.killed_grouping", str(path)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(run.stdout)
    assert found["kills"] >= 20
    assert {key: list(map(tuple, each)) for key, each in found["rows"].items()} == by_key(rows)


@pytest.fixture
def interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table whose rows are all in spill files, of which one is grouped."""
    monkeypatch.setenv("SURGE_CACHE_DIR", str(tmp_path / "cache"))
    path = write_csv(tmp_path / "t.csv", shuffled_rows(1_500, 20))
    group = grouping._group_file

    def fails_at_the_second(folder: Path, file: int, keys: list[str]) -> list[grouping.Group]:
        if file:
            raise KeyboardInterrupt
        return group(folder, file, keys)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(grouping, "_group_file", fails_at_the_second)
        list(table_of(path))
    return path


def test_table_is_not_read_again_after_all_its_rows_were_spilled(
    interrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouping, "_spill", None)
    assert contents(table_of(interrupted)) == by_key(shuffled_rows(1_500, 20))


def test_rows_spilled_before_the_machine_was_started_again_are_not_used(
    interrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [folder] = [path for path in (tmp_path / "cache").glob("tables/*/rows-*") if path.is_dir()]
    for spilled in folder.glob("spill-*"):
        spilled.write_bytes(b"lost by a power cut")
    (tmp_path / "boot_id").write_text("another")
    monkeypatch.setattr(grouping, "_BOOT_ID", tmp_path / "boot_id")
    assert contents(table_of(interrupted)) == by_key(shuffled_rows(1_500, 20))


def test_spill_files_that_were_damaged_after_a_kill_are_written_again(interrupted: Path, tmp_path: Path) -> None:
    for spilled in (tmp_path / "cache").glob("tables/*/rows-*/spill-*"):
        content = bytearray(spilled.read_bytes())
        content[len(content) // 2] ^= 1
        spilled.write_bytes(content)
    assert contents(table_of(interrupted)) == by_key(shuffled_rows(1_500, 20))
