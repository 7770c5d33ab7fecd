"""The backend of an encoder behind HTTP: each text has its vector or a reason, and is sent once."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import httpx
import numpy as np
import pytest

from surge_dagster.engine.encoder.metrics import Costs
from surge_dagster.engine.encoder.worker.backends import BackendSettings, Rows
from surge_dagster.engine.endpoint.client import SUSPICIOUS_TRIES, EndpointClient
from surge_dagster.engine.endpoint.endpoint import Endpoint, json_fields
from surge_dagster.engine.errors import ConfigError, EndpointDown
from surge_dagster.engine.inference import http_backend
from surge_dagster.engine.inference.http_backend import HttpBackend
from surge_dagster.engine.model.spec import EncodingSpec, Space
from tests.engine.endpoint.fault_server import (
    MODEL,
    OTHER_MODEL,
    PROBE_OF_REQUESTS,
    REFUSED,
    TOO_SHORT,
    FaultServer,
    fault_server,
    without_probe,
)
from tests.engine.endpoint.virtual_loop import VirtualLoop

pytestmark = pytest.mark.usefixtures("quick_pauses")

SETTINGS = BackendSettings("cpu", "fp32", 1)


def _space(server: FaultServer, endpoint: dict[str, Any] | None = None, **spec: Any) -> Space:
    space = EncodingSpec(MODEL, endpoint=Endpoint(url=server.url, **(endpoint or {})), **spec)
    resolved = space.resolve()
    server.encoded.clear()
    server.bodies.clear()
    return resolved


def _at(space: Space, server: FaultServer) -> Space:
    """The space with another server."""
    endpoint = space.requested.endpoint
    assert endpoint is not None
    moved = replace(endpoint, url=server.url)
    return replace(space, requested=replace(space.requested, endpoint=moved))


def _encoded(space: Space, texts: list[str]) -> tuple[np.ndarray, Rows, Costs]:
    """The vectors of texts, their rows and costs."""
    backend = HttpBackend(space, SETTINGS)
    rows = _rows(len(texts), space.dimension)
    costs = backend.forward(backend.prepare(texts), rows, lambda: None)
    return rows.matrix, rows, costs


def _rows(count: int, dimension: int = 16) -> Rows:
    """Rows that no backend has written."""
    matrix = np.full((count, dimension), 9, np.float32)
    return Rows.of_all(matrix, np.full(count, 9, np.uint8))


def _texts(count: int, **others: str) -> list[str]:
    """Ordinary texts, and others in place of some of them: `at_7="text"`."""
    texts = [f"text {row}" for row in range(count)]
    for place, text in others.items():
        texts[int(place.removeprefix("at_"))] = text
    return texts


def test_each_row_gets_the_vector_of_its_text(server: FaultServer) -> None:
    texts = _texts(1_000)

    matrix, rows, costs = _encoded(_space(server, {"batch": 64, "concurrency": 4}), texts)

    assert np.array_equal(matrix, server.vectors(texts))
    assert rows.refused == {}
    assert not rows.truncated.any()
    requests = len(server.bodies)
    assert costs.tokens == sum(map(len, texts)) + requests * len(PROBE_OF_REQUESTS)
    assert set(server.encoded.values()) == {1}


def test_time_of_portions_under_way_together_counts_once(server: FaultServer) -> None:
    backend = HttpBackend(_space(server, {"batch": 8, "concurrency": 2}), SETTINGS)
    texts = _texts(200)
    matrix = np.empty((len(texts), 16), np.float32)
    rows = Rows.of_all(matrix, np.empty(len(texts), np.uint8))

    begun = time.perf_counter()
    launched = [backend.launch(backend.prepare(texts), rows, lambda: None) for _ in range(4)]
    seconds = [each.finish().forward_seconds for each in launched]

    assert 0 < sum(seconds) <= time.perf_counter() - begun


def test_no_more_requests_are_under_way_than_allowed(server: FaultServer) -> None:
    space = _space(server, {"batch": 9, "concurrency": 3})

    with fault_server(held_until=3) as holding:
        _encoded(_at(space, holding), _texts(400))

        assert holding.most_under_way == 3
        assert len(holding.bodies) == 50


def test_request_has_at_most_the_tokens_of_the_setting(server: FaultServer) -> None:
    texts = ["x" * 100] * 20 + ["y" * 500]

    _encoded(_space(server, {"tokens": 200}), texts)

    requests = [body["input"] for body in server.bodies]
    own = [without_probe(request) for request in requests]
    assert sorted(chain.from_iterable(own)) == sorted(texts)
    assert all(len(request) == 2 or sum(map(len, request)) <= 400 for request in requests)


def test_prompt_and_fields_are_those_of_the_task(server: FaultServer) -> None:
    fields = json_fields({"input_type": "search_document"})
    query_fields = json_fields({"input_type": "search_query"})
    endpoint = {"fields": fields, "query_fields": query_fields}
    space = _space(server, endpoint, document_prompt="doc: ", query_prompt="query: ")

    _encoded(space, ["red"])
    _encoded(replace(space, task="query"), ["red"])

    sent = [(body["input"][0], body["input_type"]) for body in server.bodies]
    assert sent == [("doc: red", "search_document"), ("query: red", "search_query")]


def test_refused_text_is_named_and_all_others_are_encoded(server: FaultServer) -> None:
    texts = _texts(300, at_0=f"{REFUSED} a", at_170=f"{REFUSED} b", at_299=f"{REFUSED} c")

    matrix, rows, _ = _encoded(_space(server, {"batch": 100}), texts)

    sound = np.array([REFUSED not in each for each in texts])
    assert sorted(rows.refused) == [0, 170, 299]
    for reason in rows.refused.values():
        assert reason.startswith("HTTP 400: ")
        assert "an input cannot be encoded" in reason
    assert np.array_equal(matrix[sound], server.vectors(texts)[sound])
    assert max(server.encoded.values()) == 1


@pytest.mark.parametrize(
    ("fault", "text", "reason"),
    [
        ("fewer", "red", "has 9 vectors for 10 inputs"),
        ("garbage", "red", "is not a list of embeddings"),
        (None, TOO_SHORT, "has 15 numbers, expected 16"),
    ],
)
def test_answer_that_does_not_match_ends_the_run_and_names_the_server(
    server: FaultServer, fault: str | None, text: str, reason: str
) -> None:
    space = _space(server, {"batch": 10, "concurrency": 1})
    server.faults.extend(["shuffled", fault])

    with pytest.raises(EndpointDown, match=f"{server.url} gave an answer .*{reason}"):
        _encoded(space, _texts(30, at_13=text))

    assert len(server.bodies) == 2


def test_passing_faults_cost_no_text_and_send_none_twice(server: FaultServer) -> None:
    space = _space(server, {"batch": 16, "concurrency": 4})
    server.faults.extend([429, None, "reset", 503, "shuffled", 500, 502, None, 429, 504])
    server.faults.extend([500] * 4)
    texts = _texts(512)

    matrix, rows, _ = _encoded(space, texts)

    assert rows.refused == {}
    assert np.array_equal(matrix, server.vectors(texts))
    assert set(server.encoded.values()) == {1}


def test_smaller_limit_of_the_server_is_learned(server: FaultServer) -> None:
    server.most_inputs = 32
    texts = _texts(1_024)

    matrix, rows, _ = _encoded(_space(server, {"batch": 256, "concurrency": 1}), texts)

    assert np.array_equal(matrix, server.vectors(texts))
    assert rows.refused == {}
    assert set(server.encoded.values()) == {1}
    refused = [body for body in server.bodies if len(body["input"]) > 32]
    assert [len(body["input"]) for body in refused] == [256, 128, 64]


def test_requests_are_as_large_as_before_once_the_server_works_again(server: FaultServer) -> None:
    space = _space(server, {"batch": 17, "concurrency": 1})
    server.faults.extend([500] * SUSPICIOUS_TRIES)

    _encoded(space, _texts(64))

    answered = [len(body["input"]) - 1 for body in server.bodies[SUSPICIOUS_TRIES:]]
    assert answered == [8, 8, 16, 16, 16]


def test_many_refused_texts_are_named_if_more_are_accepted(server: FaultServer) -> None:
    texts = _texts(400)
    texts[100:180] = [f"{REFUSED} {row}" for row in range(80)]

    matrix, rows, _ = _encoded(_space(server, {"batch": 100, "concurrency": 1}), texts)

    assert sorted(rows.refused) == list(range(100, 180))
    assert np.array_equal(matrix[180:], server.vectors(texts[180:]))


def _at_no_time(space: Space, texts: list[str], handler: Any, monkeypatch: Any) -> Rows:
    """The rows of texts that a handler encodes; only timers move the clock."""
    transport = httpx.MockTransport(handler)
    monkeypatch.setattr(asyncio, "new_event_loop", VirtualLoop)
    monkeypatch.setattr(
        http_backend, "EndpointClient", partial(EndpointClient, transport=transport)
    )
    matrix = np.empty((len(texts), space.dimension), np.float32)
    rows = Rows.of_all(matrix, np.empty(len(texts), np.uint8))
    backend = HttpBackend(space, SETTINGS)
    backend.forward(backend.prepare(texts), rows, lambda: None)
    return rows


@pytest.mark.parametrize("places", [(0,), (255,), (3, 4, 250), (90, 170)])
def test_text_that_is_never_answered_is_named(
    server: FaultServer, monkeypatch: pytest.MonkeyPatch, places: tuple[int, ...]
) -> None:
    async def stall(request: httpx.Request) -> httpx.Response:
        texts = json.loads(request.content)["input"]
        if any("bad" in text for text in texts):
            await asyncio.Event().wait()
        return _vectors_of(texts)

    texts = _texts(256, **{f"at_{place}": "bad" for place in places})
    rows = _at_no_time(_space(server), texts, stall, monkeypatch)

    assert sorted(rows.refused) == list(places)
    assert "no answer within 60 s" in rows.refused[places[0]]


def test_server_that_never_answers_ends_the_run(
    server: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stall(request: httpx.Request) -> httpx.Response:
        times.append(asyncio.get_running_loop().time())
        await asyncio.Event().wait()
        return _vectors_of([])

    times: list[float] = []
    with pytest.raises(EndpointDown, match=r"encoder_patience is 300 s\. .* no answer within 60 s"):
        _at_no_time(_space(server), _texts(2_048), stall, monkeypatch)

    assert times[-1] - times[0] < 15 * 60


def test_text_that_fails_the_server_stops_the_others_for_seconds(
    server: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(request: httpx.Request) -> httpx.Response:
        times.append(asyncio.get_running_loop().time())
        texts = json.loads(request.content)["input"]
        return httpx.Response(500) if "bad" in texts else _vectors_of(texts)

    times: list[float] = []
    rows = _at_no_time(_space(server), _texts(300, at_7="bad"), fail, monkeypatch)

    assert list(rows.refused) == [7]
    assert times[-1] - times[0] < 20


def _vectors_of(texts: list[str]) -> httpx.Response:
    vectors = FaultServer().vectors(texts).tolist()
    data = [{"index": place, "embedding": vector} for place, vector in enumerate(vectors)]
    return httpx.Response(200, json={"data": data})


def test_server_that_refuses_every_text_ends_the_run(server: FaultServer) -> None:
    space = _space(server)
    server.lasting_fault = 400

    with pytest.raises(EndpointDown, match=r"for 65 texts; .* content is not the cause"):
        _encoded(space, _texts(1_000))


def test_server_that_refuses_every_text_of_small_portions_ends_the_run(
    server: FaultServer,
) -> None:
    backend = HttpBackend(_space(server), SETTINGS)
    server.lasting_fault = 400
    portion = backend.prepare(_texts(50))

    backend.forward(portion, _rows(50), lambda: None)
    with pytest.raises(EndpointDown, match="for 65 texts"):
        backend.forward(portion, _rows(50), lambda: None)


def test_any_number_of_texts_is_refused_while_the_server_works(server: FaultServer) -> None:
    texts = [f"{REFUSED} {row}" for row in range(300)]

    matrix, rows, costs = _encoded(_space(server, {"batch": 31, "concurrency": 2}), texts)

    assert len(rows.refused) == 300
    assert (matrix == 9).all()
    probes = [body for body in server.bodies if body["input"] == [PROBE_OF_REQUESTS]]
    assert 230 <= len(probes) <= 240
    assert costs.tokens == len(probes) * len(PROBE_OF_REQUESTS)


def test_refused_key_ends_the_portion_before_the_next_request(server: FaultServer) -> None:
    space = _space(server, {"batch": 10, "concurrency": 1})
    server.faults.extend([None, 403])

    with pytest.raises(ConfigError, match="refuses requests for 'hash-model'"):
        _encoded(space, _texts(200))

    assert len(server.bodies) == 2


def test_vectors_have_length_1_if_the_spec_says_so(server: FaultServer) -> None:
    matrix, _, _ = _encoded(_space(server, dimension=8, normalize=True), _texts(5))

    assert np.allclose(np.linalg.norm(matrix, axis=1), 1, atol=1e-6)


def test_vectors_of_nearly_length_1_are_scaled_if_the_probes_count_as_such(
    server: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = FaultServer.vectors
    monkeypatch.setattr(FaultServer, "vectors", lambda *texts: exact(*texts) * 1.005)

    matrix, _, _ = _encoded(_space(server), _texts(5))

    assert np.allclose(np.linalg.norm(matrix, axis=1), 1, atol=1e-6)


def test_tokens_are_estimated_for_a_server_that_does_not_count(server: FaultServer) -> None:
    server.has_usage = False

    _, _, costs = _encoded(_space(server), ["x" * 100])

    assert costs.tokens == 51 + len(PROBE_OF_REQUESTS) // 2 + 1


def test_tokenizer_counts_tokens_and_marks_longer_texts(
    server: FaultServer, demo_folder: Any
) -> None:
    server.has_usage = False
    endpoint = {"tokenizer": str(demo_folder / "tokenizer.json")}

    _, rows, costs = _encoded(_space(server, endpoint, max_length=8), ["red hat", "red " * 20])

    assert rows.truncated.tolist() == [0, 1]
    assert costs.tokens == 4 + 8 + len(PROBE_OF_REQUESTS) // 2 + 1


def test_missing_tokenizer_is_named(server: FaultServer) -> None:
    with pytest.raises(ConfigError, match=r"expected a tokenizer\.json, or a folder with one"):
        _encoded(_space(server, {"tokenizer": "/not/there"}), ["red"])


def test_each_request_ends_with_a_probe_under_the_prompt_of_documents(server: FaultServer) -> None:
    space = _space(server, {"batch": 10}, document_prompt="doc: ", query_prompt="query: ")

    _encoded(space, _texts(30))
    _encoded(replace(space, task="query"), _texts(1))

    assert {body["input"][-1] for body in server.bodies} == {f"doc: {PROBE_OF_REQUESTS}"}
    assert sorted(len(body["input"]) for body in server.bodies) == [2, 4, 10, 10, 10]


def test_queries_with_fields_of_their_own_have_no_probe(server: FaultServer) -> None:
    fields = json_fields({"input_type": "search_query"})
    space = _space(server, {"query_fields": fields})

    _encoded(replace(space, task="query"), ["red"])

    assert [body["input"] for body in server.bodies] == [["red"]]


@pytest.mark.parametrize("answered", [0, 1, 7])
def test_answer_of_another_model_is_not_used_and_nothing_is_sent_after_it(
    server: FaultServer, answered: int
) -> None:
    space = _space(server, {"batch": 10, "concurrency": 1})
    texts = _texts(200)
    matrix = np.full((200, 16), 9, np.float32)
    rows = Rows.of_all(matrix, np.empty(200, np.uint8))
    backend = HttpBackend(space, SETTINGS)
    server.faults.extend([None] * answered)
    server.lasting_fault = OTHER_MODEL

    with pytest.raises(ConfigError, match="the endpoint's model has changed") as raised:
        backend.forward(backend.prepare(texts), rows, lambda: None)

    encoded = 9 * answered
    assert np.array_equal(matrix[:encoded], server.vectors(texts[:encoded]))
    assert (matrix[encoded:] == 9).all()
    assert len(server.bodies) == answered + 1
    assert f"from {server.url}, and none of its vectors is kept" in str(raised.value)


def test_one_of_two_servers_behind_a_url_with_another_model_is_found(server: FaultServer) -> None:
    space = _space(server, {"batch": 10, "concurrency": 4})
    server.faults.extend([None, None, OTHER_MODEL])

    with pytest.raises(ConfigError, match="If several servers share this URL"):
        _encoded(space, _texts(200))


def test_answers_that_differ_in_the_last_bits_are_of_the_same_model(
    server: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = _space(server)
    exact = FaultServer.vectors
    monkeypatch.setattr(FaultServer, "vectors", lambda *texts: exact(*texts) + 0.002)

    _, rows, _ = _encoded(space, _texts(10))

    assert rows.refused == {}


def test_probe_that_is_not_finite_is_a_fault_of_the_server(
    server: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = _space(server)
    exact = FaultServer.vectors
    monkeypatch.setattr(FaultServer, "vectors", lambda *texts: exact(*texts) * np.nan)

    with pytest.raises(EndpointDown, match="the vector of a probe is not finite"):
        _encoded(space, _texts(10))


def test_request_of_one_text_still_has_a_probe(server: FaultServer) -> None:
    _encoded(_space(server, {"batch": 1}), ["red", "blue"])

    assert [len(body["input"]) for body in server.bodies] == [2, 2]
