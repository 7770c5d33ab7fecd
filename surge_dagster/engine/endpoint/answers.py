"""Requests and answers of `/v1/embeddings`, as JSON.

An answer with status 200 is paid for and never requested again, whatever it holds: a vector that
cannot be used is a wrong row with its reason. If rows and inputs cannot be matched, all are wrong.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_LONGEST_SHOWN = 200


@dataclass(frozen=True, slots=True)
class WrongRows:
    """Inputs `start` to `stop` of a request, or texts of a portion, that have no vector, and
    why."""

    start: int
    stop: int
    reason: str

    def moved(self, by: int) -> WrongRows:
        return WrongRows(self.start + by, self.stop + by, self.reason)


@dataclass(frozen=True, slots=True)
class Answer:
    """The vectors of a request.

    Attributes:
        vectors: float32 [inputs, dimension]; zeros in wrong rows.
        tokens: that the server counted; None if it does not say.
    """

    vectors: np.ndarray
    wrong: tuple[WrongRows, ...] = ()
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


def read_answer(content: bytes, inputs: int, dimension: int | None) -> Answer:
    """Return the vectors of an answer, in the order of the inputs.

    Args:
        dimension: that is expected; None expects that of the first vector.
    """
    try:
        document = json.loads(content)
        rows = [(entry.get("index", place), entry["embedding"]) for place, entry in _data(document)]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"the answer is not a list of embeddings ({error!r}): {shown(content)}"
        return _all_wrong(inputs, dimension, reason)

    tokens = _tokens(document)
    if len(rows) != inputs:
        reason = f"the answer has {len(rows)} vectors for {inputs} inputs"
        return _all_wrong(inputs, dimension, reason, tokens)
    if {place for place, _ in rows} != set(range(inputs)):
        reason = f"the indexes of the answer's vectors are not 0 to {inputs - 1}"
        return _all_wrong(inputs, dimension, reason, tokens)

    decoded = {place: _decoded(embedding) for place, embedding in rows}
    if dimension is None:
        dimension = len(decoded[0])
    vectors = np.zeros((inputs, dimension), np.float32)
    wrong = list[WrongRows]()
    for place in range(inputs):
        problem = _problem(decoded[place], dimension)
        if problem:
            wrong.append(WrongRows(place, place + 1, problem))
        else:
            vectors[place] = decoded[place]
    return Answer(vectors, tuple(wrong), tokens)


def shown(content: bytes) -> str:
    """Return the begin of what a server wrote, for messages."""
    return " ".join(content[: 4 * _LONGEST_SHOWN].decode(errors="replace").split())[:_LONGEST_SHOWN]


def _data(document: Any) -> enumerate[Any]:
    data = document["data"]
    if not isinstance(data, list):
        raise TypeError("data is not a list")
    return enumerate(data)


def _all_wrong(
    inputs: int, dimension: int | None, reason: str, tokens: int | None = None
) -> Answer:
    vectors = np.zeros((inputs, dimension or 0), np.float32)
    return Answer(vectors, (WrongRows(0, inputs, reason),), tokens)


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
    except (ValueError, TypeError):
        return np.empty(0, np.float32)


def _problem(vector: np.ndarray, dimension: int) -> str:
    if len(vector) != dimension:
        return f"its vector has {len(vector)} numbers, expected {dimension}"
    if not np.isfinite(vector).all():
        return "its vector has a number that is not finite"
    return ""
