"""Answers of the service, in the shapes of OpenAI's API."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, Field
from pydantic_core import to_json

from surge_dagster.service.spaces import ServedSpace


class Embedding(BaseModel):
    """The vector of one text; base64 is that of its float32 numbers in little endian."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Usage(BaseModel):
    """Tokens that were encoded, special ones and the prompt's included."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(BaseModel):
    """The vectors in the order of the texts; `model` is the name of their space."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: Usage


class Model(BaseModel):
    """A space that is served."""

    id: str = Field(description="Name of the space")
    object: Literal["model"]
    created: int = Field(description="When this service began, in seconds since 1970")
    owned_by: str
    model: str = Field(description="Name of the model that encodes into the space")
    state: str = Field(description="current, next (the newest begun one), or draining (an old one)")
    dimension: int
    dimensions: list[int] = Field(description="What `dimensions` of a request may be")
    max_length: int = Field(description="Tokens of a text that the model reads")
    normalize: bool
    query_prompt: str
    document_prompt: str
    promise: dict[str, Any] | None = Field(
        description="Seconds within which a query that is accepted is answered, and the constants that they follow from"
    )


class ModelList(BaseModel):
    """The spaces that are served."""

    object: Literal["list"]
    data: list[Model]


class ErrorFacts(BaseModel):
    """What was expected, what came and what to do."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """The answer to a request that was refused, or that failed."""

    error: ErrorFacts


def embeddings_body(vectors: np.ndarray, encoding_format: str, space: str, tokens: int) -> bytes:
    """The JSON of an `EmbeddingList`, from float32 vectors [n, dimension].

    Numbers are those of float64 that are equal to the float32 ones, so that both formats are the same to the last bit.
    """
    if encoding_format == "base64":
        rows = np.ascontiguousarray(vectors, "<f4")
        written: Sequence[bytes] = [b'"%b"' % b64encode(row) for row in rows]
    else:
        written = [to_json(row.tolist()) for row in vectors]
    data = b",".join(b'{"object":"embedding","index":%d,"embedding":%b}' % row for row in enumerate(written))
    usage = to_json({"prompt_tokens": tokens, "total_tokens": tokens})
    return b'{"object":"list","data":[%b],"model":%b,"usage":%b}' % (data, to_json(space), usage)


def model_of(served: ServedSpace, created: int) -> Model:
    space, promise = served.space, served.queries.promise
    return Model(
        id=space.name,
        object="model",
        created=created,
        owned_by="surge-dagster",
        model=space.requested.model,
        state=served.state,
        dimension=space.dimension,
        dimensions=list(served.dimensions),
        max_length=space.max_length,
        normalize=space.normalize,
        query_prompt=space.query_prompt,
        document_prompt=space.document_prompt,
        promise=promise.as_dict() if promise else None,
    )
