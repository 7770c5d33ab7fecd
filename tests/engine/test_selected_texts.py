"""Runs on catalogs whose texts are put together from columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.sources import Selection, Source, open_source
from surge_dagster.engine.store import open_store
from surge_dagster.engine.verify import Violation, verify
from tests.engine.runs import failures, finish, make_run, receipts
from tests.small_catalogs import assert_embedded, partition_folder

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


def catalog_of(root: Path, selection: Selection) -> Source:
    return open_source(root, selection=selection)


def test_template_is_embedded_verified_and_fresh_until_it_changes(
    hash_pool: EncoderPool, products: Path, tmp_path: Path
) -> None:
    expected = {"hats": [("h1", "Cap. 7")], "shoes": [("s1", "Boot. 99.5"), ("s2", ". 5")]}
    run = make_run(hash_pool, catalog_of(products, TITLED), tmp_path / "out")
    assert len(receipts(finish(run), "encoded")) == 2
    for key, rows in expected.items():
        assert_embedded(tmp_path / "out", run.space.name, key, rows)
    store = open_store(tmp_path / "out")
    found = list(verify(catalog_of(products, TITLED), store, run.space, pool=hash_pool, reencode=None))
    assert not [each for each in found if isinstance(each, Violation)]
    again = make_run(hash_pool, catalog_of(products, TITLED), tmp_path / "out")
    assert len(receipts(finish(again), "fresh")) == 2
    other = make_run(hash_pool, catalog_of(products, Selection("sku", "{title}, {price}")), tmp_path / "out")
    assert len(receipts(finish(other), "encoded")) == 2
    assert_embedded(tmp_path / "out", run.space.name, "hats", [("h1", "Cap, 7")])


def test_partition_without_a_named_column_is_refused_and_the_others_go_on(
    hash_pool: EncoderPool, products: Path, tmp_path: Path
) -> None:
    write_products(products, "socks", sku=["k1"], title=["Long"])
    events = finish(make_run(hash_pool, catalog_of(products, TITLED), tmp_path / "out"))
    [failure] = failures(events)
    assert failure.key == "socks"
    assert "part-0.parquet has no column 'price'; its columns are 'sku', 'title'. Name the right ones" in failure.reason
    assert len(receipts(events, "encoded")) == 2
