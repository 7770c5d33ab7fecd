"""JSONTestSuite: what is JSON is read, anything else is refused by name, and nothing ends a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from surge_dagster.engine.sources import Selection, open_folders
from tests.engine.sources.reading import only, refusal, rows_of

CASES: dict[str, str] = json.loads(
    (Path(__file__).parent / "data" / "json_test_suite.json").read_text()
)
# Left out of the data for their size.
CASES |= {
    "n_structure_100000_opening_arrays": "[" * 100_000,
    "n_structure_open_array_object": '[{"":' * 50_000,
}
GOOD = b'{"id": "1", "text": "a"}\n'


def written(folder: Path, name: str) -> Path:
    """Write a case as the field of the second row of a file."""
    content = CASES[name].encode("utf-8", "surrogatepass").replace("\ufffd".encode(), b"\xff")
    if name.startswith("y_"):
        content = content.replace(b"\n", b" ")  # one object per line
    path = folder / "case.jsonl"
    path.write_bytes(GOOD + b'{"id": "2", "text": "b", "value": ' + content + b"}\n")
    return path


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("y_")])
def test_json_is_read(tmp_path: Path, name: str) -> None:
    written(tmp_path, name)

    assert rows_of(only(open_folders(tmp_path))) == [("1", "a"), ("2", "b")]


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("n_")])
def test_what_is_no_json_is_refused_with_its_row(tmp_path: Path, name: str) -> None:
    written(tmp_path, name)

    finding = str(refusal(only(open_folders(tmp_path))))

    assert finding.startswith("partition 'case': the file case.jsonl cannot be read at row 1 (")


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("i_")])
@pytest.mark.parametrize("is_carried", [False, True])
def test_what_parsers_may_refuse_is_read_or_refused(
    tmp_path: Path, name: str, is_carried: bool
) -> None:
    written(tmp_path, name)
    columns = ("value",) if is_carried else ()
    partition = only(open_folders(tmp_path, Selection(carried=columns)))

    try:
        refused = str(refusal(partition))
    except pytest.fail.Exception:
        assert rows_of(partition) == [("1", "a"), ("2", "b")]
    else:
        assert "the file case.jsonl cannot be read at row 1" in refused
