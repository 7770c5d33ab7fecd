"""The columns of files and tables, as Dagster shows them on the pages of assets.

Definitions load before a catalog exists and without a model. So the types of ids and of further
columns are "as in the source", and the dimension is shown if a setting has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg

from surge_dagster.config.settings import Settings

_OF_SOURCE = "as in the source"
_ONLY_IN_FILES = ("text_hash", "truncated")


def file_columns(settings: Settings, dtype: str, dimension: int | None) -> Mapping[str, Any]:
    """Return metadata of an asset whose files have vectors of this type."""
    columns = [dg.TableColumn("id", _OF_SOURCE, "identifies the row within its partition")]
    if settings.include_text:
        columns.append(dg.TableColumn("text", "string", "what was encoded"))
    columns.append(dg.TableColumn("text_hash", "fixed_size_binary[16]", "BLAKE2b of the text"))
    columns.append(dg.TableColumn("truncated", "bool", "whether the model reads only a part"))
    if settings.chunks is not None:
        columns.append(dg.TableColumn("document_id", _OF_SOURCE, "the document of the chunk"))
        columns.append(dg.TableColumn("chunk", "int32", "its number in the document, from 0"))
        columns.append(dg.TableColumn("start", "int64", "first character of the cut text"))
        columns.append(dg.TableColumn("end", "int64", "character after its last one"))
    for name in settings.columns:
        columns.append(dg.TableColumn(name, _OF_SOURCE))

    vector = dtype
    if dimension is not None:
        vector += f"[{dimension}]"
    columns.append(dg.TableColumn("embedding", vector))
    return {"dagster/column_schema": dg.TableSchema(columns)}


def table_columns(files: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return metadata of a table that follows files with these columns."""
    columns = [dg.TableColumn("partition", "string", "key of the partition")]
    for column in files["dagster/column_schema"].columns:
        if column.name not in _ONLY_IN_FILES:
            columns.append(column)
    return {"dagster/column_schema": dg.TableSchema(columns)}
