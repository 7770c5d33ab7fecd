"""Answers of `/v1/embeddings`: every input has its vector, or the answer cannot be used."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from surge_dagster.engine.endpoint.answers import (
    UnusableAnswer,
    plausible_tokens,
    read_answer,
    request_body,
)

VECTORS = np.array([[0.6, 0.8], [0.0, -1.0]], np.float32)


def _entry(index: int, vector: Any) -> dict[str, Any]:
    return {"index": index, "embedding": vector}


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _content(*entries: dict[str, Any], **further: Any) -> bytes:
    return json.dumps({"data": list(entries), **further}).encode()


@pytest.mark.parametrize(
    "entries",
    [
        [_entry(0, _base64(VECTORS[0])), _entry(1, _base64(VECTORS[1]))],
        [_entry(0, VECTORS[0].tolist()), _entry(1, VECTORS[1].tolist())],
        [_entry(1, _base64(VECTORS[1])), _entry(0, _base64(VECTORS[0]))],
        [{"embedding": _base64(VECTORS[0])}, {"embedding": _base64(VECTORS[1])}],
    ],
    ids=["base64", "numbers", "another order", "no index"],
)
def test_vectors_are_in_the_order_of_the_inputs(entries: list[dict[str, Any]]) -> None:
    answer = read_answer(_content(*entries), 2, 2)

    assert np.array_equal(answer.vectors, VECTORS)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"<html>", "is not a list of embeddings"),
        (b'{"data": 3}', "is not a list of embeddings"),
        (b"[]", "is not a list of embeddings"),
        (b"[" * 100_000 + b"]" * 100_000, "RecursionError"),
        (_content({"index": [0], "embedding": [1.0, 0.0]}, _entry(1, [1.0, 0.0])), "TypeError"),
        (_content(_entry(0, [1.0, 0.0])), "has 1 vectors for 2 inputs"),
        (_content(_entry(0, [1.0, 0.0]), _entry(0, [1.0, 0.0])), "indexes"),
        (_content(_entry(1, [1.0, 0.0]), _entry(2, [1.0, 0.0])), "indexes"),
    ],
)
def test_answer_whose_vectors_cannot_be_matched_is_unusable(content: bytes, reason: str) -> None:
    with pytest.raises(UnusableAnswer, match=reason):
        read_answer(content, 2, 2)


@pytest.mark.parametrize(
    ("embedding", "reason"),
    [
        ([1.0], "has 1 numbers, expected 2"),
        ("/", "has 0 numbers, expected 2"),
        (None, "has 0 numbers, expected 2"),
        ([[1.0, 0.0]], "has 0 numbers, expected 2"),
        ([10**400, 0], "has 0 numbers, expected 2"),
    ],
)
def test_answer_with_a_vector_of_another_length_is_unusable(embedding: Any, reason: str) -> None:
    content = _content(_entry(0, VECTORS[0].tolist()), _entry(1, embedding))

    with pytest.raises(UnusableAnswer, match=reason):
        read_answer(content, 2, 2)


@pytest.mark.parametrize("embedding", ["", [], None])
def test_empty_vectors_are_unusable_if_any_dimension_is_expected(embedding: Any) -> None:
    with pytest.raises(UnusableAnswer, match="the first vector is empty"):
        read_answer(_content(_entry(0, embedding)), 1, None)


@pytest.mark.parametrize("space", [0, 190], ids=["in sight", "at the cut"])
def test_message_about_an_answer_does_not_show_the_key(space: int) -> None:
    content = b"x" * space + b"Bearer open-sesame"

    with pytest.raises(UnusableAnswer) as caught:
        read_answer(content, 1, None, "open-sesame")

    assert "open" not in str(caught.value)


@pytest.mark.parametrize(
    ("usage", "tokens"),
    [
        ({"prompt_tokens": 7, "total_tokens": 9}, 7),
        ({"total_tokens": 9}, 9),
        ({}, None),
        (None, None),
    ],
)
def test_tokens_are_those_that_the_server_counted(usage: Any, tokens: int | None) -> None:
    content = _content(_entry(0, [1.0, 0.0]), usage=usage)

    assert read_answer(content, 1, None).tokens == tokens


@pytest.mark.parametrize(
    ("tokens", "plausible"),
    [(-5, None), (0, None), (1, None), (2, 2), (2_032, 2_032), (2_033, None), (None, None)],
)
def test_tokens_are_at_least_one_of_each_text_and_not_more_than_bytes_allow(
    tokens: int | None, plausible: int | None
) -> None:
    assert plausible_tokens(tokens, ["Größe", "x"]) == plausible


def test_body_has_further_fields_and_the_requested_dimensions() -> None:
    body = request_body("m", ["red"], '{"input_type": "search_document"}', 64)

    assert body == {
        "model": "m",
        "input": ["red"],
        "encoding_format": "base64",
        "dimensions": 64,
        "input_type": "search_document",
    }
