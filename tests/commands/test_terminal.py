"""Progress is shown with and without a terminal, and not at all on request."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from surge_dagster import __version__, terminal
from tests.command import Command
from tests.commands.test_cli import write_partition


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that each look at the clock gives, the last one again and again."""
    seconds = [0.0]
    monkeypatch.setattr(
        terminal.time, "monotonic", lambda: seconds.pop(0) if len(seconds) > 1 else seconds[0]
    )
    return seconds


def test_progress_without_a_terminal_is_a_line_every_ten_seconds(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    clock[:] = [0, 9, 10, 19, 21]
    with terminal.progress_bar("texts") as show:
        for done in (900, 1_000, 1_900, 2_100):
            show(done, 4_000)
        clock[:] = [32]
        show(3_200, None)
    assert capsys.readouterr().err.splitlines() == [
        "1,000 of 4,000 texts in 10 s, 100 per second",
        "2,100 of 4,000 texts in 21 s, 100 per second",
        "3,200 texts in 32 s, 100 per second",
    ]


def test_quiet_command_prints_errors_alone(
    tmp_path: Path, surge: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "LINE_SECONDS", 0.0)
    write_partition(tmp_path / "catalog", "a", 3)
    embed = ("embed", "catalog", "out", "--model", "hash://16")
    assert surge(*embed, "--quiet") == (0, "", "")
    assert surge("verify", "catalog", "out", "-q") == (0, "", "")
    write_partition(tmp_path / "catalog", "b", 3, text=["x", None, "y"])
    code, out, error = surge(*embed, "--quiet")
    assert (code, out) == (1, "") and "refused" in error
    code, out, error = surge(*embed, "--force")
    assert "6 of 6 texts" in error, "those of the refused partition are done"
    assert "1 partition written" in out


def test_package_runs_as_a_module(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "surge_dagster", "--version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"surge-dagster {__version__}"


def test_numbers_that_json_does_not_have_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.print_json(
        {"hits": [{"columns": {"price": float("nan"), "sizes": [float("inf"), 1.5]}}]}
    )
    assert (
        capsys.readouterr().out
        == '{"hits": [{"columns": {"price": null, "sizes": [null, 1.5]}}]}\n'
    )
