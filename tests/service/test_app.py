"""Models, health, metrics and the OpenAPI document of the service, and clients that leave."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from surge_dagster.service.app import service_app
from surge_dagster.service.errors import LaneDown, Overloaded
from surge_dagster.service.settings import ServiceSettings
from tests.service.fake_spaces import FakeSpaces, post
from tests.service.running import connected, read_all, serving

REQUEST = b'{"model":"current","input":"red"}'
POST = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"


@pytest.fixture
def spaces() -> FakeSpaces:
    return FakeSpaces()


@pytest.fixture
def app(spaces: FakeSpaces) -> Starlette:
    return service_app(spaces.as_served(), ServiceSettings())


@pytest.fixture
def client(app: Starlette) -> Iterator[TestClient]:
    with TestClient(app) as client:
        yield client


def test_models_are_the_spaces_with_what_their_vectors_follow_from(
    client: TestClient, spaces: FakeSpaces
) -> None:
    for root in ("/v1", "/documents/v1"):
        [model] = client.get(f"{root}/models").json()["data"]
        assert model == client.get(f"{root}/models/current").json()
        assert model["created"] > 0
    promise = spaces.only.queries.promise
    assert promise and model.pop("promise") == promise.as_dict()
    del model["created"]
    assert model == {
        "id": spaces.only.space.name,
        "object": "model",
        "owned_by": "surge-dagster",
        "model": "hash://16",
        "state": "current",
        "dimension": 16,
        "dimensions": [16, 8],
        "max_length": 256,
        "normalize": True,
        "query_prompt": "find: ",
        "document_prompt": "",
    }
    spaces.only.queries.promise = None
    assert client.get("/v1/models/current").json()["promise"] is None
    assert client.get("/v1/models/other").json()["error"]["code"] == "model_not_found"


def test_health_follows_the_workers_and_readiness_the_service_too(
    client: TestClient, spaces: FakeSpaces, app: Starlette
) -> None:
    def statuses() -> tuple[int, int]:
        return client.get("/healthz").status_code, client.get("/readyz").status_code

    assert statuses() == (200, 200)
    spaces.is_ready = False
    assert statuses() == (200, 503)
    spaces.is_alive = False
    assert statuses() == (503, 503)
    spaces.is_ready = spaces.is_alive = True
    app.state.is_ending = lambda: True
    assert statuses() == (200, 503)
    assert client.get("/v1/models").headers["connection"] == "close"


def test_unknown_path_and_wrong_method_are_error_objects(client: TestClient) -> None:
    for method, path, status in (
        *(("GET", "/", 404), ("POST", "/embeddings", 404), ("POST", "/v1/embeddings/", 404)),
        *(
            ("GET", "/v1/embeddings", 405),
            ("DELETE", "/v1/models", 405),
            ("OPTIONS", "/v1/embeddings", 405),
        ),
    ):
        answer = client.request(method, path)
        assert (answer.status_code, answer.json()["error"]["type"]) == (
            status,
            "invalid_request_error",
        )
        assert "/documents/v1" in answer.json()["error"]["message"]


def test_metrics_count_requests_and_read_the_lanes(client: TestClient, spaces: FakeSpaces) -> None:
    post(client)
    post(client, model="other")
    client.get("/v1/models/current")
    client.get("/wp-admin/setup.php")
    spaces.counts[spaces.only.space.name, "document"].texts = 7
    text = client.get("/metrics").text
    name = spaces.only.space.name
    for line in (
        'surge_requests_total{endpoint="/v1/embeddings",status="200"} 1.0',
        'surge_requests_total{endpoint="/v1/embeddings",status="404"} 1.0',
        'surge_requests_total{endpoint="other",status="404"} 1.0',
        'surge_request_seconds_count{endpoint="/v1/embeddings"} 2.0',
        f'surge_waiting_tokens{{side="query",space="{name}"}} 5.0',
        f'surge_waiting_requests{{side="document",space="{name}"}} 1.0',
        f'surge_promise_broken_total{{side="query",space="{name}"}} 0.0',
        f'surge_texts_total{{side="document",space="{name}"}} 7.0',
    ):
        assert line in text.splitlines()
    assert len(re.findall(r"^surge_queue_seconds{", text, re.MULTILINE)) == 1, (
        "of the lane that promises something"
    )
    spaces.only.documents = spaces.only.queries
    waiting = re.findall("^surge_waiting_tokens{.*", client.get("/metrics").text, re.MULTILINE)
    assert len(waiting) == 1, "a lane of both sides is counted once"


@pytest.mark.parametrize(("promised", "broken"), [(0.0, 2), (1_000.0, 0)])
def test_promise_counts_until_the_answer_is_sent_whatever_it_is(
    client: TestClient, spaces: FakeSpaces, promised: float, broken: int
) -> None:
    lane = spaces.only.queries
    assert lane.promise
    lane.promise = replace(lane.promise, promised_seconds=promised)
    post(client)
    lane.fails_later = LaneDown("no worker")
    post(client)
    lane.failure = Overloaded("refused, so nothing was promised", 1.0)
    post(client)
    post(client, "/documents/v1/embeddings")
    [line] = re.findall("^surge_promise_broken_total{.*", client.get("/metrics").text, re.MULTILINE)
    assert line.split()[-1] == f"{broken:.1f}"


def test_two_services_of_a_process_count_apart(client: TestClient, spaces: FakeSpaces) -> None:
    other = TestClient(service_app(spaces.as_served(), ServiceSettings()))
    post(client)
    assert "surge_requests_total{" not in other.get("/metrics").text


def test_request_whose_client_has_gone_is_cancelled(spaces: FakeSpaces) -> None:
    lane = spaces.only.queries
    lane.holds = True
    with serving(spaces.as_served()) as url:
        with connected(url) as client:
            client.sendall(POST % (len(REQUEST), REQUEST))
            future = lane.held.get(timeout=60)
            ended = threading.Event()
            future.add_done_callback(lambda _: ended.set())
        assert ended.wait(60) and future.cancelled()


def test_client_that_leaves_before_its_body_is_complete_leaves_no_trace(
    spaces: FakeSpaces, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(spaces.as_served()) as url:
        with connected(url) as client:
            client.sendall(POST[: POST.index(b"\r\n\r\n")] % 1000 + b"\r\n\r\n{")
        with connected(url) as client:
            client.sendall(POST % (len(REQUEST), REQUEST))
            assert client.recv(12) == b"HTTP/1.1 200"
    assert not caplog.records


def test_pipelined_requests_are_answered_in_order(spaces: FakeSpaces) -> None:
    with serving(spaces.as_served()) as url, connected(url) as client:
        last = POST.replace(b"Host: x", b"Host: x\r\nConnection: close")
        client.sendall(
            POST % (len(REQUEST), REQUEST) + POST % (2, b"{}") + last % (len(REQUEST), REQUEST)
        )
        assert re.findall(rb"HTTP/1.1 (\d+)", read_all(client)) == [b"200", b"400", b"200"]
