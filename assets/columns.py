"""The columns of files and tables, as Dagster shows them on the pages of assets.

Definitions load before a catalog exists and without a model. So the types of ids and of further
columns are "as in the source", and the dimension is shown if a setting has it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import dagster as dg

from surge_dagster.config.settings import Settings

_OF_SOURCE = "as in the source"


def file_columns(settings: Settings, dtype: str, dimension: int | None) -> Mapping[str, Any]:
    """Return metadata of an asset whose files have vectors of this type."""
    return _shown([_id(), *_texts(settings), _text_hash(), *_further(settings, dtype, dimension)])


def table_columns(settings: Settings) -> Mapping[str, Any]:
    """Return metadata of an asset that is a table of a vector database."""
    partition = dg.TableColumn("partition", "string", "key of the partition")
    further = _further(settings, settings.dtype, settings.dimension)
    return _shown([partition, _id(), *_texts(settings), *further])


def _shown(columns: Sequence[dg.TableColumn]) -> Mapping[str, Any]:
    return {"dagster/column_schema": dg.TableSchema(columns)}


def _id() -> dg.TableColumn:
    return dg.TableColumn("id", _OF_SOURCE, "identifies the row within its partition")


def _texts(settings: Settings) -> list[dg.TableColumn]:
    if not settings.include_text:
        return []
    return [dg.TableColumn("text", "string", "what was encoded")]


def _text_hash() -> dg.TableColumn:
    return dg.TableColumn("text_hash", "fixed_size_binary[16]", "BLAKE2b of the text")


def _further(settings: Settings, dtype: str, dimension: int | None) -> list[dg.TableColumn]:
    columns = [dg.TableColumn(name, _OF_SOURCE) for name in settings.columns]
    vector = dtype
    if dimension is not None:
        vector += f"[{dimension}]"
    return [*columns, dg.TableColumn("embedding", vector, "the vector")]
