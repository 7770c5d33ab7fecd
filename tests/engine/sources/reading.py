"""Helpers of the tests of catalogs: one partition, its rows, and the error that refuses it."""

from __future__ import annotations

from typing import Any

import pytest

from surge_dagster.engine.errors import DataError
from surge_dagster.engine.sources.partition import Partition, Source

ROWS = [("1", "one"), ("2", "zwei ß"), ("3", "")]


def only(catalog: Source) -> Partition:
    [partition] = list(catalog)
    return partition


def rows_of(partition: Partition) -> list[tuple[Any, Any]]:
    return [
        row
        for batch in partition.read()
        for row in zip(batch.ids.to_pylist(), batch.texts.to_pylist(), strict=True)
    ]


def refusal(partition: Partition) -> DataError:
    with pytest.raises(DataError) as refused:
        for _ in partition.read():
            pass
    assert refused.value.key == partition.key
    assert refused.value.remedy.endswith((".", ")."))
    return refused.value
