"""Requests for embeddings: what a body may hold, and what a wrong one is answered.

A field that would change a vector and is not offered is refused, with the space's own value: ignoring it would give the
client vectors of another kind than it asked for. Other unknown fields are ignored, and `null` is a field that is not
given. An empty text is a text as any other, as in the files.
"""

from __future__ import annotations

import asyncio
import reprlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails
from starlette.requests import Request

from surge_dagster.engine.model.prompts import Task
from surge_dagster.engine.model.spec import Space
from surge_dagster.service.errors import ClientError
from surge_dagster.service.settings import ServiceSettings
from surge_dagster.service.spaces import ServedSpace

MAX_TEXTS = 2048
# Times the limit that a body may have for its client to be answered: it reads no answer before it has sent all.
_READ_ON = 4

Texts = Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS)]


class EmbeddingRequest(BaseModel):
    """The body of `POST …/embeddings`."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    input: str | Texts = Field(description="One text, or several; an empty text has a vector, too")
    model: str = Field(description="Name of a space or of a model, or `current`")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="Numbers, or base64 of float32 in little endian. Default: float"
    )
    dimensions: int | None = Field(None, description="Leading dimensions, one of those that GET /v1/models lists")
    input_type: Literal["query", "document"] | None = Field(
        None, description="How the texts are encoded. Default: as the path says"
    )
    truncate: bool | None = Field(
        None, description="Whether texts that are longer than the model reads are cut and not refused. Default: false"
    )

    @property
    def texts(self) -> Sequence[str]:
        return [self.input] if isinstance(self.input, str) else self.input


async def read_body(request: Request, settings: ServiceSettings) -> bytes:
    """The body of a request that holds JSON.

    Raises:
        ClientError: it is of another type, compressed, too large, or takes too long.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ClientError(
            415,
            f"The body has the type {kind or 'of no header'!r}. Send JSON, with the header Content-Type: "
            "application/json.",
            "unsupported_media_type",
            ends_connection=True,
        )
    if (encoding := request.headers.get("content-encoding", "identity").lower()) != "identity":
        raise ClientError(
            415,
            f"The body has the Content-Encoding {encoding!r}. Send it as it is, without compression.",
            "unsupported_content_encoding",
            ends_connection=True,
        )
    limit, size, chunks = settings.max_body_bytes, 0, list[bytes]()
    try:
        async with asyncio.timeout(settings.body_seconds):
            async for chunk in request.stream():
                size += len(chunk)
                if size <= limit:
                    chunks.append(chunk)
                elif size > _READ_ON * limit:
                    break
    except TimeoutError:
        raise ClientError(
            408,
            f"The body did not arrive within {settings.body_seconds:g} s. Send the request again.",
            "request_timeout",
            ends_connection=True,
        ) from None
    if size > limit:
        raise ClientError(
            413,
            f"The body is larger than {limit:,} bytes. Send fewer texts in each request.",
            "request_too_large",
            ends_connection=True,
        )
    return b"".join(chunks)


def parse_request(body: bytes) -> EmbeddingRequest:
    """The request that a body holds.

    Raises:
        ClientError: it is no JSON, or a field is missing or has a value that it cannot have.
    """
    try:
        return EmbeddingRequest.model_validate_json(body)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)
    first = details[0]
    if not first["loc"]:
        raise ClientError(400, f"The body is no JSON object in UTF-8: {first['msg']}.", "invalid_json")
    name = str(first["loc"][0])
    given = None if first["type"] == "missing" else first["input"]
    if given is None:
        expected = "one text or a list of texts" if name == "input" else "the name of a space or a model, or `current`"
        raise ClientError(
            400, f"The field {name!r} is missing: expected {expected}.", "missing_required_parameter", name
        )
    if name == "input":
        raise _wrong_input(given, details)
    message = f"The field {name!r} is {reprlib.repr(given)}: {first['msg'][0].lower()}{first['msg'][1:]}."
    raise ClientError(400, message, "invalid_value", name)


def _wrong_input(given: Any, details: list[ErrorDetails]) -> ClientError:
    if not isinstance(given, list):
        message = f"The field 'input' is {reprlib.repr(given)}: expected one text or a list of texts."
        return ClientError(400, message, "invalid_type", "input")
    if not 1 <= len(given) <= MAX_TEXTS:
        message = f"The field 'input' has {len(given):,} texts: expected 1 to {MAX_TEXTS:,}. Send several requests."
        return ClientError(400, message, "invalid_length", "input")
    if all(isinstance(each, int | list) for each in given[:1]):
        message = (
            "The field 'input' holds tokens: expected texts, which the model's own tokenizer reads; tokens of another "
            "one would give vectors of other texts. In LangChain, set check_embedding_ctx_length=False."
        )
        return ClientError(400, message, "tokens_not_supported", "input")
    row, value = next((each["loc"][-1], each["input"]) for each in details if len(each["loc"]) > 2)
    message = f"The field 'input' has {reprlib.repr(value)} at index {row}: expected a text."
    return ClientError(400, message, "invalid_type", "input")


# Fields by which other servers change a vector, by what they change.
_NOT_OFFERED = {
    "prompt": ("chat_template", "instruction", "messages", "prompt", "prompt_name", "task", "task_type"),
    "length": (
        *("add_special_tokens", "late_chunking", "long_text_mode", "max_length", "max_tokens"),
        *("truncate_prompt_tokens", "truncation", "truncation_direction", "truncation_side"),
    ),
    "normalize": ("normalize", "normalize_embeddings", "normalized", "use_activation"),
    "dimension": ("dimensionality", "output_dimension", "output_dimensionality", "truncate_dim"),
    "dtype": (
        *("embed_dtype", "embedding_type", "embedding_types", "endianness", "output_dtype", "output_value"),
        *("precision", "return_multivector"),
    ),
    "modality": ("images", "modality"),
}
_GROUPS = {name: group for group, names in _NOT_OFFERED.items() for name in names}


def require_offered(request: EmbeddingRequest, served: ServedSpace, task: Task) -> None:
    """Refuse fields and dimensions that the space does not have.

    Raises:
        ClientError: it holds the space's own value.
    """
    given = (name for name, value in (request.model_extra or {}).items() if value is not None)
    if name := next((name for name in given if name in _GROUPS), None):
        raise ClientError(
            400,
            f"The field {name!r} would change the vectors and is not offered: the space {served.space.name} "
            f"{_own_value(_GROUPS[name], served.space, task)}. Leave the field out.",
            "unsupported_parameter",
            name,
        )
    if request.dimensions not in (None, *served.dimensions):
        known = " or ".join(map(str, served.dimensions))
        message = f"The field 'dimensions' is {request.dimensions}: the space {served.space.name} has {known}."
        raise ClientError(400, message, "invalid_value", "dimensions")


def _own_value(group: str, space: Space, task: Task) -> str:
    match group:
        case "prompt":
            prompt = space.query_prompt if task == "query" else space.document_prompt
            return f"puts {prompt!r} before each {task}" if prompt else f"puts no prompt before a {task}"
        case "length":
            return f"reads {space.max_length:,} tokens of a text, and cuts longer ones if `truncate` is true"
        case "normalize":
            return "scales its vectors to length 1" if space.normalize else "does not scale its vectors"
        case "dimension":
            return f"has {space.dimension} dimensions; `dimensions` asks for fewer where it has them"
        case "dtype":
            return "answers one vector of float32 per text; `encoding_format` says how it is written"
        case _:
            return "holds vectors of texts alone"
