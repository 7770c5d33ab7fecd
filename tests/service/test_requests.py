"""What a body may hold, and what each wrong one is answered."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from surge_dagster.service.embeddings import MAX_TEXTS, NOT_OFFERED
from surge_dagster.service.errors import Refusal
from surge_dagster.service.spaces import converted
from tests.service.fake_spaces import LONGEST, FakeSpaces, error_of, post, vectors_of
from tests.service.running import client_of

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def spaces() -> FakeSpaces:
    return FakeSpaces()


@pytest.fixture(scope="module")
def client(spaces: FakeSpaces) -> Iterator[TestClient]:
    with client_of(spaces) as client:
        yield client


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"input": []}, "input", "at least 1 item"),
        ({"input": ["a"] * (MAX_TEXTS + 1)}, "input", "at most 2048 items"),
        ({"input": None}, "input", "valid list"),
        ({"input": {"text": "a"}}, "input", "valid list"),
        ({"input": ["a", None]}, "input.1", "valid string"),
        ({"input": [True]}, "input.0", "valid string"),
        ({"input": [1, 2, 3]}, "input", "check_embedding_ctx_length=False"),
        ({"input": [[1, 2], [3]]}, "input", "check_embedding_ctx_length=False"),
        ({"model": None}, "model", "valid string"),
        ({"encoding_format": "bytes"}, "encoding_format", "'float' or 'base64'"),
        ({"dimensions": 7}, "dimensions", "Use 16 or 8"),
        ({"dimensions": "8"}, "dimensions", "valid integer"),
        ({"dimensions": True}, "dimensions", "valid integer"),
        ({"input_type": "passage"}, "input_type", "'document' or 'query'"),
        ({"truncate": "END"}, "truncate", "valid boolean"),
        ({"input": ["a " * 1_000] * 2_047 + [3]}, "input.2047", "valid string"),
    ],
)
def test_wrong_field_is_refused_with_what_was_expected(
    client: TestClient, fields: dict[str, Any], param: str, said: str
) -> None:
    error = error_of(post(client, **fields), 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert said in error["message"]
    assert len(error["message"]) < 400


def test_half_of_a_surrogate_pair_is_refused(client: TestClient) -> None:
    body = json.dumps({"model": "current", "input": "\ud800"})
    answer = client.post("/v1/embeddings", content=body, headers=JSON)
    assert "surrogates not allowed" in error_of(answer, 400)["message"]


@pytest.mark.parametrize("field", ["input", "model"])
def test_missing_field_is_named(client: TestClient, field: str) -> None:
    body = {"input": "a", "model": "current"}
    del body[field]
    error = error_of(client.post("/v1/embeddings", json=body), 400)
    assert error["code"] == "missing_required_parameter"
    assert error["param"] == field


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"text"', b'{"a":"\xff"}', b"[" * 200])
def test_body_that_is_no_json_object_is_refused(client: TestClient, body: bytes) -> None:
    answer = client.post("/v1/embeddings", content=body, headers=JSON)
    assert error_of(answer, 400)["code"] in ("invalid_json", "invalid_body")


def test_body_without_the_type_of_json_is_refused_with_what_to_send(client: TestClient) -> None:
    answer = client.post("/v1/embeddings", content=b'{"model":"current","input":"a"}')
    assert "Content-Type: application/json" in error_of(answer, 400)["message"]


@pytest.mark.parametrize("name", sorted(NOT_OFFERED))
def test_field_that_would_change_vectors_is_refused(client: TestClient, name: str) -> None:
    error = error_of(post(client, **{name: False}), 400)
    assert error["code"] == "unsupported_parameter"
    assert error["param"] == name


def test_null_is_not_given_and_other_fields_are_ignored(client: TestClient) -> None:
    names = ("encoding_format", "dimensions", "input_type", "truncate", *NOT_OFFERED)
    answer = post(client, **dict.fromkeys(names), user="someone", timeout=3, metadata={"a": [1]})
    assert answer.json()["data"][0]["embedding"] == vectors_of(["a text"])[0]


@pytest.mark.parametrize("texts", ["", ["", "a"]])
def test_empty_text_has_a_vector_as_in_files(client: TestClient, texts: Any) -> None:
    answer = post(client, input=texts).json()
    assert answer["data"][0]["embedding"] == vectors_of([""])[0]


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
def test_dimensions_are_cut_and_scaled_as_files_are(
    client: TestClient, spaces: FakeSpaces, encoding_format: str
) -> None:
    vectors = np.array(vectors_of(["red"]), np.float32)
    expected = converted(spaces.only.space, vectors, 8)[0]

    answer = post(client, input="red", dimensions=8, encoding_format=encoding_format).json()

    found = answer["data"][0]["embedding"]
    if encoding_format == "base64":
        found = np.frombuffer(b64decode(found), "<f4")
    assert np.array_equal(np.array(found, np.float32), expected)
    assert np.linalg.norm(expected) == pytest.approx(1)


def test_large_answer_is_the_same_as_small_ones(client: TestClient) -> None:
    texts = [f"{number} " + "x" * 50 for number in range(MAX_TEXTS)]
    whole = post(client, input=texts).json()["data"]
    [last] = post(client, input=texts[-1]).json()["data"]
    assert [each["index"] for each in whole] == list(range(MAX_TEXTS))
    assert whole[-1]["embedding"] == last["embedding"]


LONG = "word " * (LONGEST + 1)


@pytest.mark.parametrize(
    ("texts", "rows"),
    [
        ([LONG], "0"),
        (["short", LONG, LONG], "1-2"),
        ([LONG, "short", "short", LONG, "short", LONG, LONG, LONG, "short"], "0,3,5-7"),
        ([LONG] * MAX_TEXTS, f"0-{MAX_TEXTS - 1}"),
        (["short"], None),
    ],
)
def test_truncated_texts_are_named_in_a_header(
    client: TestClient, texts: list[str], rows: str | None
) -> None:
    answer = post(client, input=texts, truncate=True)
    assert answer.headers.get("surge-truncated-rows") == rows


@pytest.mark.parametrize("attribute", ["failure", "fails_later"])
@pytest.mark.parametrize(
    ("status", "kind", "seconds"),
    [
        (400, "invalid_request_error", None),
        (429, "rate_limit_error", "43"),
        (503, "server_error", "43"),
    ],
)
def test_error_of_a_lane_has_a_status_and_says_when_to_come_back(
    client: TestClient,
    spaces: FakeSpaces,
    monkeypatch: pytest.MonkeyPatch,
    attribute: str,
    status: int,
    kind: str,
    seconds: str | None,
) -> None:
    error = Refusal(status, "a_code", "a message", "input", retry_after_seconds=0.0421)
    monkeypatch.setattr(spaces.only.queries, attribute, error)

    answer = post(client)

    shown = {"message": "a message", "type": kind, "param": "input", "code": "a_code"}
    assert error_of(answer, status) == shown
    assert answer.headers.get("retry-after-ms") == seconds


def test_defect_is_answered_without_its_text(
    client: TestClient, spaces: FakeSpaces, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spaces.only.queries, "failure", RuntimeError("secret"))
    answer = post(client)
    error = error_of(answer, 500)
    assert error["code"] == "internal_error"
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"] in error["message"]
