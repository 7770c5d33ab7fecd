"""Rows of an old file by their values, ids or hashes of texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surge_dagster.engine.run import old_values
from surge_dagster.engine.run.old_values import NO_ROW, OldValues
from surge_dagster.engine.support.text_hash import text_hashes


def hashes(numbers: list[int]) -> pa.Array:
    return text_hashes(pa.array(map(str, numbers), pa.large_string()))


KINDS: dict[str, Any] = {
    "hash": hashes,
    "int64": lambda numbers: pa.array(numbers, pa.int64()),
    "string": lambda numbers: pa.array(map("id {}".format, numbers), pa.string()),
    "binary": lambda numbers: pa.array(map(b"%d".__mod__, numbers), pa.binary()),
}
NUMBERS = st.lists(st.integers(-3, 40), max_size=40)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("equal_keys", [False, True])
@given(old=NUMBERS, new=NUMBERS)
def test_lookup_finds_every_stored_value_and_no_other(
    kind: str, equal_keys: bool, old: list[int], new: list[int]
) -> None:
    """Also if different values have equal keys, as two of very many have."""
    with pytest.MonkeyPatch.context() as patch:
        if equal_keys:
            patch.setattr(old_values, "_keys", lambda values: np.zeros(len(values), np.int64))

        found = OldValues(KINDS[kind](old)).rows(KINDS[kind](new)).tolist()

    for number, row in zip(new, found, strict=True):
        if number in old:
            assert old[row] == number
        else:
            assert row == NO_ROW


def test_guessed_row_is_used_when_it_has_the_value() -> None:
    values = OldValues(hashes([5, 5, 5, 6]))
    likely = np.array([2, NO_ROW, 0, 1])
    assert values.rows(hashes([5, 5, 6, 5]), likely).tolist() == [2, 0, 3, 1]
