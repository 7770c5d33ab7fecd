"""Progress is shown with and without a terminal, and not at all on request."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from surge_dagster import __version__, terminal
from tests.command import EMBED, MODEL, Command


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
    surge.write("a", 3)
    assert surge(*EMBED, "--quiet") == (0, "", "")
    assert surge("verify", "catalog", "out", "-q") == (0, "", "")
    surge.write("b", 3, text=["x", None, "y"])
    code, out, error = surge(*EMBED, "--quiet")
    assert code == 1
    assert out == ""
    assert "refused" in error
    code, out, error = surge(*EMBED, "--force")
    assert "6 of 6 texts" in error, "those of the refused partition are done"
    assert "1 partition written" in out


def run_module(folder: Path, *arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "surge_dagster", *arguments]
    return subprocess.run(command, cwd=folder, text=True, stderr=subprocess.PIPE, **how)


@pytest.fixture
def embedded(tmp_path: Path, surge: Command) -> Path:
    """A folder with an output whose key and text an ASCII terminal lacks."""
    surge.write("größe", 1)
    surge.embed()
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("search", "x", "out", *MODEL), "gr\\xf6\\xdfe"),
        (("plan", "catalog", "new", *MODEL), "wall time"),
        (("embed", "--help"), "Usage: "),
    ],
)
def test_ascii_output_escapes_other_characters(
    embedded: Path, arguments: tuple[str, ...], shown: str
) -> None:
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}

    ran = run_module(embedded, *arguments, stdout=subprocess.PIPE, env=ascii_only)

    assert ran.returncode == 0, ran.stderr
    assert shown in ran.stdout


@pytest.mark.parametrize(
    "arguments",
    [EMBED, ("embed", "--help"), ("--version",)],
)
def test_full_output_is_one_line_of_error(embedded: Path, arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        ran = run_module(embedded, *arguments, stdout=full)

    assert ran.returncode == 1
    assert ran.stderr == ("error: standard output cannot be written: No space left on device\n")


def test_user_without_a_home_folder_and_an_entry_can_embed(
    tmp_path: Path, surge: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HOME", "SURGE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    surge.write("a", 1)

    surge.embed()
    assert (tmp_path / "temporary" / f"surge-dagster-{os.getuid()}").is_dir()

    refused = surge.error("embed", "~/catalog", "out", *MODEL)
    assert "'~/catalog': there is no such home folder" in refused


def test_package_runs_as_a_module(tmp_path: Path) -> None:
    done = run_module(tmp_path, "--version", stdout=subprocess.PIPE)
    assert done.stdout.strip() == f"surge-dagster {__version__}"


def test_numbers_that_json_does_not_have_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.print_json(
        {"hits": [{"columns": {"price": float("nan"), "sizes": [float("inf"), 1.5]}}]}
    )
    assert (
        capsys.readouterr().out
        == '{"hits": [{"columns": {"price": null, "sizes": [null, 1.5]}}]}\n'
    )
