"""Requests for embeddings: what a body may hold, and what a wrong one is answered.

A field that would change a vector and is not offered is refused, with the space's own value:
ignoring it would give the client vectors of another kind than it asked for. Other unknown fields
are ignored, and `null` is a field that is not given. An empty text is a text as any other, as in
the files.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from surge_dagster.engine.model.prompts import Task
from surge_dagster.service.errors import ClientError
from surge_dagster.service.spaces import ServedSpace

MAX_TEXTS = 2048
_NO_TOKENS = "those of another tokenizer would give vectors of other texts. In LangChain, set check_embedding_ctx_length=False"


class EmbeddingRequest(BaseModel):
    """The body of `POST …/embeddings`."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    input: str | Annotated[list[str], Field(min_length=1, max_length=MAX_TEXTS, fail_fast=True)]
    model: str = Field(description="name of a space or of a model, or `current`")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64 is of float32, little endian"
    )
    dimensions: int | None = Field(
        None, description="leading ones, as many as GET /v1/models lists"
    )
    input_type: Literal["query", "document"] | None = Field(
        None, description="how the texts are encoded (default: as the path says)"
    )
    truncate: bool | None = Field(
        None, description="whether texts that the model cannot read whole are cut"
    )

    @property
    def texts(self) -> Sequence[str]:
        return [self.input] if isinstance(self.input, str) else self.input

    @property
    def not_offered(self) -> str | None:
        """The name of a field that would change vectors, if one was given."""
        given = self.model_extra or {}
        return next(
            (name for name in given if name in NOT_OFFERED and given[name] is not None), None
        )


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


def parse_request(fields: dict[str, Any]) -> EmbeddingRequest:
    """Return the request of these fields; raises `ClientError`, as for a body that is wrong."""
    try:
        return EmbeddingRequest.model_validate(fields)
    except ValidationError as error:
        raise wrong_value(error.errors(include_url=False, include_context=False)) from None


def wrong_body(details: Sequence[Any]) -> ClientError:
    """Return the first problem that FastAPI has found in a request."""
    return wrong_value([detail | {"loc": detail["loc"][1:]} for detail in details])


def wrong_value(details: Sequence[Any], what: str = "body") -> ClientError:
    """Return the first problem that pydantic has found in a JSON object."""
    first = details[0]
    if not first["loc"] or first["type"] == "json_invalid":
        return ClientError(
            400, f"The {what} is no JSON object in UTF-8: {first['msg']}.", "invalid_json"
        )
    name = ".".join(map(str, first["loc"]))
    if first["loc"][0] == "input" and first["type"] != "missing" and first["input"] is not None:
        return _wrong_input(details)
    if first["type"] == "missing" or first["input"] is None:
        name = str(first["loc"][0])
        return _wrong_field(name, "is missing", "missing_required_parameter")
    return _wrong_field(
        name, f"is {reprlib.repr(first['input'])}: {first['msg'][0].lower()}{first['msg'][1:]}"
    )


def _wrong_input(details: Sequence[Any]) -> ClientError:
    given = details[0]["input"]
    if not isinstance(given, list):
        return _wrong_field(
            "input", f"is {reprlib.repr(given)}: expected one text or a list of texts"
        )
    if not 1 <= len(given) <= MAX_TEXTS:
        return _wrong_field(
            "input", f"has {len(given):,} texts: expected 1 to {MAX_TEXTS:,} in each request"
        )
    if isinstance(given[0], list) or type(given[0]) is int:
        return _wrong_field(
            "input", f"holds tokens: expected texts, since {_NO_TOKENS}", "tokens_not_supported"
        )
    row, value = next((each["loc"][-1], each["input"]) for each in details if len(each["loc"]) > 2)
    return _wrong_field("input", f"has {reprlib.repr(value)} at index {row}: expected a text")


def _wrong_field(name: str, problem: str, code: str = "invalid_value") -> ClientError:
    shown = name.encode("utf-8", "replace").decode()
    return ClientError(400, f"The field {shown!r} {problem}.", code, shown)


def require_offered(request: EmbeddingRequest, served: ServedSpace, task: Task) -> None:
    """Refuse fields and dimensions that the space does not have.

    Raises:
        ClientError: it holds the space's own value.
    """
    space = served.space
    if name := request.not_offered:
        prompt = space.query_prompt if task == "query" else space.document_prompt
        own_value = {
            "prompt": f"puts {prompt!r} before each {task}"
            if prompt
            else f"puts no prompt before a {task}",
            "length": f"reads {space.max_length:,} tokens of a text, and cuts longer ones if `truncate` is true",
            "scale": "scales its vectors to length 1"
            if space.normalize
            else "does not scale its vectors",
            "dimension": f"has {space.dimension} dimensions, or fewer by the field `dimensions`",
            "dtype": "gives one vector of float32 for each text, as the field `encoding_format` says",
            "modality": "holds vectors of texts alone",
        }[NOT_OFFERED[name]]
        problem = f"would change the vectors and is not offered: the space {space.name} {own_value}. Leave it out"
        raise _wrong_field(name, problem, "unsupported_parameter")
    if request.dimensions not in (None, *served.dimensions):
        known = " or ".join(map(str, served.dimensions))
        raise _wrong_field(
            "dimensions", f"is {request.dimensions}: the space {space.name} has {known}"
        )
