"""Commands with an encoder behind HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from tokenizers import Tokenizer

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


def test_report_names_the_server(embedded: Embedded, server: FaultServer) -> None:
    embedded.surge.write("c", 3)

    _, out, _ = embedded.surge(*embedded.embed)

    host = server.url.removeprefix("http://").removesuffix("/v1")
    assert f"on {host} in http" in " ".join(out.split())


def test_service_refuses_a_space_without_a_local_model(embedded: Embedded) -> None:
    error = embedded.surge.error("serve", "out", "--model", MODEL)

    assert "the service needs a local model. Send queries to that encoder" in error


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


def test_spaces_of_a_server_are_compared(embedded: Embedded) -> None:
    smaller = embedded.surge.json(*embedded.embed, "--dimension", 8)["space"]
    encoder = ("--encoder-url", embedded.options[3], "--yes")

    found = embedded.surge.json("compare", "out", "--with", smaller, "--sample", 20, *encoder)

    assert found["second"] == smaller
    assert found["rows"] == 33


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
        ({"chunks": "tokens=64"}, "chunks needs exact counts of tokens, which an encoder behind"),
    ],
)
def test_setting_that_cannot_be_used_is_refused(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_settings(**{"model": "m", "encoder_url": "http://h/v1"} | given)

    assert problem in str(refused.value)
    assert "secret" not in str(refused.value)
    assert "Ab12" not in str(refused.value)


WORDS = "red green blue black white brown large small round flat warm cold"


def test_chunks_are_cut_by_the_tokenizer(
    surge: Command, server: FaultServer, demo_folder: Path
) -> None:
    document = f"{WORDS}. " * 20
    surge.write("a", 2, text=[document, "red hat"])
    options = ("--model", MODEL, "--encoder-url", server.url, "--tokenizer", demo_folder)
    embed = ("embed", "catalog", "out", *options, "--chunks", "tokens=32")

    surge.json(*embed)

    [space] = list_spaces(open_store(surge.root / "out"))
    found = read_embedded(surge.root / "out", space.name, "a")
    assert found.texts is not None
    assert "".join(found.texts[:-1]) == document
    assert found.ids[-2:] == [f"a-0#{len(found.ids) - 2}", "a-1#0"]
    tokenizer = Tokenizer.from_file(str(demo_folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    assert 24 <= max(len(tokenizer.encode(text).ids) for text in found.texts) <= 32
    assert np.array_equal(found.matrix, server.vectors(found.texts))


def test_search_of_chunks_needs_no_tokenizer(
    surge: Command, server: FaultServer, demo_folder: Path
) -> None:
    surge.write("a", 3)
    options = ("--model", MODEL, "--encoder-url", server.url)
    chunks = ("--tokenizer", demo_folder, "--chunks", "tokens=32")
    space = surge.json("embed", "catalog", "out", *options, *chunks)["space"]

    code, out, error = surge("search", "a number 2", "out", "-k", 1, "--space", space, *options)

    assert code == 0, error
    assert "a-2" in out


def test_chunks_of_another_tokenizer_are_another_space(
    server: FaultServer, demo_folder: Path, tmp_path: Path
) -> None:
    content = (demo_folder / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(content + "\n")
    settings: dict[str, Any] = {"model": MODEL, "encoder_url": server.url, "chunks": "tokens=32"}

    first, second = (
        load_settings(**settings, tokenizer=str(folder)).encoding_spec().resolve()
        for folder in (demo_folder, tmp_path)
    )

    assert first.spec_sha256 != second.spec_sha256


def test_chunks_of_unknown_size_are_refused(demo_folder: Path) -> None:
    settings = {"model": "m", "encoder_url": "http://h/v1", "tokenizer": str(demo_folder)}

    with pytest.raises(ConfigError, match="Set tokens of chunks, or max_length"):
        load_settings(**settings, chunks="on")


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({}, "long_text needs exact counts of tokens"),
        ({"tokenizer": "demo"}, "does not say how many tokens it reads. Set max_length"),
    ],
)
def test_long_texts_of_unknown_length_are_refused_before_the_run(
    surge: Command,
    server: FaultServer,
    demo_folder: Path,
    given: dict[str, Any],
    problem: str,
) -> None:
    surge.write("a", 3)
    options = ["--model", MODEL, "--encoder-url", server.url, "--long-text", "refuse"]
    if given:
        options += ["--tokenizer", str(demo_folder)]

    error = surge.error("embed", "catalog", "out", *options)

    assert problem in error
    assert server.bodies == []


def test_texts_that_are_too_long_for_the_server_are_set_aside(
    surge: Command, server: FaultServer, demo_folder: Path
) -> None:
    surge.write("a", 3, text=["red hat", WORDS, "blue hat"])
    options = ("--model", MODEL, "--encoder-url", server.url, "--tokenizer", demo_folder)

    report = surge.json(
        "embed", "catalog", "out", *options, "--long-text", "set_aside", "--max-length", 8
    )

    assert report["rejected_rows"] == 1
    assert WORDS not in server.encoded
    assert "red hat" in server.encoded


PRICES = ("--price-per-million-tokens", 1_000_000)


def test_plan_and_run_say_what_tokens_cost(surge: Command, server: FaultServer) -> None:
    surge.write("a", 200)
    embed = ("catalog", "out", "--model", MODEL, "--encoder-url", server.url, *PRICES)
    texts = [f"a number {row}" for row in range(200)]

    planned = surge.json("plan", *embed)
    report = surge.json("embed", *embed)

    tokens = server.tokens_of(texts)
    assert planned["cost"] == pytest.approx(tokens, rel=0.05)
    assert report["cost"] == tokens
    assert report["price_per_million_tokens"] == 1_000_000


def test_max_cost_ends_a_run_before_it_is_passed(surge: Command, server: FaultServer) -> None:
    for key in "abcdefgh":
        surge.write(key, 200)
    options = ("--model", MODEL, "--encoder-url", server.url, *PRICES, "--max-cost", 9_000)
    bounds = ("--b-min", 200, "--first-b-min", 200, "--b-max", 400)

    error = surge.error("embed", "catalog", "out", *options, *bounds, expected=1)

    assert "max_cost is 9000" in error
    assert "are left" in error
    assert server.tokens_of([text for text in server.encoded if "number" in text]) <= 9_000


def test_max_cost_is_not_passed_by_denser_texts(surge: Command, server: FaultServer) -> None:
    """The server counts characters: of the first texts a third of their bytes."""
    surge.write("a", 400, text=[f"東京の夜景は美しい {row}" for row in range(400)])
    surge.write("b", 400, text=[f"a night in the town of the hat {row}" for row in range(400)])
    options = ("--model", MODEL, "--encoder-url", server.url, *PRICES, "--max-cost", 12_000)
    bounds = ("--b-min", 100, "--first-b-min", 100, "--b-max", 300)
    surge.json("plan", "catalog", "out", *options)
    server.encoded.clear()

    surge.error("embed", "catalog", "out", *options, *bounds, expected=1)

    rows = {text: count for text, count in server.encoded.items() if text[-1].isdigit()}
    assert set(rows.values()) == {1}
    assert 11_900 < server.tokens_of(rows) <= 12_000


def test_plan_says_that_a_run_will_reach_max_cost(surge: Command, server: FaultServer) -> None:
    surge.write("a", 200)
    options = ("--model", MODEL, "--encoder-url", server.url, *PRICES, "--max-cost", 100)

    _, out, _ = surge("plan", "catalog", "out", *options)

    assert "a run ends before its tokens cost more than max_cost, 100" in out


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"max_cost": 1}, "set price_per_million_tokens"),
        ({"cluster": "auto"}, "an encoder behind HTTP needs no cluster"),
    ],
)
def test_resource_refuses_limits_that_it_could_not_keep(
    given: dict[str, Any], problem: str
) -> None:
    settings: dict[str, Any] = {"model": "m", "encoder_url": "http://h/v1"}

    with pytest.raises(ValidationError, match=problem):
        EncoderResource(**settings, **given)


def test_max_cost_without_a_price_is_refused() -> None:
    with pytest.raises(ConfigError, match="set price_per_million_tokens"):
        load_settings(model="m", encoder_url="http://h/v1", max_cost=1)
