"""Runs on catalogs whose texts are put together from columns, or are missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.sources import Selection
from surge_dagster.engine.store import open_store
from surge_dagster.engine.tables.opening import open_source
from surge_dagster.engine.verify.verification import Violation, verify
from tests.engine.runs import finish, make_run, of_kind, receipts
from tests.small_catalogs import (
    assert_embedded,
    numbered_rows,
    partition_folder,
    write_catalog,
)

TITLED = Selection("sku", "{title}. {price}")


def write_products(root: Path, key: str, **columns: Any) -> Path:
    path = partition_folder(root, key) / "part-0.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return path


@pytest.fixture
def products(tmp_path: Path) -> Path:
    root = tmp_path / "catalog"
    write_products(root, "shoes", sku=["s1", "s2"], title=["Boot", None], price=[99.5, 5.0])
    write_products(root, "hats", sku=["h1"], title=["Cap"], price=[7])
    return root


def test_template_is_embedded_verified_and_fresh_until_it_changes(
    hash_pool: EncoderPool, products: Path, tmp_path: Path
) -> None:
    expected = {"hats": [("h1", "Cap. 7")], "shoes": [("s1", "Boot. 99.5"), ("s2", ". 5")]}
    run = make_run(hash_pool, open_source(products, selection=TITLED), tmp_path / "out")
    assert len(receipts(finish(run), "encoded")) == 2
    for key, rows in expected.items():
        assert_embedded(tmp_path / "out", run.space.name, key, rows)
    store = open_store(tmp_path / "out")
    found = verify(
        open_source(products, selection=TITLED), store, run.space, pool=hash_pool, reencode=None
    )
    assert not of_kind(found, Violation)
    again = make_run(hash_pool, open_source(products, selection=TITLED), tmp_path / "out")
    assert len(receipts(finish(again), "fresh")) == 2
    other = make_run(
        hash_pool,
        open_source(products, selection=Selection("sku", "{title}, {price}")),
        tmp_path / "out",
    )
    assert len(receipts(finish(other), "encoded")) == 2
    assert_embedded(tmp_path / "out", run.space.name, "hats", [("h1", "Cap, 7")])


SPARSE = [
    (f"id-{row}", None if row % 3 == 0 else " " if row % 3 == 1 else f"text {row}")
    for row in range(300)
]
PRESENT = [row for row in SPARSE if row[1] not in (None, " ")]
SKIP = Selection(missing_text="skip")


@pytest.fixture
def sparse(tmp_path: Path) -> Path:
    write_catalog(
        tmp_path / "catalog",
        {"all": SPARSE[::3][:9], "none": numbered_rows("none", 9), "some": SPARSE},
    )
    return tmp_path / "catalog"


def test_skipped_rows_are_counted_and_all_others_are_embedded(
    hash_pool: EncoderPool, sparse: Path, tmp_path: Path
) -> None:
    # "some" is split: b_max is 100
    run = make_run(hash_pool, open_source(sparse, selection=SKIP), tmp_path / "out")
    skipped = {receipt.key: receipt.skipped_rows for receipt in receipts(finish(run), "encoded")}
    assert skipped == {"all": 9, "none": 0, "some": 200}
    assert run.report.skipped_rows == 209
    assert run.report.blank_texts == 0
    assert run.report.texts_encoded == 109
    assert not run.failed
    for key, rows in (("all", []), ("none", numbered_rows("none", 9)), ("some", PRESENT)):
        facts = assert_embedded(tmp_path / "out", run.space.name, key, rows)
        assert facts.skipped_rows == skipped[key]
    again = make_run(hash_pool, open_source(sparse, selection=SKIP), tmp_path / "out")
    assert {each.key: each.skipped_rows for each in receipts(finish(again), "fresh")} == skipped


def test_blank_texts_are_counted_without_any_rule(hash_pool: EncoderPool, tmp_path: Path) -> None:
    rows = [("1", ""), ("2", " "), ("3", "three")]
    write_catalog(tmp_path / "catalog", {"k": rows})
    run = make_run(
        hash_pool, open_source(tmp_path / "catalog", selection=Selection()), tmp_path / "out"
    )
    [receipt] = receipts(finish(run), "encoded")
    assert receipt.blank_texts == 2
    assert receipt.skipped_rows == 0
    assert run.report.blank_texts == 2
    assert assert_embedded(tmp_path / "out", run.space.name, "k", rows).blank_texts == 2
