"""Requests for embeddings: what a body may hold.

A field that would change a vector and is not offered is refused: ignoring it would give the client
other vectors than it asked for. Other unknown fields are ignored, and `null` is a field that is not
given. An empty text is a text as any other, as in the files.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from surge_dagster.engine.model.prompts import Task
from surge_dagster.service.errors import Refusal
from surge_dagster.service.spaces import ServedSpace

MAX_TEXTS = 2048


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
