"""A catalog with one bad row of each kind, in each format: all other rows are published, each bad
row is named, the output verifies, and the second night encodes nothing."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.command import MODEL, Command

PARTITIONS = 10
GOOD = 5
OPTIONS = (
    *MODEL,
    *("--bad-rows", "set_aside", "--missing-text", "refuse"),
    *("--max-text-bytes", 8000, "--long-text", "set_aside"),
)
# By kind: the row, or the line that a file has in its place, and what is wrong with it.
ROWS: dict[str, tuple[tuple[str | None, str | None], str]] = {
    "null id": ((None, "A hat."), "the id is null"),
    "repeated id": (("good-1", "Another one."), "the id is repeated"),
    "null text": (("x", None), "the text is null or blank"),
    "blank text": (("x", " \t "), "the text is null or blank"),
    "many bytes": (("x", "steel " * 2000), "the text has 12,000 bytes; at most 8,000"),
    "many tokens": (("x", "steel " * 900), "more than the 256 tokens that the model reads"),
}
LINES: dict[str, dict[str, tuple[bytes, str]]] = {
    "csv": {
        "not utf-8": (b"x,\xff", "not valid UTF-8"),
        "short line": (b"x", "expected 2 values, got 1"),
        "long line": (b"x,A hat.,more", "expected 2 values, got 3"),
    },
    "jsonl": {
        "not utf-8": (b'{"id": "x", "text": "\xff"}', "utf-8"),
        "not json": (b'{"id": "x", "text": ', "Expecting value"),
        "no object": (b"[1]", "expected one JSON object per line"),
    },
    "parquet": {},
}


def content(form: str, bad: tuple[str | None, str | None] | bytes | None, part: int) -> bytes:
    """A file of good rows with a bad one, or a bad line, in the middle."""
    rows: list[Any] = [(f"good-{row}", f"Bottle {part}-{row}.") for row in range(GOOD)]
    if bad is not None:
        rows.insert(3, bad)
    if form == "parquet":
        stream = io.BytesIO()
        columns = list(zip(*rows, strict=True))
        pq.write_table(pa.table({"id": columns[0], "text": columns[1]}), stream)
        return stream.getvalue()

    lines = [b"id,text"] if form == "csv" else []
    for row in rows:
        if isinstance(row, bytes):
            lines.append(row)
        elif form == "csv":
            line = io.StringIO()
            csv.writer(line, lineterminator="").writerow(row)
            lines.append(line.getvalue().encode())
        else:
            lines.append(json.dumps(dict(zip(("id", "text"), row, strict=True))).encode())
    return b"\n".join(lines) + b"\n"


@pytest.mark.parametrize("form", LINES)
def test_bad_rows_are_set_aside_and_all_others_are_published(surge: Command, form: str) -> None:
    bad = {**ROWS, **LINES[form]}
    if form == "csv":
        del bad["null id"]  # an empty field is an empty id
    kinds = [*bad, *[""] * (PARTITIONS - len(bad))]
    for part, kind in enumerate(kinds):
        row = bad[kind][0] if kind else None
        (surge.root / f"part={part}.{form}").write_bytes(content(form, row, part))
    source = f"{surge.root}/part={{part}}.{form}"

    first = surge.json("embed", source, "out", *OPTIONS)
    listed = surge.json("rejected", "out")
    verified = surge.json("verify", source, "out", *OPTIONS)
    second = surge.json("embed", source, "out", *OPTIONS)

    assert first["partitions_written"] == PARTITIONS
    assert first["rejected_rows"] == len(bad)
    assert listed["rejected_rows"] == len(bad)
    found = {partition["key"]: partition["rows"] for partition in listed["partitions"]}
    for part, (kind, (_, reason)) in enumerate(bad.items()):
        [row] = found[str(part)]
        assert reason in row["reason"], kind
        assert row["row"] == 3, kind
    assert verified["violations"] == []
    assert second["texts_encoded"] == 0
    assert second["partitions_skipped"] == PARTITIONS


@pytest.mark.parametrize("form", LINES)
def test_files_have_the_good_rows_in_order(surge: Command, form: str) -> None:
    row = ROWS["repeated id"][0]
    (surge.root / f"part=a.{form}").write_bytes(content(form, row, 0))

    surge.json("embed", f"{surge.root}/part={{part}}.{form}", "out", *OPTIONS)

    [path] = (surge.root / "out").glob("*/a.parquet")
    assert pq.read_table(path)["id"].to_pylist() == [f"good-{row}" for row in range(GOOD)]


def test_bad_row_refuses_its_partition_without_the_setting(surge: Command) -> None:
    row = ROWS["null id"][0]
    (surge.root / "part=a.parquet").write_bytes(content("parquet", row, 0))
    source = f"{surge.root}/part={{part}}.parquet"

    error = surge.error("embed", source, "out", *MODEL, expected=1)

    assert "row 3: the id is null; every row needs one" in error
