"""The settings that a run was asked for with, which whoever executes it may not have.

Runs in containers of their own get their variables from somewhere else than the code server, whose sensor and schedules
ask for them. Without the server's model a run would begin the space of another one, and from then on no tick would go
on with either; with another text column it would fill the right space with vectors of other texts. So a run that nobody
launches by hand is tagged with the columns it shall read and with what shall shape its vectors, and compares.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import dagster as dg
from dagster._core.storage.tags import HIDDEN_TAG_PREFIX, PARENT_RUN_ID_TAG, RETRY_NUMBER_TAG

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.orchestration.sensor_cursor import digest
from surge_dagster.resources import CatalogSource, Encoder

_ENCODING_TAG = f"{HIDDEN_TAG_PREFIX}surge_settings"
_COLUMNS_TAG = f"{HIDDEN_TAG_PREFIX}surge_columns"
_LONGEST = 100  # characters of a value: Postgres has an index over tags, which takes no more than 2.7 kB of each


def with_settings(requests: Iterable[dg.RunRequest], catalog: CatalogSource, encoder: Encoder) -> list[dg.RunRequest]:
    """The requests, each with what its vectors are to be made from and by."""
    tags = {_COLUMNS_TAG: _columns(catalog)}
    with suppress(ConfigError):  # their runs will fail on it, and somebody is told of that
        tags[_ENCODING_TAG] = _encoding(encoder.spec())
    return [request.with_replaced_attrs(tags={**request.tags, **tags}) for request in requests]


def require_columns(tags: Mapping[str, str], catalog: CatalogSource) -> None:
    """Refuse to read other columns than a run was asked for with.

    Args:
        tags: of the run; one that a person launched has none of this, or that of the run which it does again.
        catalog: as the settings have it where the run is executed.

    Raises:
        ConfigError: it has other columns.
    """
    _require(tags, _COLUMNS_TAG, _columns(catalog))


def require_encoding(tags: Mapping[str, str], spec: EncodingSpec) -> None:
    """Refuse to encode in another way than a run was asked for with; tags as for the columns.

    Args:
        spec: what the settings mean where the run is executed.

    Raises:
        ConfigError: they mean something else.
    """
    _require(tags, _ENCODING_TAG, _encoding(spec))


def _require(tags: Mapping[str, str], tag: str, here: str) -> None:
    if PARENT_RUN_ID_TAG in tags and RETRY_NUMBER_TAG not in tags:
        return  # a person re-executes it, who may have mended a setting
    asked = tags.get(tag)
    if asked not in (None, here):
        raise ConfigError(
            f"the run was asked for with the settings {asked}, and where it is executed they are {here}. Nothing was "
            "encoded. The code server and the machine or container of a run need the same SURGE_ variables. If they "
            "were changed while the run waited, the next tick goes by the new ones, as does what you launch by hand."
        )


def _columns(catalog: CatalogSource) -> str:
    return _text({"id_column": catalog.id_column, "text_column": catalog.text_column})


def _encoding(spec: EncodingSpec) -> str:
    asked = {name: value for name, value in spec.as_dict().items() if value is not None}
    folder = Path(spec.model).expanduser()
    if folder.is_absolute() or folder.is_dir():
        asked["model"] = "a folder"  # it may lie elsewhere on another machine, under another name
    return _text(asked)


def _text(asked: dict[str, Any]) -> str:
    for name, value in asked.items():
        if isinstance(value, str) and len(value) > _LONGEST:
            asked[name] = f"{value[:_LONGEST]}… ({digest(value)})"
    return json.dumps(asked, sort_keys=True)
