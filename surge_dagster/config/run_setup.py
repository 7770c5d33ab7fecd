"""What builds a run: settings and places, in one object that also travels to other machines.

The command `embed`, Dagster and each machine of a cluster build source, store, pool and run here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self, TypeVar

from pydantic import BaseModel

from surge_dagster.config.catalog_settings import ASSET_SCHEME, FRAMES, CatalogSettings
from surge_dagster.config.settings import (
    EncoderSettings,
    FileSettings,
    absolute_model,
    absolute_place,
)
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.output.freshness import Freshness, OutputState
from surge_dagster.engine.run.change_feed import ChangeFeed
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.old_rows import ReuseAnswer
from surge_dagster.engine.sources.partition import Partition, PartitionRange, Source
from surge_dagster.engine.store import StorageOptions, open_store
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.process_memory import memory_bytes

S = TypeVar("S", bound=BaseModel)


@dataclass(frozen=True)
class RunSetup:
    """Everything that builds a run of one catalog into one output.

    Attributes:
        grace_seconds: how long a stopped run may take to publish what is encoded.
        force: encode fresh partitions again.
    """

    catalog: CatalogSettings
    encoder: EncoderSettings
    files: FileSettings
    source: str
    output: str
    source_options: StorageOptions = field(default_factory=StorageOptions)
    output_options: StorageOptions = field(default_factory=StorageOptions)
    grace_seconds: float = 8.0
    force: bool = False

    def __post_init__(self) -> None:
        # Resources and `Settings` extend these settings, and do not travel.
        object.__setattr__(self, "catalog", _plain(CatalogSettings, self.catalog))
        object.__setattr__(self, "encoder", _plain(EncoderSettings, self.encoder))
        object.__setattr__(self, "files", _plain(FileSettings, self.files))

    def for_machines(self) -> Self:
        """Return the setup with places that mean the same on other machines.

        Raises:
            ConfigError: the catalog exists only in this process.
        """
        if self.source == FRAMES or self.source.startswith(ASSET_SCHEME):
            what = "frames" if self.source == FRAMES else "a Dagster asset"
            raise ConfigError(
                f"The catalog is {what} of this process, and machines of a cluster cannot read it. "
                "Give the catalog as a path or URL, or set cluster to none."
            )
        return replace(
            self,
            source=absolute_place(self.source),
            output=absolute_place(self.output),
            encoder=self.encoder.model_copy(update={"model": absolute_model(self.encoder.model)}),
        )

    def open_source(self) -> Source:
        spec = self.encoder.encoding_spec()
        return self.catalog.open_catalog(self.source, self.source_options, spec)

    def open_store(self) -> Store:
        return open_store(self.output, self.output_options)

    def open_pool(self) -> EncoderPool:
        return self.encoder.encoder_pool()

    def new_run(
        self,
        partitions: Iterable[Partition],
        pool: EncoderPool,
        store: Store | None = None,
        *,
        freshness: Mapping[str, Freshness] | None = None,
        outputs: OutputState | None = None,
        ranges: Sequence[PartitionRange] = (),
        at_once: int = 1,
        reuse_answer: ReuseAnswer | None = None,
    ) -> EmbeddingRun:
        """Return a run in this process; see `EmbeddingRun`.

        Args:
            at_once: runs of this process that share the memory.
        """
        memory_limit = self.encoder.memory_limit_bytes
        if at_once > 1:
            memory_limit = (memory_limit or memory_bytes() // 2) // at_once
        return EmbeddingRun(
            partitions,
            store or self.open_store(),
            pool,
            self.encoder.superbatch_thresholds(self.catalog.max_text_bytes),
            catalog=self.catalog.record(self.source),
            force=self.force,
            ranges=ranges,
            outputs=outputs,
            freshness=freshness,
            reuse_answer=reuse_answer,
            bad_rows=self.catalog.bad_rows,
            include_text=self.files.include_text,
            memory_limit_bytes=memory_limit,
            grace_seconds=self.grace_seconds,
            prices=self.encoder.prices(),
            change_feed=ChangeFeed(
                always=self.files.changes, keep_days=self.files.keep_changes_days
            ),
        )


def _plain(kind: type[S], settings: S) -> S:
    values = {name: getattr(settings, name) for name in kind.model_fields}
    return kind.model_construct(**values)
