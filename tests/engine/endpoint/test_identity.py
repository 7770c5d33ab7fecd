"""Spaces of encoders behind HTTP: which are the same, and which servers are refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surge_dagster.engine.endpoint.endpoint import Endpoint, json_fields
from surge_dagster.engine.endpoint.probes import PROBE_TEXTS
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import EncodingSpec, Space, space_from_json, spec_from_json
from surge_dagster.engine.output.spaces import claim_space, find_space, list_spaces, require_model
from surge_dagster.engine.store import open_store
from surge_dagster.engine.store.store import Store
from tests.engine.endpoint.fault_server import MODEL, FaultServer, fault_server


def _spec(server: FaultServer, endpoint: dict[str, Any] | None = None, **spec: Any) -> EncodingSpec:
    return EncodingSpec(MODEL, endpoint=Endpoint(url=server.url, **(endpoint or {})), **spec)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty output."""
    return open_store(str(tmp_path / "out"))


def test_space_has_the_dimension_and_length_of_the_probes(server: FaultServer) -> None:
    space = _spec(server).resolve()

    assert space.dimension == 16
    assert space.normalize
    assert space.name.startswith("hash-model-")
    assert list(server.encoded) == list(PROBE_TEXTS)


def test_space_is_resolved_in_a_thread_with_an_event_loop(server: FaultServer) -> None:
    async def cell_of_a_notebook() -> Space:
        return _spec(server).resolve()

    assert asyncio.run(cell_of_a_notebook()).dimension == 16


def test_document_prompt_stands_before_the_probes(server: FaultServer) -> None:
    _spec(server, document_prompt="passage: ").resolve()

    assert list(server.encoded) == [f"passage: {text}" for text in PROBE_TEXTS]


def test_requested_dimension_is_sent_and_is_that_of_the_space(server: FaultServer) -> None:
    space = _spec(server, dimension=8).resolve()

    assert server.bodies[0]["dimensions"] == 8
    assert space.dimension == 8
    assert not space.normalize


def test_server_that_ignores_the_dimension_is_refused() -> None:
    with (
        fault_server(dimension=4) as server,
        pytest.raises(ConfigError, match=r"has 4 numbers, expected 8.*unset dimension"),
    ):
        _spec(server, dimension=8).resolve()


def test_two_servers_of_one_model_share_a_space(server: FaultServer, store: Store) -> None:
    claim_space(store, _spec(server).resolve())

    with fault_server() as other:
        spec = _spec(other, {"concurrency": 3, "patience_seconds": 1.0})
        claim_space(store, spec.resolve())

    assert find_space(store, spec) is not None
    assert len(list_spaces(store)) == 1


@pytest.mark.parametrize(
    ("endpoint", "spec"),
    [
        ({"fields": json_fields({"input_type": "search_document"})}, {}),
        ({"query_fields": json_fields({"input_type": "search_query"})}, {}),
        ({}, {"document_prompt": "passage: "}),
        ({}, {"query_prompt": "query: "}),
        ({}, {"dimension": 8}),
        ({}, {"normalize": False}),
    ],
)
def test_what_shapes_a_vector_gives_another_space(
    server: FaultServer, endpoint: dict[str, Any], spec: dict[str, Any]
) -> None:
    first = _spec(server).resolve()
    other = _spec(server, endpoint, **spec).resolve()

    assert other.spec_sha256 != first.spec_sha256


def test_url_and_key_are_not_recorded(
    server: FaultServer, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUR_KEY", "open sesame")
    space = claim_space(store, _spec(server, {"api_key_env": "OUR_KEY"}).resolve())

    text = (Path(store.url) / space.name / "space.json").read_text()

    assert server.url not in text
    assert "OUR_KEY" not in text
    assert "sesame" not in text


def test_space_reads_its_own_description(server: FaultServer, store: Store) -> None:
    fields = json_fields({"task": {"b": 1, "a": "ä"}})
    claimed = claim_space(store, _spec(server, {"fields": fields}).resolve())

    [read] = list_spaces(store)

    assert read == claimed
    assert read.probes == claimed.probes
    assert spec_from_json(claimed.requested.as_dict()) == claimed.requested


def test_small_differences_of_vectors_are_the_same_model(
    server: FaultServer, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim_space(store, _spec(server).resolve())
    monkeypatch.setattr(FaultServer, "vectors", _nearly(FaultServer.vectors))

    claim_space(store, _spec(server).resolve())

    assert len(list_spaces(store)) == 1


def _nearly(vectors: Any) -> Any:
    def shifted(server: FaultServer, texts: list[str]) -> Any:
        return vectors(server, texts) + 0.002

    return shifted


@pytest.mark.parametrize(
    "change", [{"seed": "v2 "}, {"dimension": 32}], ids=["other vectors", "other dimension"]
)
def test_changed_model_is_refused_at_the_next_start(
    server: FaultServer, store: Store, change: dict[str, Any]
) -> None:
    claim_space(store, _spec(server).resolve())

    with (
        fault_server(**change) as other,
        pytest.raises(ConfigError, match="the endpoint's model has changed"),
    ):
        claim_space(store, _spec(other).resolve())


def test_changed_model_is_refused_for_queries(server: FaultServer, store: Store) -> None:
    space = claim_space(store, _spec(server).resolve())

    with (
        fault_server(seed="v2 ") as other,
        pytest.raises(ConfigError, match="the endpoint's model has changed"),
    ):
        require_model(_spec(other).resolve(), space)


def test_space_of_an_output_names_the_missing_setting(server: FaultServer, store: Store) -> None:
    space = claim_space(store, _spec(server).resolve())

    read: Space = space_from_json(space.to_json())

    with pytest.raises(ConfigError, match="Set encoder_url"):
        read.loadable.resolve()


def test_queries_have_a_pool_of_their_own_only_with_other_fields(server: FaultServer) -> None:
    fields = json_fields({"input_type": "search_query"})
    space = _spec(server, {"query_fields": fields}).resolve()

    assert _side_of_queries(_spec(server).resolve()) == "document"
    assert _side_of_queries(space) == "query"


def _side_of_queries(space: Space) -> str:
    return replace(space, task="query").side


@pytest.mark.parametrize(
    ("endpoint", "spec", "reason"),
    [
        ({"fields": json_fields({"input": "x"})}, {}, "the fields input of a request are set by"),
        ({"fields": json_fields({"api_key": "x"})}, {}, "the field 'api_key' of a request may be"),
        ({"query_fields": json_fields({"a": [{"Token": 1}]})}, {}, "the field 'Token' of a"),
        ({}, {"model": "hash://16"}, "the model 'hash://16' needs a local model"),
        ({}, {"trust_remote_code": "a" * 40}, "trust_remote_code needs a local model"),
    ],
)
def test_settings_that_an_endpoint_cannot_have_are_refused(
    endpoint: dict[str, Any], spec: dict[str, Any], reason: str
) -> None:
    values: dict[str, Any] = {"model": MODEL, **spec}

    with pytest.raises(ConfigError, match=reason):
        EncodingSpec(**values, endpoint=Endpoint(url="http://x/v1", **endpoint))


@pytest.mark.parametrize("name", ["max_tokens", "truncate_prompt_tokens", "keywords"])
def test_field_whose_name_is_only_like_that_of_a_secret_is_sent(
    server: FaultServer, name: str
) -> None:
    _spec(server, {"fields": json_fields({name: 3})}).resolve()

    assert server.bodies[0][name] == 3


def test_server_of_empty_vectors_is_refused(
    server: FaultServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = FaultServer.vectors
    monkeypatch.setattr(FaultServer, "vectors", lambda *texts: exact(*texts)[:, :0])

    with pytest.raises(ConfigError, match="gives no usable vectors for 'hash-model'"):
        _spec(server).resolve()


def test_probes_that_are_refused_name_the_settings(server: FaultServer) -> None:
    server.lasting_fault = 400

    with pytest.raises(ConfigError, match="refuses five short texts"):
        _spec(server).resolve()
