"""The columns of a source by the names of their settings: keyword arguments of `open_source` and of
frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from surge_dagster.engine.sources.selection import MissingText, Selection


class ColumnSettings(TypedDict, total=False):
    """What of a source's columns becomes ids and texts, and what travels with them; see the
    settings of these names."""

    id: str
    text: str
    columns: str | Sequence[str]
    missing_text: MissingText
    max_text_bytes: int


class FileColumnSettings(ColumnSettings, total=False):
    """Those of files."""

    encoding: str


def column_names(names: str | Sequence[str]) -> list[str]:
    """One name, or several between commas, may be given as a plain string."""
    return (
        [name.strip() for name in names.split(",") if name.strip()]
        if isinstance(names, str)
        else list(names)
    )


def selected(selection: Selection | None, settings: Mapping[str, Any]) -> Selection:
    """The selection that was given, or else the one that the settings describe."""
    if selection is not None and settings:
        raise TypeError(
            f"give either a selection or settings; both were given: {', '.join(settings)}"
        )
    others = {name: value for name, value in settings.items() if name != "columns"}
    return selection or Selection(
        carried=tuple(column_names(settings.get("columns", ()))), **others
    )
