"""The command line, called in the tests' own process."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster.commands import cli

MODEL = ("--model", "hash://16")
EMBED = ("embed", "catalog", "out", *MODEL)


class Command:
    """Runs commands in a folder of their own.

    Attributes:
        root: the test's folder.
        folder: where the next command runs.
        printed: what the last one wrote to standard error, as it was written.
    """

    def __init__(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, root: Path
    ) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch
        self.root = self.folder = root
        self.printed = ""

    def __call__(self, *arguments: object) -> tuple[int, str, str]:
        """Exit code, standard output, and standard error with its white space as single blanks."""
        self._monkeypatch.chdir(self.folder)
        self._monkeypatch.setattr(sys, "argv", ["surge-dagster", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        assert isinstance(exit_.value.code, int)
        out, self.printed = self._capsys.readouterr()
        return exit_.value.code, out, " ".join(self.printed.split())

    def write(self, key: str, rows: int, *, catalog: str = "catalog", **columns: object) -> None:
        """Write a partition with numbered texts, and with further columns or others in their
        place."""
        path = self.root / catalog / f"partition={key}" / "part-0.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        table = {
            "id": [f"{key}-{row}" for row in range(rows)],
            "text": [f"{key} number {row}" for row in range(rows)],
        }
        pq.write_table(pa.table(table | columns), path)

    def error(self, *arguments: object, expected: int = 2) -> str:
        """What a command says that ends with this exit code."""
        code, _, error = self(*arguments)
        assert code == expected, error
        assert "Traceback" not in error
        return error

    def embed(self, *options: object) -> dict[str, Any]:
        """The report of a run over the folder `catalog` into `out`."""
        return self.json(*EMBED, *options)

    def json(self, *arguments: object, expected: int = 0) -> dict[str, Any]:
        """The document of a command that ends with this exit code."""
        code, out, error = self(*arguments, "--json")
        assert code == expected, error
        return json.loads(out.splitlines()[-1])

    def space_json(self, output: str = "out") -> Path:
        """The file that describes the only space of an output."""
        [found] = (self.root / output).glob("*/space.json")
        return found
