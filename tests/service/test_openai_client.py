"""OpenAI's Python client, unmodified, against the service."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from surge_dagster.service.errors import Refusal
from tests.service.fake_spaces import FakeSpaces, vectors_of
from tests.service.running import serving

TEXTS = ["red", "green", "red", "", "blue\n"]


@pytest.fixture(scope="module")
def spaces() -> FakeSpaces:
    return FakeSpaces()


@pytest.fixture(scope="module")
def url(spaces: FakeSpaces) -> Iterator[str]:
    with serving(spaces.as_served()) as url:
        yield url


@pytest.fixture
def client(url: str, spaces: FakeSpaces) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client
    spaces.only.queries.failure = None


def test_both_formats_are_equal_to_the_last_bit_and_index_is_right_with_duplicates(
    client: openai.OpenAI,
) -> None:
    answers = [
        # the client's own default is base64
        client.embeddings.create(model="current", input=TEXTS),
        client.embeddings.create(model="current", input=TEXTS, encoding_format="float"),
    ]
    for answer in answers:
        assert [each.embedding for each in answer.data] == vectors_of(TEXTS)
        assert [each.index for each in answer.data] == list(range(len(TEXTS)))
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (4, 4)


def test_base_url_or_input_type_says_whether_texts_are_queries_or_documents(
    client: openai.OpenAI, url: str
) -> None:
    documents = openai.OpenAI(base_url=f"{url}/documents/v1", api_key="none")
    [as_document] = documents.embeddings.create(model="current", input="red").data
    assert as_document.embedding == vectors_of(["red"], prompt="")[0]
    typed = client.embeddings.create(
        model="current", input="red", extra_body={"input_type": "document"}
    )
    assert typed.data[0].embedding == as_document.embedding
    typed = documents.embeddings.create(
        model="current", input="red", extra_body={"input_type": "query"}
    )
    assert typed.data[0].embedding == vectors_of(["red"])[0]


def test_space_is_named_whatever_name_it_was_asked_by(
    client: openai.OpenAI, spaces: FakeSpaces
) -> None:
    name = spaces.only.space.name
    for model in ("current", name, "hash://16"):
        answer = client.embeddings.with_raw_response.create(model=model, input="red")
        assert (answer.parse().model, answer.headers["surge-space"]) == (name, name)
        assert client.models.retrieve(model).id == name
    assert [model.id for model in client.models.list()] == [name]


def test_errors_are_the_clients_own_with_what_to_do(
    client: openai.OpenAI, spaces: FakeSpaces
) -> None:
    with pytest.raises(openai.NotFoundError, match=spaces.only.space.name) as unknown:
        client.embeddings.create(model="text-embedding-3-small", input="red")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError, match="Use 16 or 8") as refused:
        client.embeddings.create(model="current", input="red", dimensions=7)
    assert (refused.value.param, refused.value.type) == ("dimensions", "invalid_request_error")
    lane = spaces.only.queries
    for failure, expected in (
        (Refusal(400, "context_length_exceeded", "too long"), openai.BadRequestError),
        (Refusal(429, "rate_limit_exceeded", "too much waits"), openai.RateLimitError),
        (Refusal(503, "encoder_down", "no worker lives"), openai.InternalServerError),
    ):
        lane.failure = failure
        with pytest.raises(expected, match=str(failure)):
            client.embeddings.create(model="current", input="red")


def test_client_comes_back_after_the_time_that_an_overloaded_service_names(
    client: openai.OpenAI, spaces: FakeSpaces
) -> None:
    spaces.only.queries.failure = Refusal(
        429, "rate_limit_exceeded", "too much waits", retry_after_seconds=0.0015
    )
    with pytest.raises(openai.RateLimitError) as busy:
        client.embeddings.create(model="current", input="red")
    headers = busy.value.response.headers
    assert (headers["retry-after-ms"], headers["retry-after"]) == ("2", "1")
    spaces.only.queries.failure = None
    assert client.with_options(max_retries=2).embeddings.create(model="current", input="red").data


def test_wrong_key_is_an_authentication_error_of_the_client(
    tmp_path: Path, spaces: FakeSpaces
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"{'0' * 64}\n")
    with (
        serving(spaces.as_served(), api_keys=keys) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="wrong") as client,
        pytest.raises(openai.AuthenticationError, match="Authorization: Bearer"),
    ):
        client.models.list()
