"""Runs on catalogs whose texts are put together from columns, or are missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.sources import Selection
from surge_dagster.engine.tables.opening import open_source
from tests.engine.runs import Output, finish, receipts
from tests.small_catalogs import (
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
    output: Output, products: Path
) -> None:
    expected = {"hats": [("h1", "Cap. 7")], "shoes": [("s1", "Boot. 99.5"), ("s2", ". 5")]}
    source = open_source(products, selection=TITLED)
    assert len(receipts(output.events(source), "encoded")) == 2
    output.check_all(expected)
    assert not output.violations(source, pool=output.pool, reencode=None)
    assert len(receipts(output.events(source), "fresh")) == 2
    other = open_source(products, selection=Selection("sku", "{title}, {price}"))
    assert len(receipts(output.events(other), "encoded")) == 2
    output.check("hats", [("h1", "Cap, 7")])


PRESENT = numbered_rows("some", 100)
SPARSE: list[tuple[str, Any]] = []
for present in PRESENT:
    SPARSE += [(f"{present[0]} a", None), (f"{present[0]} b", " "), present]
SKIP = Selection(missing_text="skip")


@pytest.fixture
def sparse(tmp_path: Path) -> Path:
    write_catalog(
        tmp_path / "catalog",
        {"all": SPARSE[::3][:9], "none": numbered_rows("none", 9), "some": SPARSE},
    )
    return tmp_path / "catalog"


def skipped_by_key(events: list[Any], action: str) -> dict[str, int]:
    return {receipt.key: receipt.skipped_rows for receipt in receipts(events, action)}


def test_skipped_rows_are_counted_and_all_others_are_embedded(output: Output, sparse: Path) -> None:
    # "some" is split: b_max is 100
    skipped = {"all": 9, "none": 0, "some": 200}
    run = output.run(open_source(sparse, selection=SKIP))
    assert skipped_by_key(finish(run), "encoded") == skipped
    assert run.report.skipped_rows == 209
    assert run.report.blank_texts == 0
    assert run.report.texts_encoded == 109
    assert not run.failed
    for key, rows in (("all", []), ("none", numbered_rows("none", 9)), ("some", PRESENT)):
        facts = output.check(key, rows)
        assert facts.skipped_rows == skipped[key]
    again = output.run(open_source(sparse, selection=SKIP))
    assert skipped_by_key(finish(again), "fresh") == skipped


def test_blank_texts_are_counted_without_any_rule(output: Output, tmp_path: Path) -> None:
    rows = [("1", ""), ("2", " "), ("3", "three")]
    write_catalog(tmp_path / "catalog", {"k": rows})
    run = output.run(open_source(tmp_path / "catalog", selection=Selection()))
    [receipt] = receipts(finish(run), "encoded")
    assert receipt.blank_texts == 2
    assert receipt.skipped_rows == 0
    assert run.report.blank_texts == 2
    assert output.check("k", rows).blank_texts == 2


def test_run_over_bad_rows_publishes_the_others(output: Output, tmp_path: Path) -> None:
    rows = numbered_rows("k", 250)
    bad = [*rows[:200], ("id of none", None), rows[7], *rows[200:], rows[249]]
    write_catalog(tmp_path / "catalog", {"k": bad})
    source = open_source(tmp_path / "catalog", bad_rows="set_aside")

    run = output.run(source)

    assert len(receipts(finish(run), "encoded")) == 1
    assert output.check("k", rows).source_rows == 253
    assert not output.violations(source, pool=output.pool, reencode=None)
    assert len(receipts(output.events(source), "fresh")) == 1


def test_rows_without_a_key_are_a_file_without_rows(output: Output, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("id,text,key\n1,one,k\n2,two,\n3\n")
    source = open_source(path, partition_by="key", bad_rows="set_aside")

    encoded = receipts(output.events(source), "encoded")

    assert sorted(receipt.key for receipt in encoded) == ["k", "unassigned"]
    assert output.check("unassigned", []).source_rows == 2
    assert not output.violations(source, pool=output.pool, reencode=None)
