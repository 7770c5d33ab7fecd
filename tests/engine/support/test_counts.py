"""Tests of counts and of error texts in messages."""

from __future__ import annotations

import pyarrow as pa
import pytest

from surge_dagster.engine.support.counts import counted
from surge_dagster.engine.support.printable import first_line


@pytest.mark.parametrize(
    ("number", "noun", "expected"),
    [
        (0, "text", "0 texts"),
        (1, "partition", "1 partition"),
        (2_000, "SuperBatch", "2,000 SuperBatches"),
        (2, "query", "2 queries"),
    ],
)
def test_counted_noun_is_singular_for_one(number: int, noun: str, expected: str) -> None:
    assert counted(number, noun) == expected


def test_first_line_of_an_error_has_no_control_characters() -> None:
    assert (
        first_line(pa.ArrowInvalid("Either it is damaged or no file.\nmore"))
        == "Either it is damaged or no file"
    )
    assert first_line(pa.ArrowInvalid("column a\x1b[31m")) == "column a\\x1b[31m"
    assert first_line(OSError()) == "OSError"
