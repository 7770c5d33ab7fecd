"""Endpoint: an encoder behind HTTP, what it is sent with each text, and its limits."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.support.urls import expanded

# Fields of a request's body that this package sets.
_OWN_FIELDS = frozenset({"model", "input", "encoding_format", "dimensions", "stream"})


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server with OpenAI's `/v1/embeddings`.

    Only `fields` and `query_fields` shape a vector. The others say how the server is reached, are
    not recorded in an output, and may differ between runs.

    Attributes:
        fields, query_fields: JSON objects, keys sorted: further fields of the body of a request for
            documents, and of one for queries.
        url: up to and including `/v1`; "" if only an output names the encoder.
        api_key_env: environment variable with the key.
        concurrency: requests under way at most.
        batch, tokens: inputs and tokens of a request at most.
        patience_seconds: how long a run waits for a server that encodes nothing.
        timeout_seconds: of a single request.
        tokenizer: a tokenizer.json, or a folder with one, that counts tokens.
    """

    fields: str = "{}"
    query_fields: str = "{}"
    url: str = field(default="", compare=False)
    api_key_env: str | None = field(default=None, compare=False)
    concurrency: int = field(default=8, compare=False)
    batch: int = field(default=256, compare=False)
    tokens: int = field(default=100_000, compare=False)
    requests_per_minute: float | None = field(default=None, compare=False)
    tokens_per_minute: float | None = field(default=None, compare=False)
    patience_seconds: float = field(default=300.0, compare=False)
    timeout_seconds: float = field(default=60.0, compare=False)
    tokenizer: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for text in (self.fields, self.query_fields):
            own = sorted(_OWN_FIELDS & json.loads(text, object_hook=_without_secrets).keys())
            if own:
                raise ConfigError(
                    f"the fields {', '.join(own)} of a request are set by this package. Leave "
                    "them out of encoder_fields and encoder_query_fields."
                )

    @property
    def identity(self) -> dict[str, Any]:
        """What of the endpoint shapes a vector, as space.json records it."""
        return {"fields": json.loads(self.fields), "query_fields": json.loads(self.query_fields)}

    @property
    def most_texts(self) -> int:
        """Texts of a request at most: one of its inputs is a probe."""
        return max(1, self.batch - 1)

    @property
    def host(self) -> str:
        """The server for people, without the path."""
        return self.url.partition("://")[2].partition("/")[0]

    def require_url(self, model: str) -> None:
        if not self.url:
            raise ConfigError(
                f"{model!r} was encoded behind HTTP, and an output does not name the server. Set "
                "encoder_url."
            )

    def tokenizer_file(self) -> Path | None:
        """Return the tokenizer.json that counts tokens; None if there is none.

        Raises:
            ConfigError: it is not where `tokenizer` says.
        """
        if self.tokenizer is None:
            return None
        file = expanded(self.tokenizer)
        if file.is_dir():
            file = file / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(
                f"tokenizer is {self.tokenizer!r}; expected a tokenizer.json, or a folder with one"
            )
        return file

    def require_tokenizer(self, what: str) -> Path:
        """Return `tokenizer_file`.

        Args:
            what: the setting that needs it.
        """
        file = self.tokenizer_file()
        if file is None:
            raise ConfigError(
                f"{what} needs exact counts of tokens, which an encoder behind HTTP does not give: "
                f"set tokenizer to the model's tokenizer.json, or leave {what} out."
            )
        return file

    def api_key(self) -> str | None:
        """Return the key; None if the server needs none."""
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env, "").strip()
        if not key:
            raise ConfigError(
                f"encoder_api_key_env names the environment variable {self.api_key_env}, which is "
                "not set. Set it to the key, or correct the name."
            )
        if not (key.isascii() and key.isprintable()):
            raise ConfigError(
                f"the environment variable {self.api_key_env} has a line break, or a character "
                "that is not ASCII. Set it to the key only."
            )
        return key


def _without_secrets(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON object of a request; refuse one that may hold a key."""
    for name in fields:
        if name.lower().endswith(("key", "token", "secret", "password", "authorization")):
            raise ConfigError(
                f"the field {name!r} of a request may be a secret, and each output records the "
                "fields. Leave it out of encoder_fields and encoder_query_fields, and name the "
                "environment variable of the key in encoder_api_key_env."
            )
    return fields


def json_fields(fields: Mapping[str, Any]) -> str:
    """Return the text of `Endpoint.fields`."""
    return json.dumps(fields, sort_keys=True, ensure_ascii=False)


def endpoint_from_json(document: Mapping[str, Any]) -> Endpoint:
    """Return the endpoint that `Endpoint.identity` or `asdict` describes."""
    values = dict(document)
    for name in ("fields", "query_fields"):
        if not isinstance(values[name], str):
            values[name] = json_fields(values[name])
    return Endpoint(**values)
