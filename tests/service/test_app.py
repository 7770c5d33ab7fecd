"""Models, health and metrics of the service, and clients that leave."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest
from starlette.testclient import TestClient

from surge_dagster.service.errors import Refusal
from surge_dagster.service.lane import promise_of
from tests.service.fake_spaces import FakeSpaces, error_of, post
from tests.service.running import GOOD, client_of, connected, read_all, serving, sized


@pytest.fixture
def spaces() -> FakeSpaces:
    return FakeSpaces()


@pytest.fixture
def client(spaces: FakeSpaces) -> Iterator[TestClient]:
    with client_of(spaces) as client:
        yield client


def test_models_are_the_spaces_with_what_their_vectors_follow_from(
    client: TestClient, spaces: FakeSpaces
) -> None:
    [model] = client.get("/v1/models").json()["data"]
    promise = spaces.only.queries.promise
    assert promise is not None
    assert model.pop("promise") == asdict(promise)
    assert model.pop("created") > 0
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


@pytest.mark.parametrize("root", ["/v1", "/documents/v1"])
def test_model_is_found_below_both_base_urls(client: TestClient, root: str) -> None:
    [model] = client.get(f"{root}/models").json()["data"]
    assert client.get(f"{root}/models/current").json() == model
    assert error_of(client.get(f"{root}/models/other"), 404)["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("is_alive", "is_ready", "health", "readiness"),
    [(True, True, 200, 200), (True, False, 200, 503), (False, False, 503, 503)],
)
def test_health_and_readiness_are_those_of_the_current_space(
    client: TestClient,
    spaces: FakeSpaces,
    is_alive: bool,
    is_ready: bool,
    health: int,
    readiness: int,
) -> None:
    spaces.is_alive = is_alive
    spaces.is_ready = is_ready
    assert client.get("/healthz").status_code == health
    assert client.get("/readyz").status_code == readiness


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("POST", "/embeddings", 404),
        ("POST", "/v1/embeddings/", 404),
        ("GET", "/v1/embeddings", 405),
        ("DELETE", "/v1/models", 405),
        ("OPTIONS", "/v1/embeddings", 405),
    ],
)
def test_unknown_path_and_wrong_method_are_error_objects(
    client: TestClient, method: str, path: str, status: int
) -> None:
    error = error_of(client.request(method, path), status)
    assert error["type"] == "invalid_request_error"
    assert "/documents/v1" in error["message"]


@pytest.mark.parametrize(
    ("sent", "is_kept"), [("abc-1.2_3", True), (None, False), ("a b", False), ("x" * 129, False)]
)
def test_answer_has_the_id_of_its_request(
    client: TestClient, sent: str | None, is_kept: bool
) -> None:
    headers = {} if sent is None else {"x-request-id": sent}

    found = client.get("/v1/models", headers=headers).headers["x-request-id"]

    assert (found == sent) == is_kept
    assert re.fullmatch(r"[\w.-]{1,128}", found)


def test_metrics_count_requests_and_read_the_lanes(client: TestClient, spaces: FakeSpaces) -> None:
    post(client)
    post(client, model="other")
    post(client, "/documents/v1/embeddings")
    client.get("/wp-admin/setup.php")

    lines = client.get("/metrics").text.splitlines()

    name = spaces.only.space.name
    for line in (
        'surge_requests_total{endpoint="/v1/embeddings",status="200"} 1.0',
        'surge_requests_total{endpoint="/v1/embeddings",status="404"} 1.0',
        'surge_requests_total{endpoint="/documents/v1/embeddings",status="200"} 1.0',
        'surge_requests_total{endpoint="other",status="404"} 1.0',
        'surge_request_seconds_count{endpoint="/v1/embeddings"} 2.0',
        f'surge_waiting_tokens{{side="query",space="{name}"}} 5.0',
        f'surge_waiting_texts{{side="document",space="{name}"}} 1.0',
        f'surge_promise_broken_total{{side="query",space="{name}"}} 0.0',
        f'surge_texts_total{{side="document",space="{name}"}} 7.0',
    ):
        assert line in lines


def test_lane_that_spaces_share_is_counted_once(client: TestClient, spaces: FakeSpaces) -> None:
    spaces.only.documents = spaces.only.queries
    text = client.get("/metrics").text
    assert len(re.findall("^surge_waiting_tokens{", text, re.MULTILINE)) == 1


@pytest.mark.parametrize(("promised", "broken"), [(1e-9, 2), (1_000.0, 0)])
def test_promise_counts_until_the_answer_is_sent_whatever_it_is(
    client: TestClient, spaces: FakeSpaces, promised: float, broken: int
) -> None:
    lane = spaces.only.queries
    kept = promise_of(1e12, 512, 1_000.0)
    accept = lane.accept

    def accept_late(texts: list[str], **options: Any) -> Any:
        lane.promise = promise_of(1e12, 512, promised)
        return accept(texts, **options)

    lane.accept = accept_late
    for path, later, failure in (
        ("/v1/embeddings", None, None),
        ("/v1/embeddings", Refusal(503, "encoder_down", "no worker"), None),
        ("/v1/embeddings", None, Refusal(429, "rate_limit_exceeded", "nothing is promised")),
        ("/documents/v1/embeddings", None, None),
    ):
        lane.promise = kept
        lane.fails_later = later
        lane.failure = failure
        post(client, path)

    [line] = re.findall("^surge_promise_broken_total{.*", client.get("/metrics").text, re.MULTILINE)

    assert line.split()[-1] == f"{broken:.1f}"


def test_request_whose_client_has_gone_is_cancelled(spaces: FakeSpaces) -> None:
    lane = spaces.only.queries
    lane.holds = True
    ended = threading.Event()
    with serving(spaces.as_served()) as url:
        with connected(url) as client:
            client.sendall(sized(GOOD))
            future = lane.held.get(timeout=60)
            future.add_done_callback(lambda _: ended.set())
        assert ended.wait(60)
    assert future.cancelled()


def test_client_that_leaves_in_its_body_leaves_no_trace(
    spaces: FakeSpaces, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(spaces.as_served()) as url:
        with connected(url) as client:
            client.sendall(sized(b"{", 1000))
        with connected(url) as client:
            client.sendall(sized(GOOD))
            assert client.recv(12) == b"HTTP/1.1 200"
    assert not caplog.records


def test_pipelined_requests_are_answered_in_order(spaces: FakeSpaces) -> None:
    last = sized(GOOD).replace(b"Host:", b"Connection: close\r\nHost:")
    requests = sized(GOOD) + sized(b"{}") + last
    with serving(spaces.as_served()) as url, connected(url) as client:
        client.sendall(requests)
        assert re.findall(rb"HTTP/1.1 (\d+)", read_all(client)) == [b"200", b"400", b"200"]
