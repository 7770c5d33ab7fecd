"""The settings of a source's columns, as keyword arguments of `open_source` and of frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from surge_dagster.engine.sources.selection import MissingText, Selection


class ColumnSettings(TypedDict, total=False):
    """See the settings of these names."""

    id: str
    text: str
    columns: str | Sequence[str]
    missing_text: MissingText
    max_text_bytes: int


class FileColumnSettings(ColumnSettings, total=False):
    """Those of files."""

    encoding: str
    escape: str | None


def column_names(names: str | Sequence[str]) -> list[str]:
    """Return the names of a list, or of a string with commas between them."""
    if isinstance(names, str):
        return [name.strip() for name in names.split(",") if name.strip()]
    return list(names)


def selected(selection: Selection | None, settings: Mapping[str, Any]) -> Selection:
    """Return the given selection, or the one that the settings describe."""
    if selection is not None and settings:
        raise TypeError(
            f"give either a selection or settings; both were given: {', '.join(settings)}"
        )
    if selection is not None:
        return selection
    others = dict(settings)
    carried = column_names(others.pop("columns", ()))
    return Selection(carried=tuple(carried), **others)
