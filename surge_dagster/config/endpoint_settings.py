"""Settings of an encoder behind HTTP; part of `EncoderSettings`."""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, WithJsonSchema, field_validator
from pydantic_settings import NoDecode

from surge_dagster.config.settings_input import json_object
from surge_dagster.engine.endpoint.endpoint import Endpoint, json_fields
from surge_dagster.engine.support.urls import is_bare

_EXPECTED = 'expected a JSON object, as in {"input_type": "search_document"}'

_Fields = Annotated[
    dict[str, Any] | None,
    NoDecode,
    BeforeValidator(partial(json_object, expected=_EXPECTED)),
    WithJsonSchema(
        {"anyOf": [{"type": "object"}, {"type": "string"}, {"type": "null"}]}, mode="validation"
    ),
]


class EndpointSettings(BaseModel):
    """How an encoder behind HTTP is reached, and what it may be sent."""

    encoder_url: str | None = Field(
        None,
        description="server with OpenAI's /v1/embeddings that encodes, up to its /v1, as in "
        "https://api.openai.com/v1 (unset: the model runs here)",
    )
    encoder_api_key_env: str | None = Field(
        None,
        description="name of the environment variable with the server's API key, never the key",
    )
    encoder_fields: _Fields = Field(
        None,
        description="further fields of each request for documents, a JSON object such as "
        '{"input_type": "search_document"}',
    )
    encoder_query_fields: _Fields = Field(
        None,
        description="further fields of each request for queries (unset: those of documents)",
    )
    encoder_concurrency: int = Field(
        8, ge=1, le=1_000, description="most requests under way to the server"
    )
    encoder_batch: int = Field(
        256, ge=2, description="most inputs of a request; one of them identifies the model"
    )
    encoder_tokens: int = Field(100_000, ge=1, description="most tokens of a request")
    encoder_requests_per_minute: float | None = Field(
        None, gt=0, description="most requests per minute (unset: no limit)"
    )
    encoder_tokens_per_minute: float | None = Field(
        None, gt=0, description="most tokens per minute (unset: no limit)"
    )
    encoder_patience: float = Field(
        300.0, ge=0, description="seconds for which a run waits for a server that encodes nothing"
    )
    encoder_timeout: float = Field(
        60.0, gt=0, description="seconds for a request, after which it is sent again"
    )
    tokenizer: str | None = Field(
        None,
        min_length=1,
        description="file or folder of the tokenizer.json that counts the tokens of texts for a "
        "server (unset: they are estimated from its answers)",
    )

    @field_validator("encoder_url")
    @classmethod
    def _require_url(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if not value.startswith(("http://", "https://")) or not is_bare(value):
            raise ValueError(
                "expected an http(s) URL without a key or password, as in "
                "https://api.openai.com/v1; encoder_api_key_env names the key's variable"
            )
        return value.rstrip("/").removesuffix("/embeddings")

    @field_validator("encoder_api_key_env")
    @classmethod
    def _require_name(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]{0,63}", value):
            raise ValueError(
                "expected the name of an environment variable in capitals, such as OPENAI_API_KEY, "
                "not the key itself"
            )
        return value

    def endpoint(self) -> Endpoint | None:
        """Return the encoder behind HTTP; None if the model runs here."""
        if self.encoder_url is None:
            return None
        fields = json_fields(self.encoder_fields or {})
        query_fields = fields
        if self.encoder_query_fields is not None:
            query_fields = json_fields(self.encoder_query_fields)
        return Endpoint(
            fields=fields,
            query_fields=query_fields,
            url=self.encoder_url,
            api_key_env=self.encoder_api_key_env,
            concurrency=self.encoder_concurrency,
            batch=self.encoder_batch,
            tokens=self.encoder_tokens,
            requests_per_minute=self.encoder_requests_per_minute,
            tokens_per_minute=self.encoder_tokens_per_minute,
            patience_seconds=self.encoder_patience,
            timeout_seconds=self.encoder_timeout,
            tokenizer=self.tokenizer,
        )
