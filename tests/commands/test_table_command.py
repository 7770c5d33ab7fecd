"""The command on a table that nobody prepared: its vectors are those of folders with equal rows,
also after a kill."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import Command
from tests.engine.sources.tables import by_key, shuffled_rows, write_csv
from tests.small_catalogs import DIMENSION, assert_embedded, read_embedded, write_catalog

ROWS = shuffled_rows(600, 12)
HEADER = ("id", "text", "category", "size", "remark")
# The process is killed when its fourth file, of which one describes the space, is published.
KILLED = """
import itertools, os, signal
from surge_dagster.commands.cli import main
from surge_dagster.engine.store import local_upload
published, publish = itertools.count(1), local_upload.LocalUpload.publish
def mortal(*arguments, **options):
    stored = publish(*arguments, **options)
    if next(published) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return stored
local_upload.LocalUpload.publish = mortal
main()
"""
OPTIONS = (
    "--partition-by",
    "category",
    "--model",
    f"hash://{DIMENSION}",
    "--b-min",
    "50",
    "--b-max",
    "100",
)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    # As some programs write it: a mark at the beginning, columns that nobody needs, quotes where
    # they are needed.
    path = write_csv(tmp_path / "products.csv", [(*row, '5" pipe', "") for row in ROWS], HEADER)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    return path


def test_killed_run_of_a_table_ends_as_one_of_folders(
    table: Path, tmp_path: Path, surge: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SURGE_CACHE_DIR", str(tmp_path / "cache"))
    command = [sys.executable, "-c", KILLED, "embed", str(table), "out", *OPTIONS]
    killed = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert list((tmp_path / "cache").glob("tables/*/rows/*/groups-*"))
    report = surge.json("embed", table, "out", *OPTIONS)
    assert report["partitions_written"] + report["partitions_skipped"] == 12
    assert 0 < report["partitions_skipped"] < 12
    assert not list((tmp_path / "cache").glob("tables/*/rows/*/groups-*"))

    write_catalog(tmp_path / "folders", by_key(ROWS))
    surge.json("embed", "folders", "expected", *OPTIONS[2:])
    for key, rows in by_key(ROWS).items():
        facts = assert_embedded(tmp_path / "out", report["space"], key, rows)
        expected = read_embedded(tmp_path / "expected", report["space"], key)
        assert facts.content_digest == expected.facts.content_digest
