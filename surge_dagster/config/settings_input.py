"""Where settings are read from, and errors about them: by their place, without secrets."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from yaml import MarkedYAMLError

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.support.urls import expanded

log = logging.getLogger(__name__)

CONFIG_VARIABLE = "SURGE_CONFIG"
CONFIG_FILE = "surge.yaml"
# Values that no error message quotes: secrets, and URLs that may contain one.
_NOT_SHOWN = (
    "alert_webhook",
    "encoder_api_key_env",
    "encoder_url",
    "gcp",
    "lancedb",
    "output",
    "pgvector",
    "qdrant",
    "source",
    "storage_options",
)


def require_text(name: str, value: str) -> None:
    """Refuse an argument that is not UTF-8: a shell passes bytes, and Python keeps them."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{name} is not valid UTF-8 text: {value!r}. Give it in UTF-8."
        ) from error


def json_object(value: Any, expected: str) -> dict[str, Any] | None:
    """Return a setting that is a mapping, or its JSON in a flag or an environment variable.

    Raises:
        ValueError: with the text `expected`, since the value is neither.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError(expected) from None
    if value is not None and not isinstance(value, dict):
        raise ValueError(expected)
    return value


def warn_of_unknown_variables(fields: Iterable[str]) -> None:
    """Log `SURGE_…` variables that do not name a setting; another program may need them."""
    known = {f"SURGE_{name.upper()}" for name in fields} | {CONFIG_VARIABLE, "SURGE_CACHE_DIR"}
    for name in sorted(os.environ):
        if name.startswith("SURGE_") and name.upper() not in known:
            log.warning("the environment variable %s names no setting and is ignored", name)


def config_file() -> Path | None:
    named = os.environ.get(CONFIG_VARIABLE)
    if named:
        path = expanded(named)
        if not path.is_file():
            raise ConfigError(f"{CONFIG_VARIABLE} names {named!r}, which is not a file")
        return path
    path = Path(CONFIG_FILE)
    return path if path.is_file() else None


def problem(detail: Any, given: Mapping[str, Any], fields: Iterable[str]) -> str:
    """Return one validation error as a sentence that says which source it came from.

    Args:
        fields: the names of all settings.
    """
    message = detail["msg"].removeprefix("Value error, ")
    message = f"{message[0].lower()}{message[1:]}"
    place = [str(part) for part in detail["loc"]]
    if not place:  # settings that contradict each other
        return message

    name = place[0]
    variable = f"SURGE_{name.upper()}"
    setting = ".".join(place)
    if name not in given:
        if variable in os.environ:
            setting = ".".join((variable, *place[1:]))
        else:
            setting = f"{setting} in {config_file()}"

    if place == [name] and detail["type"] == "extra_forbidden":
        return f"setting {setting} is unknown; there are {', '.join(sorted(fields))}"
    if name in _NOT_SHOWN:
        return f"setting {setting}: {message}"
    return f"setting {setting} is {detail['input']!r}: {message}"


def without_quotes(error: Exception) -> str:
    """Return an error's text without the line that YAML quotes, which may have a secret."""
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}"
        return f"{error.problem or 'it is not YAML'} ({place})"
    return str(error)
