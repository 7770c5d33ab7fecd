"""The setting `chunks`: a mapping in YAML and Python, and `tokens=256,overlap=32` as a text."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_settings import NoDecode

from surge_dagster.config.settings_input import json_object
from surge_dagster.engine.chunks.splitting import splitter_digest
from surge_dagster.engine.endpoint.endpoint import Endpoint
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.chunk_rule import ChunkRule
from surge_dagster.engine.model.digest import file_sha256

_NAMES = tuple(
    field.name for field in fields(ChunkRule) if field.name not in ("splitter", "tokenizer")
)
_NUMBERS = ("tokens", "overlap")
_SWITCHES = {"on": True, "true": True, "": False, "off": False, "false": False, "none": False}
_EXPECTED = (
    f"expected a mapping of {', '.join(_NAMES)}, as in tokens=256,overlap=32, or on for the "
    "defaults"
)


def _checked(value: Any) -> dict[str, Any] | None:
    if isinstance(value, str):
        value = _of_text(value)
    if isinstance(value, bool):
        value = {} if value else None
    rule = json_object(value, _EXPECTED)
    if rule is None:
        return None
    if not rule.keys() <= set(_NAMES):
        raise ValueError(_EXPECTED)
    try:
        ChunkRule(**rule)
    except ConfigError as error:
        raise ValueError(str(error).removeprefix("chunks: ")) from None
    return rule


def _of_text(text: str) -> Any:
    """Return what a flag or an environment variable says; JSON stays a text."""
    if text.lower() in _SWITCHES:
        return _SWITCHES[text.lower()]
    if text.lstrip().startswith("{"):
        return text

    values: dict[str, Any] = {}
    for entry in text.split(","):
        name, equals, value = (part.strip() for part in entry.partition("="))
        if not equals:
            raise ValueError(_EXPECTED)
        values[name] = int(value) if name in _NUMBERS and value.isdecimal() else value
    return values


ChunkSettings = Annotated[
    dict[str, Any] | None,
    NoDecode,
    BeforeValidator(_checked),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {
                        "tokens": {"type": "integer"},
                        "overlap": {"type": "integer"},
                        "format": {"enum": ["text", "markdown"]},
                        "column": {"type": "string"},
                    },
                    "additionalProperties": False,
                },
                {"type": "string"},
                {"type": "boolean"},
                {"type": "null"},
            ]
        },
        mode="validation",
    ),
]


def chunk_rule(settings: dict[str, Any] | None, endpoint: Endpoint | None) -> ChunkRule | None:
    """Return the rule of checked settings.

    Args:
        endpoint: whose tokenizer counts; None: that of the model.

    Raises:
        ConfigError: the library that cuts is not installed, or the endpoint has no tokenizer.
    """
    if settings is None:
        return None
    digest = splitter_digest(settings.get("format", "text"))
    tokenizer = ""
    if endpoint is not None:
        tokenizer = file_sha256(endpoint.require_tokenizer("chunks"))
    return ChunkRule(**settings, splitter=digest, tokenizer=tokenizer)
