"""Indexes of the vectors, and how many of the nearest rows they find."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surge_dagster.consumers import lance as lancedb
from surge_dagster.consumers import postgres
from surge_dagster.consumers.comparison import apply_and_compare, index_recall
from surge_dagster.consumers.lance import Index, LanceTable
from surge_dagster.consumers.postgres import PgVectorTable
from surge_dagster.consumers.target import Distance, OpenFeed, Target
from surge_dagster.engine.compare.recall import Found
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.feed.changes import changes
from tests.consumers.scripts import TEXTS, Follower
from tests.consumers.tables import table_of
from tests.consumers.test_targets import load
from tests.engine.feeds import DIMENSION, Output

ROWS = 600


def filled(root: Path) -> Output:
    """An output with two partitions of many rows."""
    output = Output(root)
    for key in "ab":
        output.write(key, {f"{key}-{row}": f"text {row} of {key}" for row in range(ROWS // 2)})
    return output


class Remembering(LanceTable):
    """A table that keeps the queries and results of all searches."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.searches: list[tuple[np.ndarray, list[Found]]] = []

    def nearest(self, queries: np.ndarray, k: int) -> list[Found]:
        found = super().nearest(queries, k)
        self.searches.append((queries, found))
        return found


@pytest.fixture
def lance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for LanceDB, whose tables get an index from 300 rows on."""
    pytest.importorskip("lancedb", reason="not installed: the extra 'lancedb'")
    monkeypatch.setattr(lancedb, "_INDEXED_ROWS", 300)
    return tmp_path / "lance"


def indexes_of(target: LanceTable) -> list[Any]:
    """Statistics of the indexes of the vectors."""
    table = target._open()
    assert table is not None
    indexes = table.list_indices()
    return [table.index_stats(each.name) for each in indexes if each.columns == ["embedding"]]


def stats_of(target: LanceTable) -> tuple[str, str, int]:
    """Type, distance and number of rows of the index."""
    [stats] = indexes_of(target)
    return stats.index_type, stats.distance_type, stats.num_indexed_rows


def break_searches(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each search for the nearest rows fail, and nothing else."""
    if isinstance(target, LanceTable):
        target.index_distance = "cosine"  # as if it had an index
        monkeypatch.setitem(lancedb._DISTANCES, "cosine", "unknown")  # pyright: ignore[reportArgumentType]
    elif isinstance(target, PgVectorTable):
        monkeypatch.setitem(postgres._OPERATORS, "cosine", "<unknown>")
    else:
        from qdrant_client import QdrantClient
        from qdrant_client.http.exceptions import ResponseHandlingException

        def time_out(*_: object, **__: object) -> None:
            raise ResponseHandlingException(TimeoutError("timed out"))

        monkeypatch.setattr(QdrantClient, "query_points", time_out)


@pytest.fixture
def open_feed(tmp_path: Path) -> OpenFeed:
    """The feed of an output with `TEXTS`."""
    output = Output(tmp_path / "out")
    output.write("a", TEXTS)
    return partial(changes, output.store, "shop")


def test_hand_over_stands_if_its_recall_cannot_be_measured(
    open_feed: OpenFeed, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_searches(target, monkeypatch)

    done, compared = apply_and_compare(target, open_feed, everything=False)

    assert done.rows_sent == len(TEXTS)
    assert compared.index_recall is None
    assert target.apply(open_feed).rows_sent == 0


def test_hand_over_that_ends_while_recall_is_measured_is_confirmed(
    open_feed: OpenFeed, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    target.index_distance = "cosine"

    def end(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(type(target), "nearest", end)
    with pytest.raises(KeyboardInterrupt):
        apply_and_compare(target, open_feed, everything=False)

    assert target.apply(open_feed).rows_sent == 0


def test_search_of_a_small_table_finds_the_nearest_rows(tmp_path: Path, target: Target) -> None:
    output = Output(tmp_path / "out", "float16")
    output.write("a", {str(row): f"text {row}" for row in range(100)})

    feed = Follower(output, target).hand_over().feed

    if isinstance(target, LanceTable):
        assert index_recall(feed, target) is None, "it has no index"
        target.index_distance = "cosine"  # as if it had one; the search reads all rows
    assert index_recall(feed, target) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(
    ("index", "distance", "stats"),
    [
        ("ivf_pq", "cosine", ("IVF_PQ", "cosine", ROWS)),
        ("hnsw", "l2", ("IVF_HNSW_SQ", "l2", ROWS)),
        ("hnsw", "ip", ("IVF_HNSW_SQ", "dot", ROWS)),
    ],
)
def test_index_of_lancedb_has_all_rows(
    tmp_path: Path, lance: Path, index: Index, distance: Distance, stats: tuple[str, str, int]
) -> None:
    target = LanceTable(str(lance), "products", index=index, distance=distance)

    Follower(filled(tmp_path / "out"), target).hand_over()

    assert stats_of(target) == stats


def test_index_of_lancedb_follows_later_changes(tmp_path: Path, lance: Path) -> None:
    target = LanceTable(str(lance), "products", index="ivf_pq")
    follower = Follower(filled(tmp_path / "out"), target)
    follower.hand_over()
    follower.output.write("c", TEXTS)

    follower.hand_over()

    assert stats_of(target) == ("IVF_PQ", "cosine", ROWS + len(TEXTS))


def test_index_of_lancedb_is_built_for_another_setting(tmp_path: Path, lance: Path) -> None:
    follower = Follower(filled(tmp_path / "out"), LanceTable(str(lance), "products"))
    follower.hand_over()
    other = LanceTable(str(lance), "products", index="hnsw", distance="l2")

    Follower(follower.output, other).hand_over()

    assert stats_of(other) == ("IVF_HNSW_SQ", "l2", ROWS)


def test_index_of_lancedb_is_dropped_without_a_setting(tmp_path: Path, lance: Path) -> None:
    target = LanceTable(str(lance), "products", index="hnsw")
    follower = Follower(filled(tmp_path / "out"), target)
    follower.hand_over()

    replace(follower, target=LanceTable(str(lance), "products")).hand_over()

    assert indexes_of(target) == []


def test_few_rows_of_lancedb_have_no_index(tmp_path: Path, lance: Path) -> None:
    target = LanceTable(str(lance), "products", index="hnsw")

    load(Follower(Output(tmp_path / "out"), target), "a")

    assert indexes_of(target) == []


def test_ivf_pq_of_dimensions_that_lancedb_does_not_divide_is_refused(
    tmp_path: Path, lance: Path
) -> None:
    space = replace(Output(tmp_path / "out").space, dimension=100)

    with pytest.raises(ConfigError, match=r"has 100 dimensions.*a multiple of 8\. Set index to"):
        LanceTable(str(lance), index="ivf_pq")._require_indexable(space)


def test_index_of_bytes_is_refused(tmp_path: Path, lance: Path) -> None:
    output = filled(tmp_path / "out")
    bits = output.space.derive("binary")

    with pytest.raises(ConfigError, match="LanceDB indexes float32 and float16"):
        LanceTable(str(lance), index="hnsw")._require_indexable(bits)


def test_recall_of_an_index_equals_an_independent_computation(tmp_path: Path, lance: Path) -> None:
    target = Remembering(str(lance), "products", index="ivf_pq")
    feed = Follower(filled(tmp_path / "out"), target).hand_over().feed

    measured = index_recall(feed, target)

    rows = table_of(target).rows("partition", "id", "embedding")
    places: dict[Hashable, int] = {row[:2]: place for place, row in enumerate(rows)}
    vectors = np.array([vector for _, _, vector in rows], np.float64)
    assert vectors.shape == (ROWS, DIMENSION)
    shares: list[float] = []
    for query, found in zip(*target.searches[0], strict=True):
        cosines = vectors @ query
        own, *_, last = np.argsort(-cosines, kind="stable")[:11]
        others = [places[name] for name, _ in found if places[name] != own][:10]
        # A row that is as near as the tenth one counts as found; the training is not repeatable.
        shares.append(np.count_nonzero(cosines[others] > cosines[last] - 1e-5) / 10)
    assert measured == pytest.approx(np.mean(shares), abs=1e-6)
    assert len(shares) == 200
    assert 0.1 < float(np.mean(shares)) < 0.999


def test_recall_is_not_measured_for_vectors_of_other_lengths_and_distances(
    tmp_path: Path, lance: Path
) -> None:
    output = filled(tmp_path / "out")
    target = LanceTable(str(lance), "products", index="hnsw", distance="ip")
    feed = Follower(output, target).hand_over().feed
    feed.space = replace(feed.space, normalize=False)

    assert index_recall(feed, target) is None


def test_recall_is_not_measured_of_files_that_cannot_be_read(tmp_path: Path, lance: Path) -> None:
    output = filled(tmp_path / "out")
    target = LanceTable(str(lance), "products", index="hnsw")
    feed = Follower(output, target).hand_over().feed
    (output.store.root / output.name("a")).write_bytes(b"x")

    assert index_recall(feed, target) is None
