"""Blank texts of a model that has no token for them get a vector of zeros, which is published."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.store import open_store
from surge_dagster.engine.verify.verification import Verified, verify
from tests.engine.runs import SMALL, failures, finish, finish_receipts, in_memory, make_run
from tests.small_catalogs import DIMENSION, Rows, numbered_rows, partition_of

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def pool() -> Iterator[EncoderPool]:
    """A pool that gives empty texts, and `zero`, a vector of zeros; see `encoder/faults.py`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "encoder"))
        spec = EncodingSpec(f"hash://{DIMENSION}")
        with EncoderPool(spec, devices="cpu", backend="faults:FaultyBackend") as pool:
            pool.start()
            yield pool


@pytest.mark.parametrize("thresholds", [SMALL, Thresholds(b_min=5, b_max=5)], ids=str)
def test_empty_text_is_published_with_a_vector_of_zeros(
    pool: EncoderPool, tmp_path: Path, thresholds: Thresholds
) -> None:
    rows = numbered_rows("p", 12)
    rows[7] = (rows[7][0], "")
    [receipt] = finish_receipts(make_run(pool, in_memory({"p": rows}), tmp_path, thresholds))
    assert receipt.rows == 12
    source: Any = in_memory({"p": rows})
    [verified] = verify(source, open_store(tmp_path), pool.space)
    assert isinstance(verified, Verified)


def test_vector_of_zeros_is_reused(pool: EncoderPool, tmp_path: Path) -> None:
    rows = numbered_rows("p", 12)
    rows[7] = (rows[7][0], "")
    finish(make_run(pool, in_memory({"p": rows}), tmp_path))
    rows[0] = (rows[0][0], "changed")
    changed = [partition_of("p", rows, version="v2")]
    [receipt] = finish_receipts(make_run(pool, changed, tmp_path))
    assert receipt.rows_reused == 11


def test_vector_of_zeros_of_another_text_is_refused(pool: EncoderPool, tmp_path: Path) -> None:
    rows: Rows = [*numbered_rows("p", 3), ("4", "zero")]
    events: list[Any] = finish(make_run(pool, in_memory({"p": rows}), tmp_path))
    [failure] = failures(events)
    assert "row 3: its vector has length 0.0000" in failure.reason
