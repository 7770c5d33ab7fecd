"""Runs in Dagster with an encoder behind HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random

import dagster as dg
import pytest

from surge_dagster.orchestration.launch import RETRY_TAG
from tests.dagster.conftest import NAMES, Ran, Workbench, values_of
from tests.engine.chunks.documents import prose
from tests.engine.endpoint.fault_server import MODEL, FaultServer, fault_server
from tests.small_catalogs import assert_embedded, numbered_rows

KEY_VARIABLE = "OUR_ENCODER_KEY"


@pytest.fixture
def server(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultServer]:
    """The server that encodes for `bench`, with a key."""
    monkeypatch.setenv(KEY_VARIABLE, "open sesame")
    with fault_server(key="open sesame") as running:
        bench.settings |= {
            "model": MODEL,
            "encoder_url": running.url,
            "encoder_api_key_env": KEY_VARIABLE,
            "encoder_patience": 2,
        }
        yield running


def _failure_of(ran: Ran) -> str:
    records = ran.instance.all_logs(ran.run_id, of_type=dg.DagsterEventType.STEP_FAILURE)
    return "".join(
        str(record.dagster_event and record.dagster_event.event_specific_data) for record in records
    )


def _tags_of(ran: Ran) -> Mapping[str, str]:
    run = ran.instance.get_run_by_id(ran.run_id)
    assert run is not None
    return run.tags


def test_run_publishes_the_servers_vectors(bench: Workbench, server: FaultServer) -> None:
    bench.write("a", 5)
    server.faults.extend([503, None, 429])

    ran = bench.refresh()

    assert ran.success
    assert_embedded(bench.output, bench.space, "a", numbered_rows("a", 5))
    assert ran.checks()[NAMES.run_check.name].passed


def test_changed_model_fails_the_run_without_a_retry(bench: Workbench, server: FaultServer) -> None:
    bench.write("a", 5)
    assert bench.refresh().success
    server.seed = "v2 "
    bench.write("b", 5)

    ran = bench.refresh()

    assert not ran.success
    assert "the endpoint's model has changed" in _failure_of(ran)
    assert _tags_of(ran)[RETRY_TAG] == "false"


def test_server_that_encodes_nothing_fails_the_run_for_a_retry(
    bench: Workbench, server: FaultServer
) -> None:
    bench.write("a", 5)
    server.faults.extend([None] * 2)
    server.lasting_fault = 503
    server.retry_after = "3"

    ran = bench.refresh()

    assert not ran.success
    assert "encoder_patience is 2 s" in _failure_of(ran)
    assert _tags_of(ran)[RETRY_TAG] == "true"


def test_run_check_shows_what_the_tokens_cost(bench: Workbench, server: FaultServer) -> None:
    bench.settings |= {"price_per_million_tokens": 1_000_000}
    bench.write("a", 5)

    ran = bench.refresh()

    tokens = server.tokens_of([text for _, text in numbered_rows("a", 5)])
    assert ran.checks()[NAMES.run_check.name].metadata["cost"].value == tokens


def test_max_cost_fails_the_run_without_a_retry(bench: Workbench, server: FaultServer) -> None:
    bench.settings |= {"price_per_million_tokens": 1_000_000, "max_cost": 5_000}
    for key in "abcd":
        bench.write(key, 200)

    ran = bench.refresh()

    assert not ran.success
    assert "max_cost is 5000" in _failure_of(ran)
    assert _tags_of(ran)[RETRY_TAG] == "false"
    texts = {text for key in "abcd" for _, text in numbered_rows(key, 200)}
    assert 4_500 < server.tokens_of(texts) <= 5_000


def test_catalog_check_cuts_documents_with_the_tokenizer(
    bench: Workbench, server: FaultServer, demo_folder: Path
) -> None:
    bench.settings |= {"tokenizer": str(demo_folder), "chunks": {"tokens": 64}}
    bench.write("a", [("long", prose(Random(1), 30)), ("short", "A hat.")])
    embedded = bench.refresh()

    ran = bench.run("catalog_check")

    assert embedded.success
    assert values_of(embedded.materialized()["a"])["dagster/partition_row_count"] > 4
    assert ran.success
    assert [name for name, check in ran.checks().items() if not check.passed] == []
