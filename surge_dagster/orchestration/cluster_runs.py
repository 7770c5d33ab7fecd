"""How Dagster's runs encode: with the pool of their own process, or on the machines of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from surge_dagster.cluster.cluster_run import ClusterRun
from surge_dagster.cluster.machine import memory_limit
from surge_dagster.cluster.ray_cluster import RayCluster
from surge_dagster.config.catalog_settings import CatalogSettings
from surge_dagster.config.settings import (
    EncoderSettings,
    FileSettings,
    absolute_model,
    absolute_place,
)
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.feed.change_files import ChangeFeed
from surge_dagster.engine.files.formats import PublishedFile
from surge_dagster.engine.plan.calibrating import learning
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.report import Event
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.store import Store
from surge_dagster.orchestration.names import CatalogResources
from surge_dagster.resources import CatalogSource, EncoderResource, OutputStore
from surge_dagster.resources.upstream_asset import asset_key

# Of the grace time, for publishing; the last events are stored in the rest of the time.
PUBLISH_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class ResourceRuns:
    """The fields of a run's resources, which travel to other machines, where the resources do not.

    Raises:
        ConfigError: another machine could not read the catalog, or write the output.
    """

    catalog: dict[str, Any]
    encoder: dict[str, Any]
    output: dict[str, Any]
    force: bool
    refused: Sequence[PublishedFile]

    @classmethod
    def of(cls, resources: CatalogResources, force: bool, refused: Sequence[PublishedFile]) -> Self:
        catalog, output = resources.catalog, resources.output
        if asset_key(catalog.url) is not None:
            raise ConfigError(
                "a cluster's machines cannot use a Dagster asset as a catalog. Give the catalog as a path or URL, or "
                "set cluster to none"
            )
        return cls(
            {name: getattr(catalog, name) for name in CatalogSettings.model_fields}
            | {"url": absolute_place(catalog.url), "storage": catalog.cloud_options()},
            {name: getattr(resources.encoder, name) for name in EncoderSettings.model_fields}
            | {"model": absolute_model(resources.encoder.model)},
            {name: getattr(output, name) for name in FileSettings.model_fields}
            | {"url": absolute_place(output.url), "storage": output.cloud_options()},
            force,
            refused,
        )

    def open_pool(self) -> EncoderPool:
        return EncoderResource(**self.encoder).encoder_pool()

    def list_partitions(self) -> Iterable[Partition]:
        return CatalogSource(**self.catalog).open()

    def new_run(
        self,
        partitions: Sequence[Partition],
        pool: EncoderPool,
        *,
        at_once: int = 1,
        **options: Any,
    ) -> EmbeddingRun:
        resources = CatalogResources(
            CatalogSource(**self.catalog),
            EncoderResource(**self.encoder),
            OutputStore(**self.output),
        )
        store = resources.output.open()
        return run_of(
            resources, partitions, store, pool, at_once=at_once, force=self.force, **options
        )


def run_of(
    resources: CatalogResources,
    partitions: Sequence[Partition],
    store: Store,
    pool: EncoderPool,
    *,
    at_once: int = 1,
    **options: Any,
) -> EmbeddingRun:
    """A run in this process; see `CatalogRuns.new_run`."""
    encoder, output = resources.encoder, resources.output
    return EmbeddingRun(
        partitions,
        store,
        pool,
        encoder.superbatch_thresholds(resources.catalog.max_text_bytes),
        catalog=resources.catalog.catalog_record(),
        include_text=output.include_text,
        observer=ChangeFeed(always=output.changes, keep_days=output.keep_changes_days),
        memory_limit_bytes=memory_limit(encoder.memory_limit_bytes, at_once),
        grace_seconds=PUBLISH_SHARE * encoder.grace_seconds,
        **options,
    )


def cluster_run_of(
    resources: CatalogResources,
    partitions: Sequence[Partition],
    pool: EncoderPool,
    warn: Callable[[str], None],
    *,
    force: bool,
    refused: Sequence[PublishedFile],
) -> ClusterRun[Any]:
    """A run on the machines of the cluster that the setting names; see `ClusterRun` and `CatalogRuns`."""
    runs = ResourceRuns.of(resources, force, refused)
    encoder = resources.encoder
    connect = partial(RayCluster, encoder.cluster, runs, pool.space, warn, encoder.devices)
    grace_seconds = PUBLISH_SHARE * encoder.grace_seconds
    return ClusterRun(
        partitions, runs, pool, connect, force=force, grace_seconds=grace_seconds, warn=warn
    )


def events_of(
    run: EmbeddingRun | ClusterRun[Any], pool: EncoderPool, store: Store
) -> Generator[Event]:
    """Run; costs are learned from what this machine encodes."""
    return run.events() if isinstance(run, ClusterRun) else learning(run, pool, store)
