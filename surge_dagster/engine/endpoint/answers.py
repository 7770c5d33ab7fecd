"""Requests and answers of `/v1/embeddings`, as JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_LONGEST_SHOWN = 200
_MOST_TOKENS_PER_BYTE = 4
_MOST_TOKENS_PER_TEXT = 1_000  # of a prompt that the server sets before each


class UnusableAnswer(Exception):
    """The vectors of an answer do not match the inputs of its request; the text says why."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The vectors of a request.

    Attributes:
        vectors: float32 [inputs, dimension].
        tokens: that the server counted; None if it does not say.
    """

    vectors: np.ndarray
    tokens: int | None = None


def request_body(
    model: str, texts: Sequence[str], fields: str, dimensions: int | None
) -> dict[str, Any]:
    """Return the body of a request.

    Args:
        dimensions: that the vectors should have; None leaves it to the model.
    """
    body = json.loads(fields)
    body |= {"model": model, "input": list(texts), "encoding_format": "base64"}
    if dimensions is not None:
        body["dimensions"] = dimensions
    return body


def read_answer(
    content: bytes, inputs: int, dimension: int | None, key: str | None = None
) -> Answer:
    """Return the vectors of an answer, in the order of the inputs.

    Args:
        dimension: that is expected; None expects that of the first vector.
        key: that no message may show.

    Raises:
        UnusableAnswer: it has not one vector of that dimension for each input.
    """
    try:
        return _read_answer(content, inputs, dimension)
    except UnusableAnswer:
        raise
    except Exception as error:  # such as RecursionError: a server may write anything
        raise UnusableAnswer(
            f"the answer is not a list of embeddings ({error!r}): {shown(content, key)}"
        ) from None


def _read_answer(content: bytes, inputs: int, dimension: int | None) -> Answer:
    document = json.loads(content)
    rows = [(entry.get("index", place), entry["embedding"]) for place, entry in _data(document)]
    if len(rows) != inputs:
        raise UnusableAnswer(f"the answer has {len(rows)} vectors for {inputs} inputs")
    if {place for place, _ in rows} != set(range(inputs)):
        raise UnusableAnswer(f"the indexes of the answer's vectors are not 0 to {inputs - 1}")

    decoded = {place: _decoded(embedding) for place, embedding in rows}
    if dimension is None:
        dimension = len(decoded[0])
    if dimension == 0:
        raise UnusableAnswer("the first vector is empty, or is neither base64 nor numbers")
    vectors = np.empty((inputs, dimension), np.float32)
    for place, vector in decoded.items():
        if len(vector) != dimension:
            raise UnusableAnswer(f"a vector has {len(vector)} numbers, expected {dimension}")
        vectors[place] = vector
    return Answer(vectors, _tokens(document))


def plausible_tokens(tokens: int | None, texts: Sequence[str]) -> int | None:
    """Return the tokens that a server counted in texts; None if they cannot be so many."""
    size = sum(len(text.encode()) for text in texts)
    most = _MOST_TOKENS_PER_BYTE * size + _MOST_TOKENS_PER_TEXT * len(texts)
    if tokens is None or not len(texts) <= tokens <= most:
        return None
    return tokens


def shown(content: bytes, key: str | None = None) -> str:
    """Return the begin of what a server wrote, for messages, without the key."""
    if key is not None:
        content = content.replace(key.encode(), b"***")
    return " ".join(content[: 4 * _LONGEST_SHOWN].decode(errors="replace").split())[:_LONGEST_SHOWN]


def _data(document: Any) -> enumerate[Any]:
    data = document["data"]
    if not isinstance(data, list):
        raise TypeError("data is not a list")
    return enumerate(data)


def _tokens(document: Any) -> int | None:
    usage = document.get("usage")
    if not isinstance(usage, dict):
        return None
    counted = usage.get("prompt_tokens", usage.get("total_tokens"))
    return counted if isinstance(counted, int) else None


def _decoded(embedding: Any) -> np.ndarray:
    """Return a vector in base64 or as numbers; an empty one if it is neither."""
    try:
        if isinstance(embedding, str):
            return np.frombuffer(base64.b64decode(embedding, validate=True), "<f4")
        return np.array(embedding, np.float32).reshape(len(embedding))
    except (ValueError, TypeError, OverflowError):
        return np.empty(0, np.float32)
