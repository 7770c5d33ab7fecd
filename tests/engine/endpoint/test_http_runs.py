"""Whole runs with an encoder behind HTTP: each row is right or named, and paid for once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.schedule import EncodeCall
from surge_dagster.engine.endpoint.endpoint import Endpoint
from surge_dagster.engine.errors import ConfigError, EndpointDown, MaxCostReached
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.run.report import Prices
from surge_dagster.engine.run.staging import STAGING
from surge_dagster.engine.support.waiting import in_background
from tests.engine.endpoint.fault_server import (
    MODEL,
    NOT_FINITE,
    OTHER_MODEL,
    PROBE_OF_REQUESTS,
    REFUSED,
    FaultServer,
    fault_server,
    without_probe,
)
from tests.engine.runs import Output, failures, in_memory, receipts
from tests.small_catalogs import Rows, numbered_catalog, numbered_rows
from tests.waiting import until

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("own_cache")]

MakePool = Callable[..., EncoderPool]


@pytest.fixture
def new_pool() -> Iterator[MakePool]:
    """Makes pools of a server, which end with the test."""
    pools: list[EncoderPool] = []

    def make(server: FaultServer, **endpoint: Any) -> EncoderPool:
        settings = {"batch": 11, "concurrency": 4, "patience_seconds": 20.0} | endpoint
        spec = EncodingSpec(MODEL, endpoint=Endpoint(url=server.url, **settings))
        pools.append(EncoderPool(spec))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def _started(pool: EncoderPool, server: FaultServer) -> EncoderPool:
    """Start a pool, and forget the texts that measured its speed."""
    pool.start()
    server.encoded.clear()
    server.bodies.clear()
    return pool


def test_every_row_is_right_and_sent_once(
    server: FaultServer, new_pool: MakePool, tmp_path: Path
) -> None:
    output = Output(_started(new_pool(server), server), tmp_path / "out")
    catalog = numbered_catalog([60, 1, 0, 330, 7])
    server.faults.extend([429, None, "reset", 503, "shuffled", 500])

    run = output.embed(in_memory(catalog))

    output.check_all(catalog)
    texts = {text for rows in catalog.values() for _, text in rows}
    assert set(server.encoded) == texts
    assert set(server.encoded.values()) == {1}
    assert run.report.workers == 1


def test_refused_text_fails_only_its_partition_and_is_named(
    server: FaultServer, new_pool: MakePool, tmp_path: Path
) -> None:
    output = Output(_started(new_pool(server), server), tmp_path / "out")
    catalog = numbered_catalog([60, 60, 60])
    keys = list(catalog)
    rows = list(catalog[keys[1]])
    rows[17] = ("bad", REFUSED)

    events = output.events(in_memory({**catalog, keys[1]: rows}))

    [failure] = failures(events)
    assert failure.key == keys[1]
    assert f"partition {keys[1]!r}, row 17" in failure.reason
    assert "the encoder gave no vector for its text (HTTP 400" in failure.reason
    assert {receipt.key for receipt in receipts(events)} == {keys[0], keys[2]}
    assert max(server.encoded.values()) == 1
    asked_alone = [body for body in server.bodies if without_probe(body["input"]) == [REFUSED]]
    assert len(asked_alone) == 1


def test_many_refused_texts_with_long_reasons_do_not_end_the_worker(
    server: FaultServer, new_pool: MakePool
) -> None:
    pool = _started(new_pool(server, batch=100, concurrency=10), server)
    before = list(pool.worker_pids)
    texts = [f"text {row}" for row in range(600)]
    texts += [f"{REFUSED} {row} {'x' * 200}" for row in range(400)]

    with pool.arena(slots=1, max_texts=1_000, max_bytes=200_000) as arena:
        slot = arena.acquire()
        slot.append(pa.array(texts, pa.large_string()))
        metrics = pool.submit(slot).result(60)

    assert metrics is not None
    assert sorted(failed.row for failed in metrics.failed) == list(range(600, 1_000))
    assert list(pool.worker_pids) == before


def test_log_of_a_run_says_that_the_server_does_not_encode(
    server: FaultServer,
    new_pool: MakePool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    output = Output(_started(new_pool(server), server), tmp_path / "out")
    server.faults.append(503)

    output.embed(in_memory(numbered_catalog([5])))

    assert f"the encoder at {server.url} does not encode now (HTTP 503" in caplog.text


def test_wrong_count_ends_the_run_and_refuses_no_partition(
    server: FaultServer, new_pool: MakePool, tmp_path: Path
) -> None:
    catalog = numbered_catalog([10, 10, 80])
    pool = _started(new_pool(server, concurrency=1), server)
    server.faults.extend([None, "fewer"])

    with pytest.raises(EndpointDown, match="the answer has 10 vectors for 11 inputs"):
        Output(pool, tmp_path / "out").events(in_memory(catalog))

    again = Output(_started(new_pool(server), server), tmp_path / "out")
    again.embed(in_memory(catalog))
    again.check_all(catalog)


def test_vector_that_is_not_finite_is_a_transient_failure_of_its_partition(
    server: FaultServer, new_pool: MakePool, tmp_path: Path
) -> None:
    output = Output(_started(new_pool(server), server), tmp_path / "out")
    catalog = {"a": [*numbered_rows("a", 17), ("bad", NOT_FINITE)], "b": numbered_rows("b", 60)}

    events = output.events(in_memory(catalog))

    [failure] = failures(events)
    assert failure.transient
    assert "partition 'a', row 17: its vector is not finite" in failure.reason
    assert f"the encoder at {server.url} gave" in failure.reason
    assert [receipt.key for receipt in receipts(events)] == ["b"]


def test_refused_key_ends_the_run_and_the_next_run_goes_on(
    server: FaultServer, new_pool: MakePool, tmp_path: Path
) -> None:
    catalog = numbered_catalog([60] * 6)
    output = Output(_started(new_pool(server, concurrency=1), server), tmp_path / "out")
    server.faults.extend([None] * 25)
    server.lasting_fault = 401

    with pytest.raises(ConfigError, match=r"HTTP 401: .*Check encoder_url"):
        output.events(in_memory(catalog))

    assert len(server.bodies) == 26
    published = output.keys()
    server.lasting_fault = None
    server.encoded.clear()
    again = Output(_started(new_pool(server), server), tmp_path / "out")
    again.embed(in_memory(catalog))
    again.check_all(catalog)
    unpublished = [text for key in sorted(catalog.keys() - published) for _, text in catalog[key]]
    assert set(server.encoded) == set(unpublished[250 - 60 * len(published) :])


def test_run_that_reaches_max_cost_inside_a_partition_is_not_paid_for_twice(
    server: FaultServer, new_pool: MakePool, tmp_path: Path
) -> None:
    output = Output(_started(new_pool(server), server), tmp_path / "out")
    catalog = numbered_catalog([200])
    [(key, rows)] = catalog.items()
    tokens = sum(len(text) for _, text in rows) + 200 / 10 * len(PROBE_OF_REQUESTS)
    prices = Prices(per_million_tokens=1e6, max_cost=0.7 * tokens)

    with pytest.raises(MaxCostReached):
        output.events(in_memory(catalog), prices=prices)
    first = sum(server.encoded.values())
    output.embed(in_memory(catalog))

    output.check(key, rows)
    assert first > 100
    assert sum(server.encoded.values()) == 200


def test_server_that_encodes_nothing_ends_the_run_with_its_last_answer(
    server: FaultServer, new_pool: MakePool, tmp_path: Path
) -> None:
    pool = _started(new_pool(server, patience_seconds=0.2), server)
    server.lasting_fault = 503
    server.retry_after = "1"

    with pytest.raises(EndpointDown, match=r"encoder_patience is 0\.2 s\. .* HTTP 503"):
        Output(pool, tmp_path / "out").events(in_memory(numbered_catalog([60])))

    assert pool.has_failed


def test_stopped_run_does_not_wait_for_a_busy_server(
    server: FaultServer, new_pool: MakePool, tmp_path: Path
) -> None:
    pool = _started(new_pool(server, patience_seconds=10_000.0), server)
    catalog = numbered_catalog([60] * 4)
    server.faults.extend([None] * 8)
    server.lasting_fault = 503
    server.retry_after = "1000"
    run = Output(pool, tmp_path / "out").run(in_memory(catalog), grace_seconds=1.0)

    ended = in_background(lambda: list(run.events()), "consumer")
    until(lambda: len(server.bodies) > 8)
    run.stop()

    assert ended.result(30) is not None
    assert run.stopped


def test_refused_texts_are_set_aside_if_the_settings_say_so(
    server: FaultServer, new_pool: MakePool, tmp_path: Path
) -> None:
    catalog = {"a": [*numbered_rows("a", 30), ("bad", REFUSED)]}
    output = Output(_started(new_pool(server), server), tmp_path / "out")

    run = output.embed(in_memory(catalog), bad_rows="set_aside")

    output.check("a", numbered_rows("a", 30))
    assert run.report.rejected_rows == 1
    asked_alone = [body for body in server.bodies if without_probe(body["input"]) == [REFUSED]]
    assert len(asked_alone) == 1


def test_any_number_of_refused_texts_is_set_aside(
    server: FaultServer, new_pool: MakePool, tmp_path: Path
) -> None:
    refused = [(f"bad {row}", f"{REFUSED} {row}") for row in range(20)]
    output = Output(_started(new_pool(server), server), tmp_path / "out")

    run = output.embed(in_memory({"a": [*refused, *numbered_rows("a", 30)]}), bad_rows="set_aside")

    output.check("a", numbered_rows("a", 30))
    assert run.report.rejected_rows == 20


def test_changed_model_is_found_before_a_text_is_sent(
    server: FaultServer, new_pool: MakePool, tmp_path: Path
) -> None:
    Output(new_pool(server), tmp_path / "out").embed(in_memory(numbered_catalog([5])))

    with fault_server(seed="v2 ") as other:
        output = Output(_started(new_pool(other), other), tmp_path / "out")
        with pytest.raises(ConfigError, match="the endpoint's model has changed"):
            output.events(in_memory(numbered_catalog([5, 5])))

        assert other.bodies == []


def _with_refused_texts(rows: Rows) -> Rows:
    """Rows with a refused text in each SuperBatch."""
    mixed = list(rows)
    for place in range(0, len(rows), 95):
        mixed.insert(place, (f"bad {place}", f"{REFUSED} {place}"))
    return mixed


@pytest.mark.parametrize("force", [False, True])
def test_texts_next_to_refused_ones_are_sent_few_times(
    server: FaultServer, new_pool: MakePool, tmp_path: Path, force: bool
) -> None:
    """There are more SuperBatches with a refused text than MOST_READS."""
    sound = numbered_rows("a", 1_900)
    rows = _with_refused_texts(sound)
    output = Output(_started(new_pool(server, batch=51), server), tmp_path / "out")

    run = output.embed(in_memory({"a": rows}), bad_rows="set_aside", force=force)

    output.check("a", sound)
    assert run.report.rejected_rows == 20
    assert run.report.texts_reused == 0
    assert sum(server.encoded.values()) <= 3 * len(sound)


def test_run_goes_on_with_what_is_staged_without_refused_texts(
    server: FaultServer, new_pool: MakePool, tmp_path: Path
) -> None:
    sound = numbered_rows("a", 570)
    sound[500] = ("late", NOT_FINITE)
    catalog = {"a": _with_refused_texts(sound)}
    output = Output(_started(new_pool(server, batch=51), server), tmp_path / "out")

    [failure] = failures(output.events(in_memory(catalog), bad_rows="set_aside"))
    assert failure.transient
    staged = list[str]()
    for file in (tmp_path / "out" / STAGING).rglob("*-*.parquet"):
        if file.name != "left-out.parquet":
            start, stop = map(int, file.stem.split("-"))
            staged += [text for _, text in sound[start:stop]]
    before = server.encoded.copy()
    server.gives_nan = False
    output.embed(in_memory(catalog), bad_rows="set_aside")

    output.check("a", sound)
    assert staged
    assert [text for text in staged if server.encoded[text] > before[text]] == []
    assert list((tmp_path / "out" / STAGING).rglob("*.parquet")) == []


@pytest.mark.parametrize("answered", [0, 1, 9, 30, 40])
def test_model_that_changes_during_a_run_leaves_no_vector(
    server: FaultServer, new_pool: MakePool, tmp_path: Path, answered: int
) -> None:
    catalog = numbered_catalog([60, 1, 330, 7])
    output = Output(_started(new_pool(server), server), tmp_path / "out")
    server.faults.extend([None] * answered)
    server.lasting_fault = OTHER_MODEL

    with pytest.raises(ConfigError, match="the endpoint's model has changed"):
        output.events(in_memory(catalog), changes=True)

    content = _all_bytes(tmp_path / "out")
    texts = [text for rows in catalog.values() for _, text in rows]
    others = server.vectors([f"other {text}" for text in texts])
    assert [row for row in others if row.tobytes() in content] == []
    kept = [row for row in server.vectors(texts) if row.tobytes() in content]
    assert kept or answered < 9
    published = output.keys()
    output.check_all({key: catalog[key] for key in published})


def _all_bytes(folder: Path) -> bytes:
    """All files of an output, staged ones and change files too; vectors are not compressed."""
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_run_goes_on_with_the_former_model_after_a_changed_one(
    server: FaultServer, new_pool: MakePool, tmp_path: Path
) -> None:
    catalog = numbered_catalog([60, 1, 330, 7])
    output = Output(_started(new_pool(server), server), tmp_path / "out")
    server.faults.extend([None] * 30)
    server.lasting_fault = OTHER_MODEL
    with pytest.raises(ConfigError):
        output.events(in_memory(catalog))
    server.lasting_fault = None
    first = set(server.encoded)

    again = Output(_started(new_pool(server), server), tmp_path / "out")
    again.embed(in_memory(catalog))

    again.check_all(catalog)
    assert len(first & set(server.encoded)) < 100


def test_worker_that_starts_again_with_another_model_ends_the_run(
    server: FaultServer, new_pool: MakePool, tmp_path: Path
) -> None:
    pool = _started(new_pool(server), server)
    output = Output(pool, tmp_path / "out")
    server.faults.extend([None] * 8)
    server.lasting_fault = "held"
    run = output.run(in_memory(numbered_catalog([60] * 4)))
    ended = in_background(lambda: list(run.events()), "consumer")
    until(lambda: len(server.bodies) == 12 and server.under_way == 4)

    os.kill(pool.worker_pids[0], signal.SIGKILL)
    server.lasting_fault = OTHER_MODEL

    with pytest.raises(ConfigError, match="the endpoint's model has changed"):
        ended.result(60)


def test_requests_go_through_the_proxy_of_the_environment(
    server: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server takes requests for any host, as a proxy does."""
    address = server.url.removeprefix("http://").removesuffix("/v1")
    monkeypatch.setenv("HTTP_PROXY", f"http://me:secret@{address}")
    texts = ["red", "blue"]

    endpoint = Endpoint(url="http://encoder.invalid/v1", patience_seconds=5.0)
    with EncoderPool(EncodingSpec(MODEL, endpoint=endpoint)) as pool:
        vectors = pool.vectors(pa.array(texts, pa.large_string()))  # pyright: ignore

    assert np.array_equal(vectors, server.vectors(texts))


def test_only_the_worker_gets_the_key(
    new_pool: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUR_API_KEY", "open sesame")
    monkeypatch.setenv("OTHER_API_KEY", "other")

    with fault_server(key="open sesame") as server:
        pool = _started(new_pool(server, api_key_env="OUR_API_KEY"), server)
        environment = Path(f"/proc/{pool.worker_pids[0]}/environ").read_bytes()

        assert b"OUR_API_KEY=open sesame" in environment
        assert b"OTHER_API_KEY" not in environment


@pytest.mark.parametrize("answered", [0, 7, 20])
def test_killed_worker_costs_only_the_requests_under_way(
    server: FaultServer, new_pool: MakePool, tmp_path: Path, answered: int
) -> None:
    pool = _started(new_pool(server), server)
    output = Output(pool, tmp_path / "out")
    catalog = numbered_catalog([60] * 8)
    server.faults.extend([None] * answered)
    server.lasting_fault = "held"
    run = output.run(in_memory(catalog))
    ended = in_background(lambda: list(run), "consumer")
    until(lambda: len(server.bodies) == answered + 4 and server.under_way == 4)

    os.kill(pool.worker_pids[0], signal.SIGKILL)
    server.lasting_fault = None

    ended.result(60)
    output.check_all(catalog)
    texts = {text for rows in catalog.values() for _, text in rows}
    sent = [text for body in server.bodies for text in body["input"] if text in texts]
    assert len(sent) <= len(texts) + 4 * 10
    lost = [text for body in server.bodies[answered : answered + 4] for text in body["input"]]
    assert run.report.costs.tokens == server.tokens_of(texts) - sum(map(len, lost))


def test_later_call_is_sent_while_an_earlier_one_waits(
    server: FaultServer, new_pool: MakePool
) -> None:
    pool = _started(new_pool(server), server)
    server.lasting_fault = "held"

    with pool.arena(slots=2, max_texts=5, max_bytes=1_000) as arena:
        calls: list[EncodeCall] = []
        for number in (1, 2):
            slot = arena.acquire()
            slot.append(pa.array([f"text {number}"], pa.large_string()))
            calls.append(pool.submit(slot))
            until(lambda: server.under_way == number)  # noqa: B023
        server.lasting_fault = None

        assert all(call.result(30) is not None for call in calls)


def test_stopped_run_publishes_what_is_answered(
    server: FaultServer, new_pool: MakePool, tmp_path: Path
) -> None:
    pool = _started(new_pool(server, patience_seconds=10_000.0), server)
    output = Output(pool, tmp_path / "out")
    catalog = numbered_catalog([60] * 4)
    server.faults.extend([None] * 14)
    server.lasting_fault = 503
    server.retry_after = "600"
    run = output.run(in_memory(catalog), grace_seconds=2.0)
    ended = in_background(lambda: list(run), "consumer")
    until(lambda: len(server.bodies) > 14)

    run.stop()
    ended.result(30)

    assert len(output.keys()) == 2


def test_speed_is_measured_with_few_words_and_once(server: FaultServer, new_pool: MakePool) -> None:
    new_pool(server).start()
    words = sum(len(text.split()) * count for text, count in server.encoded.items())
    _started(new_pool(server), server).start()
    new_pool(server).start()

    assert words < 20_000
    assert len(server.bodies) == 2  # the probes, and the first text of a worker
