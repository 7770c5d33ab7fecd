"""csv-spectrum: every file is read as its authors read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surge_dagster.engine.sources.formats import batches
from tests.engine.sources.reading import source_file

CASES: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "csv_spectrum.json").read_text()
)


@pytest.mark.parametrize("name", CASES)
def test_file_is_read_as_its_authors_read_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / f"{name}.csv"
    path.write_bytes(CASES[name]["csv"].encode())
    rows = CASES[name]["rows"]

    read = [row for batch in batches(source_file(path), list(rows[0])) for row in batch.to_pylist()]

    assert read == rows
