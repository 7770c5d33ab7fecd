"""Commands with an encoder behind HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surge_dagster.config.settings import load_settings
from surge_dagster.engine.endpoint.endpoint import Endpoint
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.output.spaces import list_spaces
from surge_dagster.engine.store import open_store
from surge_dagster.resources import EncoderResource
from tests.command import Command
from tests.engine.endpoint.fault_server import MODEL, REFUSED, FaultServer, fault_server
from tests.small_catalogs import read_embedded


@pytest.fixture
def server() -> Iterator[FaultServer]:
    """A server of embeddings whose faults a test chooses."""
    with fault_server() as running:
        yield running


class Embedded:
    """An output that was made with a server."""

    def __init__(self, surge: Command, server: FaultServer) -> None:
        self.surge = surge
        self.options = ("--model", MODEL, "--encoder-url", server.url, "--encoder-patience", 5)
        surge.write("a", 30)
        surge.write("b", 3)
        self.embed = ("embed", "catalog", "out", *self.options)
        code, _, error = surge(*self.embed)
        assert code == 0, error

    @property
    def space(self) -> str:
        [space] = list_spaces(open_store(self.surge.root / "out"))
        return space.name


@pytest.fixture
def embedded(surge: Command, server: FaultServer) -> Embedded:
    """A catalog of two partitions that was embedded with `server`."""
    return Embedded(surge, server)


def test_embed_publishes_the_servers_vectors(embedded: Embedded, server: FaultServer) -> None:
    texts = [f"a number {row}" for row in range(30)]

    found = read_embedded(embedded.surge.root / "out", embedded.space, "a")

    assert found.texts == texts
    assert np.array_equal(found.matrix, server.vectors(texts))


def test_second_embed_sends_only_the_probes(embedded: Embedded, server: FaultServer) -> None:
    server.bodies.clear()

    code, _, error = embedded.surge(*embedded.embed)

    assert code == 0, error
    assert len(server.bodies) == 1
    assert len(server.bodies[0]["input"]) == 5


def test_search_sends_the_query_with_its_fields(embedded: Embedded, server: FaultServer) -> None:
    search = ("search", "a number 7", "out", "-k", 1, *embedded.options)

    code, out, error = embedded.surge(*search)

    assert code == 0, error
    assert "a-7" in out


def test_search_without_the_url_says_what_to_set(embedded: Embedded) -> None:
    assert "Set encoder_url" in embedded.surge.error("search", "a number 7", "out", "--yes")


def test_verify_encodes_a_sample_again(embedded: Embedded) -> None:
    code, _, error = embedded.surge("verify", "catalog", "out", *embedded.options)

    assert code == 0, error


@pytest.mark.parametrize("command", [("embed", "catalog"), ("verify", "catalog"), ("search", "q")])
def test_changed_model_is_refused(
    embedded: Embedded, server: FaultServer, command: tuple[str, ...]
) -> None:
    server.seed = "v2 "

    error = embedded.surge.error(*command, "out", *embedded.options)

    assert "the endpoint's model has changed" in error


def test_refused_text_is_named_and_the_rest_is_published(
    embedded: Embedded, surge: Command
) -> None:
    surge.write("c", 3, text=["red", REFUSED, "blue"])
    surge.write("d", 3)

    error = surge.error(*embedded.embed, expected=1)

    assert "'c'" in error
    assert "the encoder gave no vector for its text (HTTP 400" in error
    assert read_embedded(surge.root / "out", embedded.space, "d").ids == ["d-0", "d-1", "d-2"]


def test_resource_encodes_documents_and_queries_with_their_fields(server: FaultServer) -> None:
    settings: dict[str, Any] = {
        "model": MODEL,
        "encoder_url": server.url,
        "encoder_fields": {"input_type": "search_document"},
        "encoder_query_fields": {"input_type": "search_query"},
    }
    encoder = EncoderResource(**settings)

    with encoder.pool():
        vectors = encoder.encode(["red", "blue"])
        encoder.encode(["hat"], task="query")

    assert np.array_equal(vectors, server.vectors(["red", "blue"]))
    types = {body["input_type"] for body in server.bodies if "hat" in body["input"]}
    assert types == {"search_query"}
    types = {body["input_type"] for body in server.bodies if "red" in body["input"]}
    assert types == {"search_document"}


def test_settings_give_the_endpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("surge.yaml").write_text(
        "model: m\n"
        "encoder_url: https://host/v1/embeddings\n"
        "encoder_api_key_env: OUR_KEY\n"
        "encoder_fields: {b: 1, a: [x]}\n"
        "encoder_concurrency: 3\n"
    )
    monkeypatch.setenv("SURGE_ENCODER_QUERY_FIELDS", '{"b": 2}')

    endpoint = load_settings(encoder_timeout=7).encoding_spec().endpoint

    assert endpoint is not None
    assert endpoint.url == "https://host/v1"
    assert endpoint.fields == '{"a": ["x"], "b": 1}'
    assert endpoint.query_fields == '{"b": 2}'
    assert endpoint.api_key_env == "OUR_KEY"
    assert endpoint.concurrency == 3
    assert endpoint.timeout_seconds == 7


def test_queries_have_the_fields_of_documents_if_none_are_given() -> None:
    settings = load_settings(model="m", encoder_url="http://h/v1", encoder_fields='{"task": "x"}')

    assert settings.endpoint() == Endpoint('{"task": "x"}', '{"task": "x"}')


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"encoder_url": "host/v1"}, "expected an http(s) URL"),
        ({"encoder_url": "https://me:secret@host/v1"}, "without a key or password"),
        ({"encoder_api_key_env": "sk-proj-Ab12"}, "expected the name of an environment variable"),
        ({"encoder_fields": "{"}, "expected a JSON object"),
        ({"encoder_fields": "[1]"}, "expected a JSON object"),
        ({"encoder_fields": '{"input": 1}'}, "the fields input of a request are set by"),
        ({"encoder_concurrency": 0}, "encoder_concurrency"),
        ({"cluster": "auto"}, "an encoder behind HTTP needs no cluster"),
        ({"chunks": "tokens=64"}, "chunks needs a local model"),
    ],
)
def test_setting_that_cannot_be_used_is_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_settings(**{"model": "m", "encoder_url": "http://h/v1"} | given)

    assert problem in str(refused.value)
    assert "secret" not in str(refused.value)
    assert "Ab12" not in str(refused.value)


PRICES = ("--price-per-million-tokens", 1_000_000)


def test_plan_and_run_say_what_tokens_cost(surge: Command, server: FaultServer) -> None:
    surge.write("a", 200)
    embed = ("catalog", "out", "--model", MODEL, "--encoder-url", server.url, *PRICES)
    tokens = sum(len(f"a number {row}") for row in range(200))

    planned = surge.json("plan", *embed)
    report = surge.json("embed", *embed)

    assert planned["cost"] == pytest.approx(tokens, rel=0.05)
    assert report["cost"] == tokens
    assert report["price_per_million_tokens"] == 1_000_000


def test_max_cost_ends_a_run_before_it_is_passed(surge: Command, server: FaultServer) -> None:
    for key in "abcdefgh":
        surge.write(key, 200)
    options = ("--model", MODEL, "--encoder-url", server.url, *PRICES, "--max-cost", 9_000)
    bounds = ("--b-min", 200, "--first-b-min", 200, "--b-max", 400)
    server.encoded.clear()

    error = surge.error("embed", "catalog", "out", *options, *bounds, expected=1)

    assert "max_cost is 9000" in error
    assert "are left" in error
    sent = sum(len(text) * count for text, count in server.encoded.items() if "number" in text)
    assert sent <= 9_000


def test_plan_says_that_a_run_will_reach_max_cost(surge: Command, server: FaultServer) -> None:
    surge.write("a", 200)
    options = ("--model", MODEL, "--encoder-url", server.url, *PRICES, "--max-cost", 100)

    _, out, _ = surge("plan", "catalog", "out", *options)

    assert "a run ends before its tokens cost more than max_cost, 100" in out


def test_max_cost_without_a_price_is_refused() -> None:
    with pytest.raises(ConfigError, match="set price_per_million_tokens"):
        load_settings(model="m", encoder_url="http://h/v1", max_cost=1)
