"""Tables that follow the embeddings as assets, and the change feed as the input of an asset."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest

from surge_dagster import Changes, EmbeddingCatalog, changes
from surge_dagster.config.settings import load_settings
from surge_dagster.consumers.lance import LanceTable
from surge_dagster.orchestration.heartbeats import HEARTBEAT_TAG
from surge_dagster.orchestration.launch import config_of
from tests.dagster.conftest import NAMES, Ran, Workbench, values_of
from tests.dagster.test_current_space import switch_elsewhere
from tests.small_catalogs import write_partition

CHECK = "table_matches_files"


def hand_over(bench: Workbench) -> Ran:
    return bench.run(NAMES.hand_over_job)


@pytest.fixture
def table(bench: Workbench) -> LanceTable:
    pytest.importorskip("lancedb", reason="not installed: the extra 'lancedb'")
    uri = str(bench.root / "lance")
    bench.settings["lancedb"] = {"uri": uri, "table": "products"}
    return LanceTable(uri, "products")


def test_table_follows_the_embeddings_and_is_compared_with_the_files(
    bench: Workbench, table: LanceTable
) -> None:
    bench.fill(("a", "b, 50%"), 3)

    assert bench.refresh().success

    ran = hand_over(bench)
    assert ran.success
    assert table.counts() == {"a": 3, "b, 50%": 3}

    check = ran.checks()[CHECK]
    assert check.passed
    assert check.description == "6 rows, 6 expected; a sample of 6 vectors compared"

    metadata = values_of(ran.materialized(NAMES.lancedb)[None])
    assert metadata["rows_sent"] == 6
    assert metadata["partitions"] == 2


def test_comparison_of_all_vectors_is_requested_in_the_run_config(
    bench: Workbench, table: LanceTable
) -> None:
    bench.fill("ab", 3)

    assert bench.refresh().success

    config = config_of("lancedb", {"compare_everything": True})

    check = bench.run(NAMES.hand_over_job, config).checks()[CHECK]

    assert check.passed
    assert check.description == "6 rows, 6 expected; all 6 vectors compared"


def test_recall_of_an_index_is_measured_at_the_first_load_and_on_request(
    bench: Workbench, table: LanceTable
) -> None:
    bench.settings["lancedb"] = bench.settings["lancedb"] | {"index": "hnsw"}
    bench.fill("ab", 20)
    assert bench.refresh().success
    on_request = config_of("lancedb", {"compare_everything": True})

    recalls: list[Any] = []
    for config in ({}, {}, on_request):
        ran = bench.run(NAMES.hand_over_job, config)
        metadata = values_of(ran.materialized(NAMES.lancedb)[None])
        recalls.append(metadata.get("index_recall_at_10"))

    first, later, requested = recalls
    assert first == pytest.approx(1, abs=0.05)
    assert later is None
    assert requested == first


def test_partition_that_cannot_be_handed_over_fails_the_run_by_name(
    bench: Workbench, table: LanceTable
) -> None:
    bench.fill("ab", 3)

    assert bench.refresh().success

    bench.file("a").write_bytes(b"x")

    ran = hand_over(bench)

    assert not ran.success
    assert "1 partition could not be handed over" in ran.failure()
    assert "'a'" in ran.failure()

    check = ran.checks()[CHECK]
    assert not check.passed
    assert "1 partition not judged, because not handed over" in str(check.description)
    assert table.counts() == {"b": 3}


def test_alert_of_a_column_of_another_type_has_one_count_and_a_remedy(
    bench: Workbench, table: LanceTable
) -> None:
    bench.fill("a", 3)
    write_partition(bench.catalog, "b", [(1, "numbers as ids")], id_type=pa.int64())  # pyright: ignore[reportArgumentType]
    assert bench.refresh().success

    failure = hand_over(bench).failure()

    assert failure.count("partition could not be handed over") == 1
    assert "its column 'id' is of type int64 and of type string" in failure
    assert "drop that table: the next hand-over makes it again" in failure
    assert "schema" not in failure


@dataclass
class HandOvers:
    """The sensor of tables, and the tags of what it requested last."""

    bench: Workbench
    tags: dict[str, str] = field(default_factory=dict)

    def attempts(self) -> list[str]:
        requests = self.bench.tick(NAMES.hand_over_sensor).run_requests
        for request in requests:
            self.tags = dict(request.tags)
        return [request.tags["surge/attempt"] for request in requests]

    def begin(self) -> dg.DagsterRun:
        started = dg.DagsterRunStatus.STARTED
        return self.bench.pretend_run(NAMES.hand_over_job, started, tags=self.tags)


@pytest.fixture
def hand_overs(bench: Workbench, table: LanceTable) -> HandOvers:
    """A catalog with a table; nothing is embedded."""
    bench.write("a", 3)
    return HandOvers(bench)


def test_hand_over_is_requested_once_nothing_embeds_any_more(
    bench: Workbench, hand_overs: HandOvers
) -> None:
    assert hand_overs.attempts() == [], "nothing is embedded"

    embedding = bench.pretend_run(NAMES.refresh_job, dg.DagsterRunStatus.STARTED)
    assert bench.refresh().success
    assert hand_overs.attempts() == [], "another run embeds"

    bench.instance.report_run_failed(embedding)
    assert hand_overs.attempts() == ["1"]

    hand_overs.begin()
    assert hand_overs.attempts() == [], "it is active"


def test_hand_over_is_requested_after_a_switch_and_brings_the_new_vectors(
    bench: Workbench, hand_overs: HandOvers, table: LanceTable
) -> None:
    assert bench.refresh().success
    assert hand_overs.attempts() == ["1"]
    assert bench.run(NAMES.hand_over_job, tags=hand_overs.tags).success

    bench.settings["model"] = "hash://24"
    assert bench.refresh().success
    assert hand_overs.attempts() == [], "readers stay with the old space"

    switch_elsewhere(bench)
    assert hand_overs.attempts() == ["1"]

    ran = bench.run(NAMES.hand_over_job, tags=hand_overs.tags)
    assert ran.checks()[CHECK].passed
    [vector] = table.vectors("a", ["id-0"]).values()
    assert len(vector) == 24


def test_hand_over_is_requested_for_another_table(bench: Workbench, hand_overs: HandOvers) -> None:
    assert bench.refresh().success
    assert hand_overs.attempts() == ["1"]
    assert bench.run(NAMES.hand_over_job, tags=hand_overs.tags).success
    assert hand_overs.attempts() == []

    bench.settings["lancedb"] = bench.settings["lancedb"] | {"table": "goods"}
    assert hand_overs.attempts() == ["1"]


def test_hand_over_that_an_operator_canceled_is_not_requested_again(
    bench: Workbench, hand_overs: HandOvers
) -> None:
    assert bench.refresh().success
    assert hand_overs.attempts() == ["1"]

    bench.instance.report_run_canceled(hand_overs.begin())

    bench.ahead += timedelta(days=2)

    assert hand_overs.attempts() == []


def test_hand_over_has_a_heartbeat(bench: Workbench, table: LanceTable) -> None:
    bench.write("a")

    assert bench.refresh().success

    assert HEARTBEAT_TAG in hand_over(bench).run.tags


def test_asset_gets_the_changes_that_it_has_not_confirmed(bench: Workbench) -> None:
    came: list[str] = []
    confirms = iter([False, True, True])
    feed = dg.AssetIn(NAMES.embeddings, input_manager_key=NAMES.changes_resource)

    @dg.asset(ins={"changes": feed})
    def search_index(changes: Changes) -> None:
        for partition in changes:
            for batch in partition:
                came.extend(row["op"] for row in batch.to_pylist())
        if next(confirms):
            changes.confirm()

    assert "holds no embeddings" in bench.run_downstream(search_index).failure()

    bench.write("a", 2)
    assert bench.refresh().success

    for _ in range(3):
        assert bench.run_downstream(search_index).success

    assert came == ["clear", "put", "put"] * 2
    assert list(changes(bench.output, "search_index")) == []


def test_one_key_of_a_component_adds_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PG_DSN", "postgresql://a:hunter2@b/c")

    made = EmbeddingCatalog.from_attributes_dict(
        attributes={
            "name": "shop",
            "source": "c",
            "output": "o",
            "lancedb": {"uri": "data/lance-of-shop"},
            "pgvector": {"dsn": "{{ env.PG_DSN }}", "table": "products"},
            "qdrant": {"uri": "http://127.0.0.1:6333", "api_key": "{{ env.PG_DSN }}"},
        }
    )

    assert made.settings.pgvector
    assert made.settings.pgvector.dsn.get_secret_value() == "postgresql://a:hunter2@b/c"

    definitions = made.build_defs(dg.ComponentTree.for_test().load_context)
    keys = definitions.resolve_asset_graph().get_all_asset_keys()

    assert dg.AssetKey(["shop", "lancedb"]) in keys
    assert dg.AssetKey(["shop", "pgvector"]) in keys
    assert dg.AssetKey(["shop", "qdrant"]) in keys
    assert "hunter2" not in repr(made)

    in_python = load_settings(pgvector={"dsn": dg.EnvVar("PG_DSN")}).pgvector
    assert in_python
    assert in_python.dsn.get_secret_value() == "postgresql://a:hunter2@b/c"
