"""Answers of the service, in the shapes of OpenAI's API."""

from __future__ import annotations

from base64 import b64encode
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, Field

from surge_dagster.service.errors import Error
from surge_dagster.service.spaces import ServedSpace


class Embedding(BaseModel):
    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class Usage(BaseModel):
    prompt_tokens: int = Field(
        description="tokens that were encoded, special ones and those of the prompt included"
    )
    total_tokens: int


class EmbeddingList(BaseModel):
    object: Literal["list"] = "list"
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
    state: str = Field(description="current, or next (the newest begun one)")
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


class Status(BaseModel):
    status: Literal["ok"] = "ok"


# Of each operation, for the OpenAPI document.
ANY_REFUSAL: dict[int | str, dict[str, Any]] = {
    "4XX": {"description": "refused; 429 has the header Retry-After", "model": Error},
    "5XX": {"description": "failed; 503 has the header Retry-After", "model": Error},
}


def embedding_list(
    vectors: np.ndarray, encoding_format: str | None, space: str, tokens: int
) -> EmbeddingList:
    """Return the answer with float32 vectors [texts, dimension]; it is not validated.

    Numbers are the float64 that they are equal to: both formats are the same to the last bit.
    """
    data = list[Embedding]()
    for index, row in enumerate(np.ascontiguousarray(vectors, "<f4")):
        embedding = b64encode(row).decode() if encoding_format == "base64" else row.tolist()
        data.append(Embedding.model_construct(index=index, embedding=embedding))
    usage = Usage(prompt_tokens=tokens, total_tokens=tokens)
    return EmbeddingList.model_construct(data=data, model=space, usage=usage)


def row_ranges(chosen: np.ndarray) -> str:
    """Return the indexes of what is true, as `3,5-9`: a header with all of 2,048 would be longer
    than proxies take."""
    rows = np.flatnonzero(chosen)
    ranges = list[str]()
    for run in np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1):
        if len(run):
            ranges.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]))
    return ",".join(ranges)


def model_of(served: ServedSpace, created: int) -> Model:
    space = served.space
    promise = served.queries.promise
    return Model(
        id=space.name,
        created=created,
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
