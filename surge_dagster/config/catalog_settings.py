"""Settings of the catalog: what is read of a source, and how it is opened."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)
from pydantic_settings import NoDecode

from surge_dagster.engine.chunks.long_texts import LongText, without_long_texts
from surge_dagster.engine.chunks.source import cut_selection, in_chunks
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.chunk_rule import ChunkRule
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.output.catalog_record import CatalogRecord
from surge_dagster.engine.sources import DEFAULT_MAX_TEXT_BYTES, Selection, Source
from surge_dagster.engine.sources.selection import (
    BadRows,
    FileColumnSettings,
    MissingText,
    column_names,
    selected,
)
from surge_dagster.engine.store import StorageOptions
from surge_dagster.engine.support.urls import local_path
from surge_dagster.engine.tables.frames import Frame, FrameCatalog, FrameTable
from surge_dagster.engine.tables.opening import open_source, require_no_bigquery

ASSET_SCHEME = "asset://"
FRAMES = "frame://python"  # the place of every catalog of frames; catalog_name tells them apart


_ColumnNames = Annotated[
    list[str],
    NoDecode,
    BeforeValidator(lambda value: column_names(value) if isinstance(value, str) else value),
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        mode="validation",
    ),
]


class CatalogSettings(BaseModel):
    """Settings of the catalog; part of `Settings` and of the resource `CatalogSource`."""

    partition_by: _ColumnNames = Field(
        [],
        description="columns of a table whose values are the key of a row, such as "
        "country,category (none: folders or files are the partitions)",
    )
    query: str | None = Field(
        None,
        min_length=1,
        description="query of BigQuery whose rows are the catalog; source is then bigquery://PROJECT",
    )
    updated_at: str | None = Field(
        None,
        min_length=1,
        description="column of a BigQuery source that grows when a row changes (unset: BigQuery "
        "reads and bills the columns for fingerprints of the rows)",
    )
    id: str = Field("id", description="column that identifies a row within its partition")
    text: str = Field(
        "text",
        description='column that is embedded, or a template such as "{title}. {description}"',
    )
    columns: _ColumnNames = Field(
        [],
        description="further columns to copy into the output, such as sku,price",
    )
    missing_text: MissingText = Field(
        "refuse_nulls",
        description="what to do with a row whose text is null or blank: refuse (its partition), "
        "skip, empty (embed an empty text), or refuse_nulls, which embeds blank texts",
    )
    max_text_bytes: int = Field(
        DEFAULT_MAX_TEXT_BYTES,
        ge=1,
        description="most bytes of a text; a longer one is a bad row",
    )
    bad_rows: BadRows = Field(
        "refuse",
        description="what to do with a bad row: refuse (its partition), or set_aside (leave it "
        "out, list it, and publish the others)",
    )
    long_text: LongText = Field(
        "truncate",
        description="what to do with a text that is longer than the model reads: truncate, refuse "
        "(its partition), or set_aside (leave it out, list it, and publish the others)",
    )
    encoding: str = Field("utf-8", description="encoding of CSV files, such as cp1252 or utf-16")
    escape: str | None = Field(
        None,
        description="character before a quote within quotes in CSV files of Spark or MySQL, such "
        "as a backslash (unset: such a quote is written twice)",
    )

    catalog_name: str | None = Field(
        None,
        min_length=1,
        description="name of the catalog, for an output whose source moves (unset: its place)",
    )

    @field_validator("partition_by")
    @classmethod
    def _require_different(cls, value: list[str]) -> list[str]:
        if len(set(value)) < len(value):
            raise ValueError("expected each column once")
        return value

    @field_validator("text", "columns", "encoding", "escape")
    @classmethod
    def _require_selection(cls, value: Any, info: ValidationInfo) -> Any:
        try:
            selected(None, {str(info.field_name): value})
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return value

    def selection(self, chunks: ChunkRule | None = None) -> Selection:
        """Return what is read of the source, for rows of texts or for chunks of documents."""
        columns = {name: getattr(self, name) for name in FileColumnSettings.__annotations__}
        selection = selected(None, columns)
        return selection if chunks is None else cut_selection(selection, chunks.column)

    def record(self, place: str) -> CatalogRecord:
        """Return the catalog at a path or URL as a space records it."""
        location = place.rstrip("/")
        if "://" not in place or place.startswith("file:"):
            location = os.path.normpath(local_path(place, what="catalog"))
        if self.query:  # two queries of one project are two catalogs
            location += f"?query={hashlib.sha256(self.query.encode()).hexdigest()[:16]}"
        recorded = CatalogSettings.model_fields.keys() - {"catalog_name"}
        if place == FRAMES and not self.catalog_name:  # each frame may be divided in its own way
            recorded -= {"partition_by"}
        settings = self.model_dump(mode="json", include=recorded, exclude_defaults=True)
        return CatalogRecord(location, self.catalog_name, settings=settings)

    def open_catalog(
        self, place: str, storage_options: StorageOptions, spec: EncodingSpec
    ) -> Source:
        """Open the catalog at a path or URL with the rows of a spec; `ConfigError` when there is
        none."""
        if place.startswith(ASSET_SCHEME):
            raise ConfigError(
                f"{place} is an asset, which only Dagster can load. Run `dagster dev` and its jobs."
            )
        source = open_source(
            place,
            selection=self.selection(spec.chunks),
            partition_by=self.partition_by,
            query=self.query,
            updated_at=self.updated_at,
            storage_options=storage_options,
        )
        return self.with_rows_of(source, spec)

    def with_rows_of(self, source: Source, spec: EncodingSpec) -> Source:
        """Return the source with the rows of a spec, and without texts that are too long for it, if
        the settings say so."""
        if spec.chunks is not None and self.long_text != "truncate":
            raise ConfigError(
                f"long_text is {self.long_text!r}, and of texts in chunks none is too long. Leave "
                "long_text or chunks out."
            )
        if spec.endpoint is not None and self.long_text != "truncate":
            spec.endpoint.require_tokenizer("long_text")
            if spec.max_length is None:
                raise ConfigError(
                    f"long_text is {self.long_text!r}, and an encoder behind HTTP does not say how "
                    "many tokens it reads. Set max_length."
                )
        return without_long_texts(in_chunks(source, spec), spec, self.long_text)

    def open_frames(
        self, frames: Frame | Mapping[str, Frame | Callable[[], Frame]], spec: EncodingSpec
    ) -> Source:
        """Open one frame, which `partition_by` divides, or frames by partition key."""
        self.require_no_bigquery("a frame")
        selection = self.selection(spec.chunks)
        if isinstance(frames, Mapping):
            if self.partition_by:
                raise ConfigError(
                    "frames by partition key are partitions, which partition_by cannot divide. "
                    "Leave it out."
                )
            source: Source = FrameCatalog(frames, selection)
        elif self.partition_by:
            source = FrameTable(frames, self.partition_by, selection)
        else:
            raise ConfigError(
                "one frame needs partition_by, the columns that divide it into partitions. "
                'Name them, or give frames by partition key, as in {"all": frame}.'
            )
        return self.with_rows_of(source, spec)

    def require_no_bigquery(self, place: str) -> None:
        """Raise `ConfigError` if settings of BigQuery are given for another source."""
        require_no_bigquery(place, query=self.query, updated_at=self.updated_at)
