"""Embeddings and models in the shapes of OpenAI's API: requests, answers, and their paths.

A field that would change a vector and is not offered is refused: ignoring it would give the client
other vectors than it asked for. Other unknown fields are ignored, and `null` is a field that is not
given. An empty text is a text as any other, as in the files.

A lane returns a future, so no thread waits for an encoder. Large requests are tokenized in threads.
Large answers are written there, in pieces: the next one when the client has read the last one.
"""

from __future__ import annotations

import asyncio
import time
from base64 import b64encode
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from fastapi import APIRouter
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError, to_json
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from surge_dagster.engine.model.prompts import Task
from surge_dagster.service.errors import Refusal
from surge_dagster.service.lane import Encoded
from surge_dagster.service.spaces import ServedSpace, ServedSpaces, converted

ROOTS = ("/v1", "/documents/v1")  # of base URLs
MAX_TEXTS = 2048
# Characters of texts, and numbers of an answer, that take about two milliseconds.
_LARGE_REQUEST = 4 * 1024
_PIECE_NUMBERS = 16 * 1024
_READ_SECONDS = 1.0
_ITEM = '{"object":"embedding","index":%d,"embedding":%s}'  # the JSON of an `Embedding`
T = TypeVar("T")


def _listed(value: Any) -> Any:
    """Return one text as a list, and refuse token ids in words."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and (type(value[0]) is int or isinstance(value[0], list)):
        raise PydanticCustomError(
            "tokens_not_supported",
            "it holds tokens, and those of another tokenizer would give vectors of other texts. "
            "Send texts; in LangChain, set check_embedding_ctx_length=False",
        )
    return value


def _encodable(texts: list[str]) -> list[str]:
    """Refuse half of a surrogate pair, which is no character."""
    for text in texts:
        text.encode()
    return texts


Texts = Annotated[
    list[str],
    Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True),
    BeforeValidator(_listed, json_schema_input_type=str | list[str]),
    AfterValidator(_encodable),
]


class EmbeddingRequest(BaseModel):
    """The body of `POST …/embeddings`."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    input: Texts = Field(description=f"a text, or up to {MAX_TEXTS:,}")
    model: str = Field(description="name of a space or of a model, or `current`")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64 is of float32, little endian"
    )
    dimensions: int | None = Field(None, description="one of those that GET /v1/models lists")
    input_type: Task | None = Field(
        None, description="how the texts are encoded (default: as the path says)"
    )
    truncate: bool | None = Field(
        None, description="whether texts that the model cannot read whole are cut"
    )


# Fields by which other servers change a vector.
NOT_OFFERED = frozenset(
    """
    add_special_tokens chat_template dimensionality embed_dtype embedding_type embedding_types
    endianness images instruction late_chunking long_text_mode max_length max_tokens messages
    modality normalize normalize_embeddings normalized output_dimension output_dimensionality
    output_dtype output_value precision prompt prompt_name return_multivector task task_type
    truncate_dim truncate_prompt_tokens truncation truncation_direction truncation_side
    use_activation
    """.split()  # noqa: SIM905
)


def require_offered(request: EmbeddingRequest, served: ServedSpace) -> None:
    """Refuse fields and dimensions that the space does not have.

    Raises:
        Refusal: the message says where the space's own values are.
    """
    name = served.space.name
    for field, value in (request.model_extra or {}).items():
        if field in NOT_OFFERED and value is not None:
            message = (
                f"The field {field!r} would change the vectors. Leave it out; "
                f"GET /v1/models/{name} says how the space encodes texts."
            )
            raise Refusal(400, "unsupported_parameter", message, field)
    if request.dimensions not in (None, *served.dimensions):
        known = " or ".join(map(str, served.dimensions))
        message = (
            f"The field 'dimensions' is {request.dimensions}. Use {known}, which the space {name} "
            "has."
        )
        raise Refusal(400, "invalid_value", message, "dimensions")


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
    """A space that is served, and what its vectors follow from; most fields are its own."""

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


def embedding_json(frame: str, vectors: np.ndarray, encoding_format: str | None) -> Iterator[str]:
    """Yield the JSON of a frame in pieces, with float32 vectors [texts, dimension] in its `data`.

    Numbers are the float64 that they are equal to: both formats are the same to the last bit.

    Args:
        frame: the JSON of an `EmbeddingList` without data, or of something that contains one.
    """
    begin, end = frame.split('"data":[]', 1)
    yield f'{begin}"data":['
    rows = max(1, _PIECE_NUMBERS // vectors.shape[1])
    for start in range(0, len(vectors), rows):
        piece = list[str]()
        for index, row in enumerate(np.ascontiguousarray(vectors[start : start + rows], "<f4")):
            if encoding_format == "base64":
                embedding = f'"{b64encode(row).decode()}"'
            else:
                embedding = to_json(row.tolist()).decode()
            piece.append(_ITEM % (start + index, embedding))
        yield ("," if start else "") + ",".join(piece)
    yield f"]{end}"


def empty_list(space: str, tokens: int) -> EmbeddingList:
    """Return the frame of an answer without its vectors."""
    usage = Usage(prompt_tokens=tokens, total_tokens=tokens)
    return EmbeddingList(data=[], model=space, usage=usage)


def truncation_headers(truncated: np.ndarray) -> dict[str, str]:
    """Return the header that lists truncated rows, as `3,5-9`: with all of 2,048 it would be longer
    than proxies take."""
    rows = np.flatnonzero(truncated)
    ranges = list[str]()
    for run in np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1):
        if len(run):
            ranges.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]))
    return {"surge-truncated-rows": ",".join(ranges)} if ranges else {}


def task_of(request: Request) -> Task:
    """Return how the base URL of a request says that texts are encoded."""
    return "document" if request.url.path.startswith(f"{ROOTS[1]}/") else "query"


class EmbeddingRoutes:
    """The paths for embeddings and models.

    Args:
        most_bytes: of vectors whose answers are not sent yet, when another request comes: a client
            may read slowly.
    """

    def __init__(self, spaces: ServedSpaces, most_bytes: int) -> None:
        self.router = APIRouter()
        self._spaces = spaces
        self._most_bytes = most_bytes
        self._unsent_bytes = 0
        # Threads for documents are busy for seconds, and must keep no query waiting.
        self._threads = {"query": ThreadPoolExecutor(2), "document": ThreadPoolExecutor(1)}
        self._began = int(time.time())
        self.router.post("/embeddings", response_model=EmbeddingList)(self.create_embeddings)
        self.router.get("/models")(self.list_models)
        self.router.get("/models/{name:path}")(self.retrieve_model)

    async def create_embeddings(self, request: Request, body: EmbeddingRequest) -> Response:
        """Encode texts; the path says whether as queries or as documents."""
        served = self._spaces.find(body.model)
        require_offered(body, served)
        task = body.input_type or task_of(request)
        lane = served.queries if task == "query" else served.documents
        size = 4 * len(body.input) * lane.space.dimension
        request.state.until_sent.enter_context(self._hold(size))
        future = Future[Encoded]()
        accept = partial(
            lane.accept,
            body.input,
            arrived_at=request.state.arrived_at,
            truncate=body.truncate is True,
            future=future,
        )
        try:
            if sum(map(len, body.input)) <= _LARGE_REQUEST:
                accept()
            else:
                loop = asyncio.get_running_loop()
                await _unless_gone(request, loop.run_in_executor(self._threads[task], accept))
            request.state.lane = lane
            encoded = await _unless_gone(request, asyncio.wrap_future(future))
        finally:
            future.cancel()  # which drops its texts, however far they have come
        return _written(served, body, encoded)

    async def list_models(self) -> ModelList:
        """List the spaces that are served."""
        return ModelList(data=[self._model_of(served) for served in self._spaces.served])

    async def retrieve_model(self, name: str) -> Model:
        """Describe the space of this name or of this model."""
        return self._model_of(self._spaces.find(name))

    @contextmanager
    def _hold(self, size: int) -> Iterator[None]:
        """Count so many bytes during the block; raises `Refusal` if too much is held."""
        if self._unsent_bytes > self._most_bytes:
            message = (
                f"Answers of {self._unsent_bytes:,} bytes are not sent yet, which is more than "
                f"{self._most_bytes:,}. Read them, or send the request again later."
            )
            raise Refusal(429, "answers_unread", message, retry_after_seconds=_READ_SECONDS)
        self._unsent_bytes += size
        try:
            yield
        finally:
            self._unsent_bytes -= size

    def _model_of(self, served: ServedSpace) -> Model:
        space = served.space
        promise = served.queries.promise
        own = {
            "id": space.name,
            "created": self._began,
            "model": space.requested.model,
            "state": served.state,
            "dimensions": served.dimensions,
            "promise": asdict(promise) if promise else None,
        }
        return Model.model_validate(asdict(space) | own)


def _written(served: ServedSpace, body: EmbeddingRequest, encoded: Encoded) -> Response:
    headers = {"surge-space": served.space.name} | truncation_headers(encoded.truncated)
    frame = empty_list(served.space.name, encoded.tokens)
    vectors = converted(served.space, encoded.vectors, body.dimensions)
    pieces = embedding_json(frame.model_dump_json(), vectors, body.encoding_format)
    if vectors.size > _PIECE_NUMBERS:  # written in threads, as fast as the client reads
        return StreamingResponse(pieces, headers=headers, media_type="application/json")
    return Response("".join(pieces), headers=headers, media_type="application/json")


async def _unless_gone(request: Request, step: asyncio.Future[T]) -> T:
    """Return the result of a step for a request whose body was read.

    Raises:
        Refusal: the client has closed its connection, or the service ends before the step does.
    """
    leaving = asyncio.ensure_future(request.receive())  # only a disconnect can come
    try:
        await asyncio.wait((step, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not step.done():
            raise Refusal(499, "client_gone", "The client has closed its connection.")
        return step.result()
    except asyncio.CancelledError:  # by uvicorn, when the time to drain is over
        message = "The service ends before this request is answered. Send it again."
        raise Refusal(503, "shutting_down", message) from None
    finally:
        step.cancel()
        leaving.cancel()
