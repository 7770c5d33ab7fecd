"""A run that has nothing to do, found without starting a pool."""

from __future__ import annotations

from collections.abc import Iterable

from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.model.spec import EncodingSpec, FileFormat
from surge_dagster.engine.output.catalog_record import CatalogRecord
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.output.spaces import find_space, record_catalog, require_format
from surge_dagster.engine.run.report import RunReport
from surge_dagster.engine.run.staging import remove_staged
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.store import Store


def report_when_fresh(
    partitions: Iterable[Partition],
    store: Store,
    spec: EncodingSpec,
    file_format: FileFormat = "parquet",
    catalog: CatalogRecord | None = None,
) -> RunReport | None:
    """The report of a run that has nothing to do, without starting a pool; None where there may be work.

    Such a run only removes segments that an earlier run left staged, and records the catalog.

    The model's files are digested, not loaded: a model whose content has changed under its name is another space, in
    which nothing is fresh.

    Raises:
        ConfigError: the output cannot be read, its model cannot be found, or the space has files of another format or
            another catalog.
    """
    space = find_space(store, spec)
    if space is None or space.spec_sha256 != spec.resolve().spec_sha256:
        return None
    require_format(store, space, file_format)
    outputs = OutputState(store, space.name, space.file_format)
    keys: list[str] = []
    try:
        for partition in outputs.looked_at(partitions):
            if outputs.status(partition) != "fresh":
                return None
            keys.append(partition.key)
    except (TransientError, ValueError):
        return None  # a file that cannot be read or an invalid key is its partition's failure: the run reports it
    if catalog is not None:
        record_catalog(store, space, catalog)
    remove_staged(store, space.name, keys)
    return RunReport(space.name, space.title, space.dimension, partitions_skipped=len(keys))
