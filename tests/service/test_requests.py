"""What a body may hold, and what each wrong one is answered."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from surge_dagster.service.app import service_app
from surge_dagster.service.errors import (
    LaneClosed,
    LaneDown,
    Overloaded,
    RequestTooLarge,
    SpaceLoading,
    TooLong,
    UnusableText,
)
from surge_dagster.service.requests import MAX_TEXTS, NOT_OFFERED
from surge_dagster.service.settings import ServiceSettings
from tests.service.fake_spaces import LONGEST, FakeSpaces, post, vectors_of

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def spaces() -> FakeSpaces:
    return FakeSpaces()


@pytest.fixture(scope="module")
def client(spaces: FakeSpaces) -> Iterator[TestClient]:
    with TestClient(service_app(spaces.as_served(), ServiceSettings())) as client:
        yield client


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"input": []}, "input", "expected 1 to 2,048"),
        ({"input": ["a"] * (MAX_TEXTS + 1)}, "input", "has 2,049 texts"),
        ({"input": None}, "input", "missing"),
        ({"input": 3}, "input", "expected one text or a list of texts"),
        ({"input": {"text": "a"}}, "input", "expected one text or a list of texts"),
        ({"input": ["a", None]}, "input", "None at index 1"),
        ({"input": ["a", ["b"]]}, "input", "at index 1"),
        ({"input": [True]}, "input", "True at index 0"),
        ({"input": [1, 2, 3]}, "input", "check_embedding_ctx_length=False"),
        ({"input": [[1, 2], [3]]}, "input", "check_embedding_ctx_length=False"),
        ({"model": None}, "model", "missing"),
        ({"model": 3}, "model", "string"),
        ({"encoding_format": "bytes"}, "encoding_format", "'float' or 'base64'"),
        ({"dimensions": 7}, "dimensions", "has 16 or 8"),
        ({"dimensions": "8"}, "dimensions", "integer"),
        ({"dimensions": True}, "dimensions", "integer"),
        ({"input_type": "passage"}, "input_type", "'query' or 'document'"),
        ({"truncate": "END"}, "truncate", "boolean"),
        ({"truncate": "END", "prompt": "a"}, "truncate", "boolean"),
        ({"input": [[7] * 400] * 1_000}, "input", "check_embedding_ctx_length=False"),
        ({"input": ["a " * 1_000] * 2_047 + [3]}, "input", "has 3 at index 2047"),
        (
            {"input": ["a " * 1_000] * 1_000, "truncate": 3},
            "truncate",
            "is 3: input should be a valid boolean",
        ),
    ],
)
def test_wrong_field_is_refused_with_what_was_expected(
    client: TestClient, fields: dict[str, Any], param: str, said: str
) -> None:
    answer = post(client, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (
        400,
        param,
        "invalid_request_error",
    )
    assert said in error["message"] and len(error["message"]) < 400


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b'"text"', b'{"model":"current","input":"\xff"}', b"[" * 200),
    ],
)
def test_body_that_is_no_json_object_is_refused(client: TestClient, body: bytes) -> None:
    answer = client.post("/v1/embeddings", content=body, headers=JSON)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


def test_texts_may_hold_any_number_of_signs_that_stand_between_values(client: TestClient) -> None:
    text = '{"a": [1, "\\\\"], "b\\": [' * 10_000
    assert post(client, input=[text, "b"]).json()["data"][0]["embedding"] == vectors_of([text])[0]


@pytest.mark.parametrize("name", sorted(NOT_OFFERED))
def test_field_that_would_change_vectors_is_refused(client: TestClient, name: str) -> None:
    answer = post(client, **{name: False})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (
        400,
        "unsupported_parameter",
        name,
    )


@pytest.mark.parametrize(
    ("path", "fields", "own_value"),
    [
        ("/v1", {"prompt_name": "query"}, "puts 'find: ' before each query"),
        ("/documents/v1", {"prompt": "passage: "}, "puts no prompt before a document"),
        ("/v1", {"normalize": False}, "scales its vectors to length 1"),
        ("/v1", {"truncate_prompt_tokens": 5}, "reads 256 tokens"),
        ("/v1", {"output_dimension": 8}, "has 16 dimensions"),
        ("/v1", {"embedding_type": "int8"}, "float32"),
    ],
)
def test_refused_field_is_answered_with_the_spaces_own_value(
    client: TestClient, path: str, fields: dict[str, Any], own_value: str
) -> None:
    assert own_value in post(client, f"{path}/embeddings", **fields).json()["error"]["message"]


def test_null_is_not_given_and_other_fields_are_ignored(client: TestClient) -> None:
    nothing = dict.fromkeys(
        ("encoding_format", "dimensions", "input_type", "truncate", *NOT_OFFERED)
    )
    answer = post(client, **nothing, user="someone", timeout=3, metadata={"a": [1]})
    assert answer.status_code == 200
    assert answer.json()["data"][0]["embedding"] == vectors_of(["a text"])[0]


def test_empty_text_has_a_vector_as_in_files(client: TestClient) -> None:
    for texts in ("", ["", "a"]):
        answer = post(client, input=texts).json()
        assert answer["data"][0]["embedding"] == vectors_of([""])[0]


def test_dimensions_are_cut_and_scaled_as_files_are(client: TestClient, spaces: FakeSpaces) -> None:
    expected = spaces.only.converted(np.array(vectors_of(["red"]), np.float32), 8)
    assert expected.shape == (1, 8) and np.linalg.norm(expected) == pytest.approx(1)
    for encoding_format in ("float", "base64"):
        answer = post(client, input="red", dimensions=8, encoding_format=encoding_format).json()
        vector = answer["data"][0]["embedding"]
        found = (
            np.frombuffer(b64decode(vector), "<f4")
            if isinstance(vector, str)
            else np.array(vector, np.float32)
        )
        np.testing.assert_array_equal(found, expected[0])


def test_large_answer_is_the_same_as_small_ones(client: TestClient) -> None:
    texts = [f"{number} " + "x" * 50 for number in range(MAX_TEXTS)]
    for encoding_format in ("float", "base64"):
        whole = post(client, input=texts, encoding_format=encoding_format).json()["data"]
        assert [each["index"] for each in whole] == list(range(MAX_TEXTS))
        last = post(client, input=texts[-1], encoding_format=encoding_format).json()["data"]
        assert whole[-1]["embedding"] == last[0]["embedding"]


def test_truncated_texts_are_named_in_a_header(client: TestClient) -> None:
    long = "word " * (LONGEST + 1)
    for texts, rows in (
        ([long], "0"),
        (["short", long, long], "1-2"),
        ([long, "short", "short", long, "short", long, long, long, "short"], "0,3,5-7"),
        ([long] * MAX_TEXTS, f"0-{MAX_TEXTS - 1}"),
    ):
        assert post(client, input=texts, truncate=True).headers["surge-truncated-rows"] == rows
    assert "surge-truncated-rows" not in post(client, input=["short"], truncate=True).headers


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (TooLong([0, 2], 8), 400, "context_length_exceeded"),
        (RequestTooLarge("too many tokens"), 400, "request_too_large"),
        (UnusableText(1, "it ended every worker"), 400, "unusable_text"),
        (Overloaded("too much waits", 0.0421), 429, "rate_limit_exceeded"),
        (SpaceLoading("it is loaded", 1.5), 503, "space_loading"),
        (LaneDown("no worker"), 503, "encoder_down"),
        (LaneClosed("it ends"), 503, "shutting_down"),
    ],
)
@pytest.mark.parametrize("is_late", [False, True], ids=["raised", "of the future"])
def test_error_of_a_lane_has_a_status_and_says_when_to_come_back(
    client: TestClient,
    spaces: FakeSpaces,
    failure: Exception,
    status: int,
    code: str,
    is_late: bool,
) -> None:
    lane = spaces.only.queries
    if is_late:
        lane.fails_later = failure
    else:
        lane.failure = failure
    try:
        answer = post(client, input="red")
    finally:
        lane.failure = lane.fails_later = None
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert str(failure) in answer.json()["error"]["message"]
    waits = {"rate_limit_exceeded": ("43", "1"), "space_loading": ("1500", "2")}.get(
        code, ("1000", "1")
    )
    found = answer.headers.get("retry-after-ms"), answer.headers.get("retry-after")
    assert found == (waits if status in (429, 503) else (None, None))
    if isinstance(failure, TooLong):
        assert "0, 2" in str(failure) and "`truncate: true`" in answer.json()["error"]["message"]


def test_unforeseen_error_is_an_error_object(spaces: FakeSpaces) -> None:
    spaces.only.queries.failure = ZeroDivisionError("a secret")
    try:
        client = TestClient(
            service_app(spaces.as_served(), ServiceSettings()), raise_server_exceptions=False
        )
        answer = post(client, input="red")
    finally:
        spaces.only.queries.failure = None
    assert answer.status_code == 500 and "a secret" not in answer.text
    assert answer.json()["error"]["type"] == "server_error"


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"content-type": "application/x-www-form-urlencoded"}, "unsupported_media_type"),
        ({"content-type": ""}, "unsupported_media_type"),
        (
            {"content-type": "application/json", "content-encoding": "gzip"},
            "unsupported_content_encoding",
        ),
    ],
)
def test_other_types_and_compressed_bodies_are_refused(
    client: TestClient, headers: dict[str, str], code: str
) -> None:
    body = json.dumps({"model": "current", "input": "red"})
    answer = client.post("/v1/embeddings", content=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (415, code)
    with_charset = {
        "content-type": "Application/JSON; charset=utf-8",
        "content-encoding": "identity",
    }
    assert client.post("/v1/embeddings", content=body, headers=with_charset).status_code == 200
