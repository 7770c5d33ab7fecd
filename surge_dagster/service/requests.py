"""Requests for embeddings: what a body may hold, and what a wrong one is answered.

A field that would change a vector and is not offered is refused, with the space's own value: ignoring it would give the
client vectors of another kind than it asked for. Other unknown fields are ignored, and `null` is a field that is not
given. An empty text is a text as any other, as in the files.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, create_model

from surge_dagster.engine.model.prompts import Task
from surge_dagster.service.errors import ClientError
from surge_dagster.service.spaces import ServedSpace

MAX_TEXTS = 2048
_NO_TOKENS = (
    "those of another tokenizer would give vectors of other texts. In LangChain, set check_embedding_ctx_length=False"
)


class EmbeddingRequest(BaseModel):
    """The body of `POST …/embeddings`."""

    model_config = ConfigDict(strict=True, frozen=True)

    input: str | Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]
    model: str = Field(description="name of a space or of a model, or `current`")
    encoding_format: Literal["float", "base64"] | None = Field(None, description="base64 is of float32, little endian")
    dimensions: int | None = Field(None, description="leading ones, as many as GET /v1/models lists")
    input_type: Literal["query", "document"] | None = Field(
        None, description="how the texts are encoded (default: as the path says)"
    )
    truncate: bool | None = Field(None, description="whether texts that the model cannot read whole are cut")
    _not_offered: str = PrivateAttr("")  # name of such a field, if one was given

    @property
    def texts(self) -> Sequence[str]:
        return [self.input] if isinstance(self.input, str) else self.input


# Fields by which other servers change a vector, by what they change.
_NOT_OFFERED = {
    "prompt": "chat_template instruction messages prompt prompt_name task task_type",
    "length": "add_special_tokens late_chunking long_text_mode max_length max_tokens truncate_prompt_tokens truncation "
    "truncation_direction truncation_side",
    "scale": "normalize normalize_embeddings normalized use_activation",
    "dimension": "dimensionality output_dimension output_dimensionality truncate_dim",
    "dtype": "embed_dtype embedding_type embedding_types endianness output_dtype output_value precision "
    "return_multivector",
    "modality": "images modality",
}
NOT_OFFERED = {name: what for what, names in _NOT_OFFERED.items() for name in names.split()}
_NOT_OFFERED_PLACES = {(name,) for name in NOT_OFFERED}
_Strict = create_model("_Strict", __base__=EmbeddingRequest, **dict.fromkeys(NOT_OFFERED, (None, None)))  # pyright: ignore[reportCallIssue, reportArgumentType]


def parse_request(body: bytes) -> EmbeddingRequest:
    """The request that a body holds.

    Raises:
        ClientError: it is no JSON, or a field is missing or has a value that it cannot have.
    """
    try:
        return _Strict.model_validate_json(body)
    except ValidationError as error:
        all_details = error.errors(include_url=False, include_context=False)
    details = [each for each in all_details if each["loc"][:1] not in _NOT_OFFERED_PLACES]
    if not details:
        request = EmbeddingRequest.model_validate_json(body)
        request._not_offered = str(all_details[0]["loc"][0])
        return request
    first = details[0]
    if not first["loc"]:
        raise ClientError(400, f"The body is no JSON object in UTF-8: {first['msg']}.", "invalid_json")
    name = str(first["loc"][0])
    if first["type"] == "missing" or first["input"] is None:
        raise _wrong_field(name, "is missing", "missing_required_parameter")
    if name == "input":
        raise _wrong_input(details)
    raise _wrong_field(name, f"is {reprlib.repr(first['input'])}: {first['msg'][0].lower()}{first['msg'][1:]}")


def _wrong_input(details: Sequence[Any]) -> ClientError:
    given = details[0]["input"]
    if not isinstance(given, list):
        return _wrong_field("input", f"is {reprlib.repr(given)}: expected one text or a list of texts")
    if not 1 <= len(given) <= MAX_TEXTS:
        return _wrong_field("input", f"has {len(given):,} texts: expected 1 to {MAX_TEXTS:,} in each request")
    if isinstance(given[0], list) or type(given[0]) is int:
        return _wrong_field("input", f"holds tokens: expected texts, since {_NO_TOKENS}", "tokens_not_supported")
    row, value = next((each["loc"][-1], each["input"]) for each in details if len(each["loc"]) > 2)
    return _wrong_field("input", f"has {reprlib.repr(value)} at index {row}: expected a text")


def _wrong_field(name: str, problem: str, code: str = "invalid_value") -> ClientError:
    return ClientError(400, f"The field {name!r} {problem}.", code, name)


def require_offered(request: EmbeddingRequest, served: ServedSpace, task: Task) -> None:
    """Refuse fields and dimensions that the space does not have.

    Raises:
        ClientError: it holds the space's own value.
    """
    space = served.space
    if name := request._not_offered:
        prompt = space.query_prompt if task == "query" else space.document_prompt
        own_value = {
            "prompt": f"puts {prompt!r} before each {task}" if prompt else f"puts no prompt before a {task}",
            "length": f"reads {space.max_length:,} tokens of a text, and cuts longer ones if `truncate` is true",
            "scale": "scales its vectors to length 1" if space.normalize else "does not scale its vectors",
            "dimension": f"has {space.dimension} dimensions, or fewer by the field `dimensions`",
            "dtype": "gives one vector of float32 for each text, as the field `encoding_format` says",
            "modality": "holds vectors of texts alone",
        }[NOT_OFFERED[name]]
        problem = f"would change the vectors and is not offered: the space {space.name} {own_value}. Leave it out"
        raise _wrong_field(name, problem, "unsupported_parameter")
    if request.dimensions not in (None, *served.dimensions):
        known = " or ".join(map(str, served.dimensions))
        raise _wrong_field("dimensions", f"is {request.dimensions}: the space {space.name} has {known}")
