"""Whether there is anything to do, found out without a worker: most launches of an unattended job find nothing."""

from __future__ import annotations

from collections.abc import Iterable

from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.model.spec import EncodingSpec, FileFormat
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.output.spaces import find_space, require_format
from surge_dagster.engine.report import RunReport
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.store import Store


def report_when_fresh(
    partitions: Iterable[Partition], store: Store, spec: EncodingSpec, file_format: FileFormat = "parquet"
) -> RunReport | None:
    """The report of a run that has nothing to do; None when there may be something, and a pool has to be started.

    The model's files are digested, not loaded: a model whose content has changed under its name is another space, in
    which nothing is fresh.

    Raises:
        ConfigError: the output cannot be read, the model that it was made with is not there, or the space has files
            of another format than is asked for.
    """
    space = find_space(store, spec)
    if space is None or space.spec_sha256 != spec.resolve().spec_sha256:
        return None
    require_format(store, space, file_format)
    outputs = OutputState(store, space.name, space.file_format)
    report = RunReport(space=space.name, dimension=space.dimension)
    try:
        for partition in outputs.looked_at(partitions):
            if outputs.status(partition) != "fresh":
                return None
            report.partitions_skipped += 1
    except (TransientError, ValueError):
        return None  # one file that cannot be read, or one key, is its partition's failure: the run says so
    return report
