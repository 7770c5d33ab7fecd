"""Answers of the service, in the shapes of OpenAI's API."""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, Field, TypeAdapter

from surge_dagster.service.spaces import ServedSpace


class Embedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Usage(BaseModel):
    prompt_tokens: int = Field(
        description="tokens that were encoded, special ones and those of the prompt included"
    )
    total_tokens: int


class EmbeddingList(BaseModel):
    object: Literal["list"]
    data: list[Embedding]
    model: str = Field(description="name of the space")
    usage: Usage


class Model(BaseModel):
    """A space that is served, and what its vectors follow from."""

    id: str = Field(description="name of the space")
    object: Literal["model"] = "model"
    created: int = Field(description="when this service began, in seconds since 1970")
    owned_by: str = "surge-dagster"
    model: str
    state: str = Field(description="current, next (the newest begun one), or draining (an old one)")
    dimension: int
    dimensions: list[int] = Field(description="what the field `dimensions` of a request may be")
    max_length: int = Field(description="tokens of a text that the model reads")
    normalize: bool
    query_prompt: str
    document_prompt: str
    promise: dict[str, Any] | None = Field(
        description="seconds for an accepted query, and what they follow from"
    )


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class ErrorFacts(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class Error(BaseModel):
    error: ErrorFacts


_TEXT, _NUMBER = {"type": "string"}, {"type": "integer"}
_WHEN = {
    "Retry-After": {
        "description": "seconds after which another attempt is worth it",
        "schema": _NUMBER,
    },
    "retry-after-ms": {"description": "the same in milliseconds", "schema": _NUMBER},
}
# Of each operation, for the OpenAPI document.
ANY_REFUSAL: dict[int | str, dict[str, Any]] = {
    429: {"description": "not now", "model": Error, "headers": _WHEN},
    503: {"description": "not now", "model": Error, "headers": _WHEN},
    "4XX": {"description": "refused", "model": Error},
    "5XX": {"description": "failed", "model": Error},
}
OF_VECTORS: dict[int | str, dict[str, Any]] = {
    200: {
        "headers": {
            "surge-space": {"description": "name of the space of the vectors", "schema": _TEXT},
            "surge-truncated-rows": {
                "description": "indexes of texts that were cut, as 3,5-9",
                "schema": _TEXT,
            },
        }
    }
}
_NUMBERS = TypeAdapter(list[float])


def embeddings_body(
    vectors: np.ndarray, encoding_format: str | None, space: str, tokens: int
) -> bytes:
    """The JSON of an `EmbeddingList`, from float32 vectors [texts, dimension].

    Numbers are written as the float64 that they are equal to: both formats are the same to the last
    bit.
    """
    if encoding_format == "base64":
        written = [b'"%b"' % b64encode(row) for row in np.ascontiguousarray(vectors, "<f4")]
    else:
        written = [_NUMBERS.dump_json(row.tolist()) for row in vectors]
    data = b",".join(
        b'{"object":"embedding","index":%d,"embedding":%b}' % row for row in enumerate(written)
    )
    rest = {"model": space, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
    return b'{"object":"list","data":[%b],%b' % (data, json.dumps(rest).encode()[1:])


def row_ranges(chosen: np.ndarray) -> str:
    """Indexes of what is true, as `3,5-9`: a header that named all of 2,048 would be longer than
    proxies take."""
    rows = np.flatnonzero(chosen)
    runs = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1) if len(rows) else []
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def model_of(served: ServedSpace, created: int) -> Model:
    space, promise = served.space, served.queries.promise
    facts = ("dimension", "max_length", "normalize", "query_prompt", "document_prompt")
    return Model(
        id=space.name,
        created=created,
        model=space.requested.model,
        state=served.state,
        dimensions=list(served.dimensions),
        promise=promise.as_dict() if promise else None,
        **{name: getattr(space, name) for name in facts},
    )
