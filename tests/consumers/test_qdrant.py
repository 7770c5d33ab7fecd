"""What is special about the collection in Qdrant."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest

from surge_dagster.consumers import qdrant
from surge_dagster.consumers.comparison import index_recall
from surge_dagster.consumers.qdrant import QdrantTable
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError, TransientError
from surge_dagster.engine.feed.changes import changes
from surge_dagster.engine.sources import Selection
from surge_dagster.engine.store import open_store
from surge_dagster.engine.tables.frames import FrameCatalog
from tests.consumers.scripts import TEXTS, Follower, follow_a_script
from tests.consumers.tables import table_of
from tests.consumers.test_targets import fill_another_space, load
from tests.engine.feeds import Output
from tests.engine.runs import finish_receipts, make_run

if TYPE_CHECKING:
    from tests.consumers.qdrant_server import QdrantServer

API_KEY = "hunter2"


@pytest.fixture(autouse=True)
def installed() -> None:
    pytest.importorskip("qdrant_client", reason="not installed: the extra 'qdrant'")


@pytest.fixture
def follower(tmp_path: Path) -> Follower:
    return Follower(Output(tmp_path / "out"), QdrantTable(str(tmp_path / "qdrant"), "products"))


@pytest.fixture
def server() -> Iterator[QdrantServer]:
    from tests.consumers.qdrant_server import qdrant_server

    with qdrant_server(API_KEY) as made:
        yield made


def test_collection_of_a_server_follows_the_files(tmp_path: Path, server: QdrantServer) -> None:
    target = QdrantTable(server.url, "products", api_key=API_KEY)

    follow_a_script(Follower(Output(tmp_path / "out"), target))


def test_server_that_keeps_no_metadata_is_refused_each_time(
    tmp_path: Path, server: QdrantServer
) -> None:
    server.keeps_metadata = False
    target = QdrantTable(server.url, "products", api_key=API_KEY)
    follower = Follower(Output(tmp_path / "out"), target)
    follower.output.write("a", TEXTS)

    for _ in range(2):
        with pytest.raises(ConfigError, match=r"is older than Qdrant 1\.16\. Update it"):
            follower.hand_over()


def test_table_named_like_the_collection_of_another_one_follows(follower: Follower) -> None:
    load(follower, "a")
    assert isinstance(follower.target, QdrantTable)
    other = QdrantTable(follower.target._uri, "products-1")

    second = replace(follower, target=other, consumer="toys")

    assert load(second, "a").failures == {}
    second.assert_equal()


def test_recall_of_a_server_is_measured(tmp_path: Path, server: QdrantServer) -> None:
    target = QdrantTable(server.url, "products", api_key=API_KEY)
    done = load(Follower(Output(tmp_path / "out"), target), "a", "b")

    assert index_recall(done.feed, target) == 1


def test_request_of_a_server_has_less_than_it_takes(tmp_path: Path, server: QdrantServer) -> None:
    target = QdrantTable(server.url, "products", api_key=API_KEY)
    follower = Follower(Output(tmp_path / "out"), target)
    follower.output.write("a", {f"id-{row}": '"' * 15_000 for row in range(400)})

    assert follower.hand_over().rows_sent == 400


def test_api_key_that_a_server_refuses_is_not_shown(tmp_path: Path, server: QdrantServer) -> None:
    target = QdrantTable(server.url, "products", api_key="a wrong secret")

    with pytest.raises(ConfigError, match=r"refuses the api_key \(401\)") as refused:
        target.counts()

    assert "a wrong secret" not in str(refused.value)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_server_that_answers_with_an_error_can_be_tried_again(
    server: QdrantServer, status: int
) -> None:
    server.status = status

    with pytest.raises(TransientError, match=r"'products' of http.* cannot be used: .*Run again"):
        QdrantTable(server.url, "products", api_key=API_KEY).counts()


def test_server_that_does_not_answer_can_be_tried_again() -> None:
    with pytest.raises(TransientError, match=r"cannot be used: .*Run again"):
        QdrantTable("http://127.0.0.1:1").counts()


def test_readers_see_the_old_rows_until_another_space_is_loaded(
    follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(follower, "a", "b")
    before = table_of(follower.target).rows("partition", "id", "text")
    fill_another_space(follower.output)
    second = replace(follower, space=follower.output.space.name)

    def fail(*_: object) -> int:
        raise RuntimeError("it ends here")

    with monkeypatch.context() as patched:
        patched.setattr(qdrant, "_put", fail)
        with pytest.raises(RuntimeError, match="it ends here"):
            second.hand_over()

    assert table_of(follower.target).rows("partition", "id", "text") == before
    second.hand_over()
    second.assert_equal()


def test_collection_of_another_distance_is_loaded_again(follower: Follower) -> None:
    load(follower, "a")
    assert isinstance(follower.target, QdrantTable)
    other = QdrantTable(follower.target._uri, "products", distance="l2")

    assert replace(follower, target=other).hand_over().rows_sent == 10
    follower.assert_equal()


def test_cosine_of_vectors_that_qdrant_would_change_is_refused(follower: Follower) -> None:
    assert isinstance(follower.target, QdrantTable)
    space = replace(follower.output.space, normalize=False)

    with pytest.raises(ConfigError, match="are not of length 1, and Qdrant would change them"):
        follower.target._vectors_of(space)


def test_collection_of_another_program_is_not_replaced(follower: Follower) -> None:
    assert isinstance(follower.target, QdrantTable)
    with follower.target._connected() as client:
        client.create_collection("products~1")
    follower.output.write("a", TEXTS)

    with pytest.raises(ConfigError, match="'products~1' has rows that no hand-over put there"):
        follower.hand_over()


def test_carried_values_become_values_of_json(hash_pool: EncoderPool, tmp_path: Path) -> None:
    rows = pa.table(
        {
            "id": pa.array([b"\xff", b"\x00"]),
            "text": ["one", "two"],
            "added": [date(2026, 11, 29), None],
            "hash": [b"", b"\xfe"],
        }
    )
    store = open_store(tmp_path / "out")
    source = FrameCatalog({"k": rows}, Selection(carried=("added", "hash")), versions={"k": "1"})
    assert finish_receipts(make_run(hash_pool, source, store), "encoded")
    target = QdrantTable(str(tmp_path / "qdrant"), "products")

    target.apply(partial(changes, store, "shop"))

    found = table_of(target).rows("id", "added", "hash")
    assert sorted(found) == [("00", None, "fe"), ("ff", "2026-11-29", "")]
    assert target.vectors("k", [b"\xff", b"\xfe"]).keys() == {b"\xff"}


def test_value_that_json_does_not_have_refuses_its_partition_by_row(
    hash_pool: EncoderPool, tmp_path: Path
) -> None:
    rows = pa.table({"id": ["1", "2"], "text": ["one", "two"], "price": [1.5, float("nan")]})
    store = open_store(tmp_path / "out")
    source = FrameCatalog({"k": rows}, Selection(carried=("price",)), versions={"k": "1"})
    assert finish_receipts(make_run(hash_pool, source, store), "encoded")

    done = QdrantTable(str(tmp_path / "qdrant")).apply(partial(changes, store, "shop"))

    assert "the column 'price' of the row '2' is nan" in str(done.failures["k"])
