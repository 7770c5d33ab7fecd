"""The client of an encoder behind HTTP: what each kind of answer means for the next requests."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import numpy as np
import pytest

from surge_dagster.engine.endpoint.answers import Answer, UnusableAnswer
from surge_dagster.engine.endpoint.client import EndpointClient, InputsRefused
from surge_dagster.engine.endpoint.endpoint import Endpoint
from surge_dagster.engine.errors import ConfigError, EndpointDown
from tests.engine.endpoint.fault_server import MODEL, FaultServer, fault_server
from tests.engine.endpoint.virtual_loop import VirtualLoop

ENDPOINT = Endpoint(url="http://127.0.0.1:9/v1", patience_seconds=600)


def _answer_of(request: httpx.Request) -> httpx.Response:
    inputs = json.loads(request.content)["input"]
    data = [{"index": place, "embedding": [1.0, 0.0]} for place in range(len(inputs))]
    return httpx.Response(200, json={"data": data})


def _embed(server: FaultServer, *texts: str, **settings: Any) -> Answer:
    endpoint = Endpoint(url=server.url, **settings)

    async def ask() -> Answer:
        async with EndpointClient(endpoint, MODEL, "{}", None) as client:
            return await client.embed(texts, 10)

    return asyncio.run(ask())


@pytest.mark.usefixtures("quick_pauses")
@pytest.mark.parametrize("fault", [429, 500, 502, 503, 504, 529, 424, 408, "reset"])
def test_request_is_tried_again_after_a_passing_fault(
    server: FaultServer, fault: int | str
) -> None:
    server.faults.extend([fault, fault])

    answer = _embed(server, "red", "blue")

    assert np.array_equal(answer.vectors, server.vectors(["red", "blue"]))
    assert server.encoded == {"red": 1, "blue": 1}
    assert len(server.bodies) == 3


@pytest.mark.usefixtures("quick_pauses")
def test_first_fault_is_a_line_of_the_log(
    server: FaultServer, caplog: pytest.LogCaptureFixture
) -> None:
    server.faults.extend([503, 503])

    _embed(server, "red")

    [message] = caplog.messages
    assert f"the encoder at {server.url} does not encode now (HTTP 503" in message


@pytest.mark.parametrize("status", [400, 413, 422])
def test_refused_inputs_are_not_tried_again(server: FaultServer, status: int) -> None:
    server.lasting_fault = status

    with pytest.raises(InputsRefused, match=rf"HTTP {status}: .*as told"):
        _embed(server, "red")

    assert len(server.bodies) == 1


@pytest.mark.usefixtures("quick_pauses")
def test_request_that_always_fails_counts_as_refused(server: FaultServer) -> None:
    server.lasting_fault = 500

    with pytest.raises(InputsRefused, match="tried 5 times: HTTP 500"):
        _embed(server, "red")

    assert len(server.bodies) == 5


@pytest.mark.parametrize("status", [301, 401, 402, 403, 404, 405])
def test_nothing_is_sent_after_an_answer_that_refuses_all_requests(
    server: FaultServer, status: int
) -> None:
    server.faults.append(status)
    endpoint = Endpoint(url=server.url, concurrency=1)

    async def ask_often() -> list[Any]:
        async with EndpointClient(endpoint, MODEL, "{}", None) as client:
            first = await asyncio.gather(client.embed(["red"], 1), return_exceptions=True)
            others = [client.embed([f"blue {row}"], 1) for row in range(20)]
            return [*first, *await asyncio.gather(*others, return_exceptions=True)]

    errors = asyncio.run(ask_often())

    assert all(isinstance(error, ConfigError) for error in errors)
    assert "Check encoder_url, model, and the key" in str(errors[0])
    assert len(server.bodies) == 1


def test_key_is_that_of_the_environment_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUR_KEY", "open sesame\n")

    with fault_server(key="open sesame") as server:
        _embed(server, "red", api_key_env="OUR_KEY")

        assert server.encoded == {"red": 1}


def test_unset_environment_variable_of_the_key_is_named(server: FaultServer) -> None:
    with pytest.raises(ConfigError, match=r"names the environment variable NO_KEY, which is not"):
        _embed(server, "red", api_key_env="NO_KEY")

    assert server.bodies == []


@pytest.mark.parametrize("key", ["open\nsesame", "opén sesame", "open\x07sesame"])
def test_key_that_no_header_can_have_is_refused_and_not_shown(
    server: FaultServer, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    endpoint = Endpoint(url=server.url, api_key_env="OUR_KEY")
    monkeypatch.setenv("OUR_KEY", key)

    with pytest.raises(ConfigError, match="OUR_KEY has a line break, or a character") as caught:
        EndpointClient(endpoint, MODEL, "{}", None)

    assert "sesame" not in str(caught.value)


@pytest.mark.parametrize("status", [400, 401, 500])
def test_key_that_a_server_repeats_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    monkeypatch.setenv("OUR_KEY", "open-sesame")

    def repeat(request: httpx.Request) -> httpx.Response:
        return httpx.Response(status, text=f"wrong: {request.headers['Authorization']}")

    [error] = _with_transport(repeat, replace(ENDPOINT, api_key_env="OUR_KEY"), 1)

    assert "wrong: Bearer ***" in str(error)
    assert "sesame" not in str(error) + caplog.text


def test_answer_that_cannot_be_decompressed_is_unusable() -> None:
    def garble(request: httpx.Request) -> httpx.Response:
        headers = {"Content-Encoding": "gzip"}
        return httpx.Response(200, headers=headers, stream=httpx.ByteStream(b"not gzip"))

    [error] = _with_transport(garble, ENDPOINT, 1)

    assert isinstance(error, UnusableAnswer)
    assert "cannot be decompressed" in str(error)


def _with_transport(
    handler: Callable[[httpx.Request], Any],
    endpoint: Endpoint,
    requests: int,
    tokens: int = 10,
    clients: int = 1,
) -> list[Any]:
    """Return the answers or errors of many concurrent requests; no time passes.

    Args:
        clients: that send as many, one after the other.
    """

    async def ask() -> list[Any]:
        answers: list[Any] = []
        for number in range(clients):
            client = EndpointClient(
                endpoint,
                "m",
                "{}",
                None,
                follows_another=number > 0,
                transport=httpx.MockTransport(handler),
            )
            async with client:
                work = [client.embed([f"text {row}"], tokens) for row in range(requests)]
                answers += await asyncio.gather(*work, return_exceptions=True)
        return answers

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(ask())


def _most_in_a_minute(times: list[float], amount: float = 1) -> float:
    """Return the most of `amount` per request in any 60 s."""
    return max(amount * sum(start <= at < start + 60 for at in times) for start in times)


@pytest.mark.parametrize(
    ("limits", "tokens", "most"),
    [
        ({"requests_per_minute": 10}, 10, 10),
        ({"requests_per_minute": 0.5}, 10, 1),
        ({"tokens_per_minute": 1_000}, 100, 1_000),
        ({"tokens_per_minute": 1_000, "tokens": 200}, 150, 1_000),
        ({"tokens_per_minute": 1_000, "requests_per_minute": 3}, 100, 300),
    ],
)
def test_no_minute_has_more_than_its_limit(
    limits: dict[str, float], tokens: int, most: float
) -> None:
    times: list[float] = []

    def note(request: httpx.Request) -> httpx.Response:
        times.append(asyncio.get_running_loop().time())
        return _answer_of(request)

    endpoint = replace(ENDPOINT, **limits)
    answers = _with_transport(note, endpoint, 10, tokens, clients=3)

    assert len(times) == 30
    assert all(isinstance(answer, Answer) for answer in answers)
    counts_tokens = "tokens_per_minute" in limits
    assert _most_in_a_minute(times, tokens if counts_tokens else 1) <= most


def test_pause_that_the_server_asks_for_holds_for_all_requests() -> None:
    times: list[float] = []

    def busy_at_first(request: httpx.Request) -> httpx.Response:
        times.append(asyncio.get_running_loop().time())
        if len(times) == 1:
            return httpx.Response(429, headers={"Retry-After": "40"})
        return _answer_of(request)

    endpoint = replace(ENDPOINT, requests_per_minute=60)
    _with_transport(busy_at_first, endpoint, 100)

    assert times[1] - times[0] >= 40
    assert _most_in_a_minute(times) <= 60


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "7"}, 7),
        ({"Retry-After": "0"}, 0.5),
        ({}, 0.5),
        ({"Retry-After": "?"}, 0.5),
    ],
)
def test_pause_is_that_of_the_header_and_at_least_half_a_second(
    headers: dict[str, str], seconds: float
) -> None:
    times: list[float] = []

    def busy_at_first(request: httpx.Request) -> httpx.Response:
        times.append(asyncio.get_running_loop().time())
        return _answer_of(request) if len(times) > 1 else httpx.Response(503, headers=headers)

    _with_transport(busy_at_first, ENDPOINT, 1)

    assert times[1] - times[0] == pytest.approx(seconds, abs=1e-3)


@pytest.mark.parametrize("form", ["%a, %d %b %Y %H:%M:%S GMT", "%a %b %d %H:%M:%S %Y"])
def test_pause_until_a_date_does_not_depend_on_the_time_zone(
    monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    times: list[float] = []
    date = (datetime.now(UTC) + timedelta(seconds=100)).strftime(form)

    def busy_at_first(request: httpx.Request) -> httpx.Response:
        times.append(asyncio.get_running_loop().time())
        if len(times) > 1:
            return _answer_of(request)
        return httpx.Response(503, headers={"Retry-After": date})

    with monkeypatch.context() as context:
        context.setenv("TZ", "UTC-5")
        time.tzset()
        _with_transport(busy_at_first, ENDPOINT, 1)
    time.tzset()

    assert 90 <= times[1] - times[0] <= 100


def test_server_that_asks_for_no_pause_is_not_sent_thousands_of_requests() -> None:
    requests: list[httpx.Request] = []

    def busy(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return httpx.Response(429, headers={"Retry-After": "0"})

    _with_transport(busy, ENDPOINT, 1)

    assert len(requests) < 30


def test_redirect_names_the_new_place() -> None:
    def move(request: httpx.Request) -> httpx.Response:
        return httpx.Response(307, headers={"Location": "https://new.example/v1"})

    [error] = _with_transport(move, ENDPOINT, 1)

    assert isinstance(error, ConfigError)
    assert "HTTP 307: it has moved to https://new.example/v1" in str(error)


def test_count_of_tokens_that_cannot_be_is_left_out() -> None:
    def exaggerate(request: httpx.Request) -> httpx.Response:
        content = json.loads(_answer_of(request).content)
        return httpx.Response(200, json={**content, "usage": {"prompt_tokens": 10**30}})

    [answer] = _with_transport(exaggerate, ENDPOINT, 1)

    assert answer.tokens is None


@pytest.mark.parametrize("status", [429, 503])
def test_server_that_encodes_nothing_ends_the_run_after_the_patience(status: int) -> None:
    requests: list[float] = []

    def busy(request: httpx.Request) -> httpx.Response:
        requests.append(asyncio.get_running_loop().time())
        return httpx.Response(status)

    [error] = _with_transport(busy, ENDPOINT, 1)

    assert isinstance(error, EndpointDown)
    assert "encoder_patience is 600 s" in str(error)
    assert f"HTTP {status}" in str(error)
    assert 540 <= requests[-1] - requests[0] <= 600


def test_refused_connection_is_tried_for_the_patience() -> None:
    requests: list[float] = []

    def refuse(request: httpx.Request) -> httpx.Response:
        requests.append(asyncio.get_running_loop().time())
        raise httpx.ConnectError("refused", request=request)

    [error] = _with_transport(refuse, ENDPOINT, 1)

    assert isinstance(error, EndpointDown)
    assert "ConnectError: refused" in str(error)
    assert 540 <= requests[-1] - requests[0] <= 600


def test_request_without_an_answer_in_time_counts_as_refused() -> None:
    async def stall(request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        return _answer_of(request)

    [error] = _with_transport(stall, replace(ENDPOINT, timeout_seconds=30), 1)

    assert isinstance(error, InputsRefused)
    assert "tried 5 times: no answer within 30 s" in str(error)


def test_patience_begins_again_after_a_request_that_always_failed() -> None:
    async def ask() -> Answer:
        failed: list[httpx.Request] = []

        def fail_at_first(request: httpx.Request) -> httpx.Response:
            failed.append(request)
            status = 500 if len(failed) <= 5 else 503
            return httpx.Response(status) if len(failed) <= 6 else _answer_of(request)

        transport = httpx.MockTransport(fail_at_first)
        async with EndpointClient(ENDPOINT, "m", "{}", None, transport=transport) as client:
            with pytest.raises(InputsRefused):
                await client.embed(["bad"], 1)
            await asyncio.sleep(ENDPOINT.patience_seconds)
            return await client.embed(["good"], 1)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert len(runner.run(ask()).vectors) == 1


def test_longer_pause_than_the_patience_ends_the_run_at_once() -> None:
    requests: list[httpx.Request] = []

    def busy(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return httpx.Response(429, headers={"Retry-After": "3600"}, text="quota of the day")

    [error] = _with_transport(busy, ENDPOINT, 1)

    assert isinstance(error, EndpointDown)
    assert "would be tried again in 3600 s" in str(error)
    assert "quota of the day" in str(error)
    assert len(requests) == 1
