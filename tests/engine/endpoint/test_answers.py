"""Answers of `/v1/embeddings`: every input has its vector, or a reason why it has none."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest

from surge_dagster.engine.endpoint.answers import WrongRows, read_answer, request_body

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
    assert answer.wrong == ()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"<html>", "is not a list of embeddings"),
        (b'{"data": 3}', "is not a list of embeddings"),
        (b"[]", "is not a list of embeddings"),
        (_content(_entry(0, [1.0, 0.0])), "has 1 vectors for 2 inputs"),
        (_content(_entry(0, [1.0, 0.0]), _entry(0, [1.0, 0.0])), "indexes"),
        (_content(_entry(1, [1.0, 0.0]), _entry(2, [1.0, 0.0])), "indexes"),
    ],
)
def test_all_inputs_are_wrong_if_vectors_cannot_be_matched(content: bytes, reason: str) -> None:
    answer = read_answer(content, 2, 2)

    [wrong] = answer.wrong
    assert (wrong.start, wrong.stop) == (0, 2)
    assert reason in wrong.reason


@pytest.mark.parametrize(
    ("embedding", "reason"),
    [
        ([1.0, float("nan")], "not finite"),
        ([1.0, float("inf")], "not finite"),
        ([1.0], "has 1 numbers, expected 2"),
        ("/", "has 0 numbers, expected 2"),
        (None, "has 0 numbers, expected 2"),
        ([[1.0, 0.0]], "has 0 numbers, expected 2"),
    ],
)
def test_only_the_input_of_an_unusable_vector_is_wrong(embedding: Any, reason: str) -> None:
    content = _content(_entry(0, VECTORS[0].tolist()), _entry(1, embedding))

    answer = read_answer(content, 2, 2)

    [wrong] = answer.wrong
    assert (wrong.start, wrong.stop) == (1, 2)
    assert reason in wrong.reason
    assert np.array_equal(answer.vectors[0], VECTORS[0])


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


def test_body_has_further_fields_and_the_requested_dimensions() -> None:
    body = request_body("m", ["red"], '{"input_type": "search_document"}', 64)

    assert body == {
        "model": "m",
        "input": ["red"],
        "encoding_format": "base64",
        "dimensions": 64,
        "input_type": "search_document",
    }


def test_wrong_rows_are_moved_to_their_place_in_a_portion() -> None:
    assert WrongRows(1, 3, "why").moved(10) == WrongRows(11, 13, "why")
