"""Columns of dictionary types: cut by the bytes of their values, and refused where an index is
none."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from surge_dagster.engine.sources.batching import small

_KINDS = [pa.string(), pa.large_string(), pa.string_view(), pa.binary()]


def batch_of(indices: list[int], values: pa.Array) -> pa.RecordBatch:
    column = pa.DictionaryArray.from_arrays(pa.array(indices, pa.int32()), values, safe=False)
    return pa.RecordBatch.from_arrays([column], ["text"])


@pytest.mark.parametrize("kind", _KINDS, ids=str)
def test_rows_with_short_values_of_a_large_dictionary_come_together(kind: pa.DataType) -> None:
    values = pa.array([f"{number:040}" for number in range(60_000)]).cast(kind)
    pieces = list(small(batch_of(list(range(60_000)), values)))
    assert sum(map(len, pieces)) == 60_000 and len(pieces) <= 16


@pytest.mark.parametrize("kind", _KINDS, ids=str)
def test_rows_that_share_a_long_value_are_cut(kind: pa.DataType) -> None:
    pieces = list(small(batch_of([0] * 64, pa.array(["x" * 1_000_000]).cast(kind))))
    assert sum(map(len, pieces)) == 64 and max(map(len, pieces)) <= 2


def test_index_beyond_the_dictionary_is_an_error_of_the_file() -> None:
    damaged = batch_of(np.where(np.arange(9_000) == 7, 99, 0).tolist(), pa.array(["a"]))
    with pytest.raises((pa.ArrowInvalid, pa.ArrowIndexError)):
        list(small(damaged))
