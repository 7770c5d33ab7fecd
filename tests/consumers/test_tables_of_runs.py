"""Tables follow what runs write: columns that are carried, also from a later run on, and outputs in
buckets."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from surge_dagster.consumers.comparison import compare
from surge_dagster.consumers.lance import LanceTable
from surge_dagster.consumers.target import HandOver, Target
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.feed.changes import changes
from surge_dagster.engine.run.change_feed import ChangeFeed
from surge_dagster.engine.sources import Selection
from surge_dagster.engine.store import open_store
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.tables.frames import FrameCatalog
from tests.consumers.tables import table_of
from tests.engine.runs import finish_receipts, make_run
from tests.engine.store.object_server import ObjectServer
from tests.engine.store.test_object_store import open_store_of

ROWS = pa.table(
    {
        "id": ["1", "2", "3"],
        "text": ["one", "two", "three"],
        "sku": ["a", "b", None],
        "price": [1, 2, 3],
    }
)


def follow(
    pool: EncoderPool, store: Store, target: Target, rows: pa.Table, *carried: str
) -> HandOver:
    """Embed a partition with some of its columns, and hand it over."""
    version = f"{rows.to_pydict()} {carried}"
    source = FrameCatalog({"k": rows}, Selection(carried=carried), versions={"k": version})
    assert finish_receipts(make_run(pool, source, store, change_feed=ChangeFeed()), "encoded")
    return hand_over(store, target)


def hand_over(store: Store, target: Target) -> HandOver:
    """Hand over what is new, and compare the table with the files."""
    done = target.apply(partial(changes, store, "shop"))
    assert done.failures == {}
    assert compare(done.feed, target).wrong == {}
    return done


def found(target: Target, *columns: str) -> list[tuple[Any, ...]]:
    """Some columns of a table, sorted."""
    return sorted(table_of(target).rows(*columns))


def test_carried_columns_reach_the_table_also_from_a_later_run_on(
    hash_pool: EncoderPool, tmp_path: Path, target: Target
) -> None:
    embed = partial(follow, hash_pool, open_store(tmp_path / "out"), target)
    embed(ROWS, "sku")
    assert found(target, "id", "sku") == [("1", "a"), ("2", "b"), ("3", None)]
    embed(ROWS, "sku", "price")
    assert found(target, "id", "sku", "price") == [("1", "a", 1), ("2", "b", 2), ("3", None, 3)]
    dearer = ROWS.set_column(3, "price", pa.array([1, 20, 3]))
    assert embed(dearer, "sku", "price").rows_sent == 1
    assert found(target, "id", "price") == [("1", 1), ("2", 20), ("3", 3)]
    embed(dearer, "price")
    assert found(target, "id", "sku", "price") == [("1", None, 1), ("2", None, 20), ("3", None, 3)]


def test_column_with_a_dot_in_its_name_is_refused_by_lancedb(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    pytest.importorskip("lancedb", reason="not installed: the extra 'lancedb'")
    rows = ROWS.rename_columns(["id", "text", "sku", "price.eur"])
    table = LanceTable(str(tmp_path / "lance"), "products")

    with pytest.raises(ConfigError, match=r"'price\.eur' has a dot in its name"):
        follow(hash_pool, open_store(tmp_path / "out"), table, rows, "price.eur")


def test_table_follows_an_output_in_a_bucket(
    hash_pool: EncoderPool, tmp_path: Path, object_server: ObjectServer
) -> None:
    pytest.importorskip("lancedb", reason="not installed: the extra 'lancedb'")
    embed = partial(
        follow,
        hash_pool,
        open_store_of(object_server),
        LanceTable(str(tmp_path / "lance"), "products"),
    )
    assert embed(ROWS).rows_sent == 3
    edited = pa.table({"id": ["1", "3", "4"], "text": ["one", "edited", "four"]})
    done = embed(edited)
    assert done.rows_sent == 2
    assert done.rows_deleted == 1
    assert done.commits == 2
    assert found(LanceTable(str(tmp_path / "lance"), "products"), "id", "text") == [
        ("1", "one"),
        ("3", "edited"),
        ("4", "four"),
    ]


def test_files_that_carry_different_columns_reach_a_table_in_one_hand_over(
    hash_pool: EncoderPool, tmp_path: Path, target: Target
) -> None:
    store = open_store(tmp_path / "out")

    def embed(key: str, *carried: str) -> None:
        source = FrameCatalog({key: ROWS}, Selection(carried=carried), versions={key: f"{carried}"})
        assert finish_receipts(
            make_run(hash_pool, source, store, change_feed=ChangeFeed()), "encoded"
        )

    def look() -> list[tuple[object, ...]]:
        hand_over(store, target)
        return found(target, "partition", "id", "sku", "price")

    embed("a", "sku")
    embed("b", "price")
    skus = [("a", "1", "a", None), ("a", "2", "b", None), ("a", "3", None, None)]
    assert look() == [*skus, ("b", "1", None, 1), ("b", "2", None, 2), ("b", "3", None, 3)]
    embed("b")
    embed("c", "price", "sku")
    bare = [("b", "1", None, None), ("b", "2", None, None), ("b", "3", None, None)]
    assert look() == [*skus, *bare, ("c", "1", "a", 1), ("c", "2", "b", 2), ("c", "3", None, 3)]
