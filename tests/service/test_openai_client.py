"""OpenAI's Python client, unmodified, against the service."""

from __future__ import annotations

from collections.abc import Iterator

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


def test_both_formats_are_equal_to_the_last_bit(
    client: openai.OpenAI,
) -> None:
    answers = [
        # the client's own default is base64
        client.embeddings.create(model="current", input=TEXTS),
        client.embeddings.create(model="current", input=TEXTS, encoding_format="float"),
    ]
    for answer in answers:
        found = [(each.index, each.embedding) for each in answer.data]
        assert found == list(enumerate(vectors_of(TEXTS)))
        assert answer.usage.prompt_tokens == 4


def test_base_url_says_whether_texts_are_queries_or_documents(
    client: openai.OpenAI, url: str
) -> None:
    documents = openai.OpenAI(base_url=f"{url}/documents/v1", api_key="none")
    [document] = documents.embeddings.create(model="current", input="red").data
    [query] = client.embeddings.create(model="current", input="red").data
    assert document.embedding == vectors_of(["red"], prompt="")[0]
    assert query.embedding == vectors_of(["red"])[0]


@pytest.mark.parametrize(("input_type", "prompt"), [("document", ""), ("query", "find: ")])
@pytest.mark.parametrize("root", ["/v1", "/documents/v1"])
def test_input_type_goes_before_the_base_url(
    url: str, root: str, input_type: str, prompt: str
) -> None:
    client = openai.OpenAI(base_url=url + root, api_key="none")
    [found] = client.embeddings.create(
        model="current", input="red", extra_body={"input_type": input_type}
    ).data
    assert found.embedding == vectors_of(["red"], prompt)[0]


def test_errors_are_the_clients_own_with_what_to_do(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=r"is not served\. Use hash-16"):
        client.embeddings.create(model="text-embedding-3-small", input="red")


def test_client_comes_back_after_the_time_that_an_overloaded_service_names(
    client: openai.OpenAI, spaces: FakeSpaces
) -> None:
    spaces.only.queries.failure = Refusal(
        429, "rate_limit_exceeded", "too much waits", retry_after_seconds=0.0015
    )
    with pytest.raises(openai.RateLimitError) as busy:
        client.embeddings.create(model="current", input="red")
    headers = busy.value.response.headers
    assert headers["retry-after-ms"] == "2"
    assert headers["retry-after"] == "1"
    spaces.only.queries.failure = None
    assert client.with_options(max_retries=2).embeddings.create(model="current", input="red").data
