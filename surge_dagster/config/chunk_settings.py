"""The setting `chunks`: a mapping in YAML and Python, and `tokens=256,overlap=32` as a text."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_settings import NoDecode

from surge_dagster.engine.chunks.splitting import splitter_digest
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.chunk_rule import ChunkRule

_NAMES = tuple(field.name for field in fields(ChunkRule) if field.name != "splitter")
_NUMBERS = ("tokens", "overlap")
_EXPECTED = (
    f"expected a mapping of {', '.join(_NAMES)}, as in tokens=256,overlap=32, or on for the "
    "defaults"
)


def _checked(value: Any) -> dict[str, Any] | None:
    if isinstance(value, str):
        value = _of_text(value)
    if value is None or value is False:
        return None
    if value is True:
        value = {}
    if not isinstance(value, dict) or not value.keys() <= set(_NAMES):
        raise ValueError(_EXPECTED)
    try:
        ChunkRule(**value)
    except ConfigError as error:
        raise ValueError(str(error).removeprefix("chunks: ")) from None
    return value


def _of_text(text: str) -> Any:
    """Return what a flag or an environment variable says."""
    if text.lower() in ("on", "true"):
        return {}
    if text.lower() in ("", "off", "false", "none"):
        return None
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except ValueError:
            raise ValueError(_EXPECTED) from None
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


def chunk_rule(settings: dict[str, Any] | None) -> ChunkRule | None:
    """Return the rule of checked settings.

    Raises:
        ConfigError: the library that cuts is not installed.
    """
    if settings is None:
        return None
    digest = splitter_digest(settings.get("format", "text"))
    return ChunkRule(**settings, splitter=digest)
