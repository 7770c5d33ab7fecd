"""An asset of Dagster as a catalog: its frames come through its own IO manager, when a partition of
them is read.

    asset://products        the asset with the key "products"; asset://shop/products has two parts

An asset with partitions gives a partition of the catalog for each that is materialized. One without
gives one partition, or one for each value of the columns of `partition_by`. Source versions are the
storage ids of its materializations. Only `partition_by` makes a listing load the asset, which runs
do and ticks do not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import quote, unquote

import dagster as dg

from surge_dagster.config.catalog_settings import ASSET_SCHEME
from surge_dagster.engine.errors import ConfigError, SurgeError, TransientError
from surge_dagster.engine.sources.partition import Partition, Source
from surge_dagster.engine.sources.selection import Selection
from surge_dagster.engine.tables.frames import Frame, FrameCatalog, FrameTable

_MATERIALIZATION = dg.DagsterEventType.ASSET_MATERIALIZATION


class NotListed(SurgeError):
    """A run has to load the asset, in this version, before its partitions are known."""

    def __init__(self, url: str, version: str) -> None:
        self.version = version
        super().__init__(
            f"{url} was materialized; the next run that loads it finds its partitions ({version})"
        )


def asset_url(asset: dg.AssetKey | dg.AssetsDefinition | dg.AssetSpec) -> str:
    """Return the asset as the setting `source`."""
    key = asset if isinstance(asset, dg.AssetKey) else asset.key
    return ASSET_SCHEME + "/".join(quote(part, safe="") for part in key.path)


def asset_key(url: str) -> dg.AssetKey | None:
    """Return the asset that a source stands for; None for every other source."""
    if not url.startswith(ASSET_SCHEME):
        return None
    return dg.AssetKey([unquote(part) for part in url.removeprefix(ASSET_SCHEME).split("/")])


def open_asset(
    url: str,
    context: dg.OpExecutionContext | dg.SensorEvaluationContext | dg.ScheduleEvaluationContext,
    selection: Selection,
    partition_by: Sequence[str],
) -> Source:
    """Open an asset as a catalog; nothing is loaded yet.

    The tick of a sensor or schedule, unlike a run, never loads the asset, and listing it may raise
    `NotListed`.
    """
    asset = _Upstream(url, context)
    if partition_by and asset.partitions_def is None:
        return _AssetTable(asset, selection, partition_by)
    if partition_by:
        raise ConfigError(
            f"the asset of {url} has partitions, which are those of the catalog; the setting "
            "partition_by is for an asset without. Leave it out."
        )
    versions = asset.versions()
    frames = {key: partial(asset.load, key) for key in versions}

    def look(key: str) -> str | None:
        return asset.versions([key]).get(key)

    return FrameCatalog(frames, selection, versions=versions, current_version=look, url=url)


class _Upstream:
    """The asset as the code location of a run or tick defines it."""

    def __init__(self, url: str, context: Any) -> None:
        self.url = url
        self.key = asset_key(url) or dg.AssetKey(url)
        self.may_load = isinstance(context, dg.OpExecutionContext)
        self.instance: dg.DagsterInstance = context.instance
        self._repository = _repository(context, self.key)
        definition = self._repository.assets_defs_by_key.get(self.key)
        if definition is None:
            raise ConfigError(
                f"this code location has no asset {self.key.to_user_string()!r}, which the "
                "setting source names. Add it to its definitions; for one of another code "
                "location, an AssetSpec with its key and IO manager."
            )
        self._definition = definition
        self.partitions_def = definition.partitions_def

    def version(self) -> str:
        """Return the source version of an asset without partitions."""
        records = self.instance.fetch_materializations(self.key, limit=1).records
        if not records:
            raise ConfigError(
                f"the asset {self.key.to_user_string()!r} was never materialized, so that there "
                "is nothing to embed. Materialize it first."
            )
        return f"event-{records[0].storage_id}"

    def versions(self, keys: Sequence[str] | None = None) -> dict[str, str]:
        """Return the source versions of materialized partitions, in the asset's order."""
        if self.partitions_def is None:  # one partition, with the asset's name
            return {self.key.path[-1]: self.version()}
        wanted = None if keys is None else set(keys)
        ids = self.instance.get_latest_storage_id_by_partition(self.key, _MATERIALIZATION, wanted)
        partition_keys = self.partitions_def.get_partition_keys(
            dynamic_partitions_store=self.instance
        )
        return {key: f"event-{ids[key]}" for key in partition_keys if key in ids}

    def load(self, key: str | None = None) -> Frame:
        """Return the value of the asset, or of one of its partitions."""
        what = f"the asset {self.key.to_user_string()!r}"
        partition_key = None
        if self.partitions_def is not None:
            partition_key = key
            what += f", partition {key!r}"
        try:
            return self._repository.load_asset_value(
                self.key,
                python_type=self._type(),
                instance=self.instance,
                partition_key=partition_key,
            )
        except SurgeError:
            raise
        except Exception as error:  # whatever an IO manager raises
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise TransientError(
                f"{what} could not be loaded through its IO manager ({reason}). Run again; if its "
                "value is gone, materialize it again. An asset that returns no value cannot be a "
                "source."
            ) from error

    def _type(self) -> Any:
        if not self._definition.is_executable:
            return None
        name = self._definition.get_output_name_for_asset_key(self.key)
        returned = self._definition.op.output_dict[name].dagster_type.typing_type
        return returned if isinstance(returned, type) and returned is not type(None) else None


def _repository(context: Any, key: dg.AssetKey) -> dg.RepositoryDefinition:
    repository = None
    with suppress(Exception):  # Dagster's own error is private
        repository = context.repository_def
    if repository is not None:
        return repository

    # A job that is executed in process has no repository.
    layer = context.job_def.asset_layer.asset_graph
    if layer.has(key):
        return dg.Definitions(assets=[layer.get(key).assets_def]).get_repository_def()
    raise ConfigError(
        f"the job has no code location in which the asset {key.to_user_string()!r} could be found: "
        "`execute_in_process` gives one only to jobs of assets. Materialize `embeddings`, or "
        "launch the job in Dagster."
    )


class _AssetTable:
    """An asset without partitions, divided by its columns when a run lists it."""

    def __init__(self, asset: _Upstream, selection: Selection, partition_by: Sequence[str]) -> None:
        self.url = asset.url
        self._asset = asset
        self._version = asset.version()
        self._selection = selection
        self._partition_by = partition_by
        self._loaded: list[Partition] | None = None

    def __iter__(self) -> Iterator[Partition]:
        """Yield the partitions of the version that was there when the asset was opened."""
        if self._loaded is None:
            self._loaded = self._load()
        yield from self._loaded

    def _load(self) -> list[Partition]:
        if not self._asset.may_load:
            raise NotListed(self.url, self._version)
        frame = self._asset.load()
        table = FrameTable(frame, self._partition_by, self._selection, url=self.url)
        loaded = []
        for partition in table:
            current = partial(self._current, partition.source_version)
            loaded.append(replace(partition, current_source_version=current))
        return loaded

    def _current(self, version: str) -> str:
        """Return the version of a partition, or another one if the asset was materialized since."""
        now = self._asset.version()
        return version if now == self._version else now
