"""Blank texts of a model that has no token for them get a vector of zeros, which is published."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.verify.verification import Verified, verify
from tests.engine.runs import (
    SMALL,
    Output,
    in_memory,
    receipts,
)
from tests.small_catalogs import DIMENSION, Rows, numbered_rows

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def zeros() -> Iterator[EncoderPool]:
    """A pool that gives empty texts, and `zero`, a vector of zeros; see `encoder/faults.py`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "encoder"))
        spec = EncodingSpec(f"hash://{DIMENSION}")
        with EncoderPool(spec, devices="cpu", backend="faults:FaultyBackend") as pool:
            pool.start()
            yield pool


@pytest.fixture
def output(zeros: EncoderPool, tmp_path: Path) -> Output:
    return Output(zeros, tmp_path)


def with_blank_text() -> Rows:
    return [*numbered_rows("p", 12), ("blank", "")]


@pytest.mark.parametrize("thresholds", [SMALL, Thresholds(b_min=5, b_max=5)], ids=str)
def test_empty_text_is_published_with_a_vector_of_zeros(
    output: Output, thresholds: Thresholds
) -> None:
    catalog = {"p": with_blank_text()}
    [receipt] = receipts(output.events(in_memory(catalog), thresholds))
    assert receipt.rows == 13
    source: Any = in_memory(catalog)
    assert list(verify(source, output.store, output.pool.space)) == [
        Verified("p", 13, source_rows=13)
    ]


def test_vector_of_zeros_is_reused(output: Output) -> None:
    rows = with_blank_text()
    output.embed(in_memory({"p": rows}))
    [receipt] = receipts(output.events(in_memory({"p": rows[1:]}, version="v2")))
    assert receipt.rows_reused == 12


def test_vector_of_zeros_of_another_text_is_refused(output: Output) -> None:
    failure = output.failure(in_memory({"p": [*numbered_rows("p", 3), ("4", "zero")]}))
    assert "row 3: its vector has length 0.0000" in failure.reason
