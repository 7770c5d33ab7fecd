"""A run in this process, without Dagster, composed of settings: the function `embed`, and the
command of that name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from surge_dagster.cluster.cluster_run import ClusterRun
from surge_dagster.cluster.machine import memory_limit
from surge_dagster.cluster.ray_cluster import RayCluster
from surge_dagster.config.catalog_settings import CatalogSettings
from surge_dagster.config.settings import (
    EncoderSettings,
    FileSettings,
    Settings,
    absolute_model,
    absolute_place,
    load_settings,
)
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError, SurgeError
from surge_dagster.engine.feed.change_files import ChangeFeed
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.catalog_record import CatalogRecord
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.plan.calibrating import learning
from surge_dagster.engine.readers.removed_partitions import find_removed, record_removed
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.report import Event, Failure, Receipt, RunReport
from surge_dagster.engine.sources.partition import Partition, Source
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.counts import counted, named
from surge_dagster.engine.support.waiting import every
from surge_dagster.engine.tables.frames import Frame
from surge_dagster.engine.tables.opening import release
from surge_dagster.terminal import complain, progress_bar

_OF_RUNS = (CatalogSettings, EncoderSettings, FileSettings)
_OTHERS = {"gcp", "storage_options", "removed_partitions"}
_SETTINGS = {name for settings in _OF_RUNS for name in settings.model_fields} | _OTHERS
_FRAMES = "frame://python"  # the place of every catalog of frames, which catalog_name tells apart
_NAMED = 10
_UPDATE_SECONDS = 0.5  # of the progress of a run


class PartitionsFailed(SurgeError):
    """Some partitions were refused or not published; all others are. `report` is that of the run."""

    def __init__(self, report: RunReport) -> None:
        self.report = report
        failed = report.partitions_failed
        reasons = [failure.reason for failure in failed[:_NAMED]]
        if len(failed) > _NAMED:
            reasons.append(f"… and {len(failed) - _NAMED:,} more in report.partitions_failed")
        super().__init__(
            f"{counted(len(failed), 'partition')} failed ({report.partitions_written:,} written, "
            f"{report.partitions_skipped:,} fresh):\n" + "\n".join(reasons)
        )


class DeletionRefused(SurgeError):
    """Removed partitions were too many to delete, or an error ended their handling; `report` is
    that of the run."""

    def __init__(self, refusal: str, report: RunReport) -> None:
        super().__init__(refusal)
        self.report = report


def embed(
    source: str | Path | Frame | Mapping[str, Frame | Callable[[], Frame]] | None = None,
    output: str | Path | None = None,
    *,
    force: bool = False,
    quiet: bool = False,
    raise_on_failure: bool = True,
    **settings: Any,
) -> RunReport:
    """Embed what is missing or stale. After a crash, call it again: it continues.

        embed("products.csv", "embeddings", partition_by="category", id="sku", text="{title}. {description}")

    Args:
        source: a path, URL or pattern; a frame of polars, pandas or pyarrow, a Hugging Face dataset
            or a Delta table, which `partition_by` divides; or frames by partition key, also as
            functions that open one. Frames with a `catalog_name` are the whole catalog: what they
            lack was removed from it.
        output: a path or URL.
        force: encode fresh partitions again.
        quiet: show no progress on standard error, refused partitions alone.
        raise_on_failure: raise at the end where partitions failed; else look at `partitions_failed`
            of the report.
        settings: those of the command `embed`, by name. As there, `SURGE_…` variables and
            `surge.yaml` say the others.

    Returns:
        The report of the run, which has ended.

    Raises:
        PartitionsFailed: partitions were refused or could not be published; all others were.
        ConfigError, EncoderError, TransientError: there is no run, or it ended early; what was
            published stays.
        DeletionRefused: removed partitions were too many to delete, or an error ended their
            handling; all else is done.
    """
    if unknown := sorted(settings.keys() - _SETTINGS):
        raise ConfigError(
            f"embed has no setting {unknown[0]}; it has {', '.join(sorted(_SETTINGS))}"
        )
    settings["output"] = str(output) if isinstance(output, Path) else output
    if source is None or isinstance(source, str | Path):
        read = load_settings(source=source if source is None else str(source), **settings)
        catalog, record = read.open_source(), read.catalog_record()
    else:
        read = load_settings(**settings)
        catalog, record = read.open_frames(source), read.record(_FRAMES)
    ended = run_catalog(read, catalog, read.open_store(), record, force=force, quiet=quiet)
    if ended.report.partitions_failed and raise_on_failure:
        raise PartitionsFailed(ended.report)
    if ended.refusal and raise_on_failure:
        raise DeletionRefused(ended.refusal, ended.report)
    return ended.report


@dataclass(frozen=True, slots=True)
class EndedRun:
    """A run that has ended.

    Attributes:
        removed: keys of partitions that the source has no more, and that have files, or had them
            until now.
        refusal: why files of removed partitions were not deleted, although they were to be, or the
            error itself.
    """

    report: RunReport
    removed: tuple[str, ...]
    refusal: str | None


@dataclass(frozen=True, slots=True)
class _CatalogRuns:
    """See `cluster.machine.CatalogRuns`."""

    settings: Settings
    record: CatalogRecord
    force: bool
    refused: tuple[()] = ()

    def open_pool(self) -> EncoderPool:
        return self.settings.encoder_pool()

    def list_partitions(self) -> Iterable[Partition]:
        return self.settings.open_source()

    def new_run(
        self,
        partitions: Sequence[Partition],
        pool: EncoderPool,
        store: Store | None = None,
        *,
        at_once: int = 1,
        **options: Any,
    ) -> EmbeddingRun:
        settings = self.settings
        return EmbeddingRun(
            partitions,
            store or settings.open_store(),
            pool,
            settings.thresholds(),
            catalog=self.record,
            force=self.force,
            include_text=settings.include_text,
            observer=ChangeFeed(always=settings.changes, keep_days=settings.keep_changes_days),
            memory_limit_bytes=memory_limit(settings.memory_limit_bytes, at_once),
            grace_seconds=settings.grace_seconds,
            **options,
        )


def run_catalog(
    settings: Settings,
    catalog: Source,
    store: Store,
    record: CatalogRecord,
    *,
    force: bool,
    quiet: bool,
) -> EndedRun:
    """Embed what is missing or stale of an open catalog, and show progress, refused and removed
    partitions."""
    record.require_apart(store)
    partitions = list(catalog)
    if not partitions:
        complain(f"the source {catalog.url!r} has no rows, and so no partitions")
    if settings.cluster != "none" and record.place == _FRAMES:
        raise ConfigError(
            "frames are in this process, and machines of a cluster cannot read them. Write them to files that all "
            "machines reach, or set cluster to none"
        )
    if settings.cluster != "none":
        places = {name: absolute_place(getattr(settings, name)) for name in ("source", "output")}
        settings = settings.model_copy(update={**places, "model": absolute_model(settings.model)})
    runs = _CatalogRuns(settings, record, force)
    with settings.pool_of_run() as pool:
        if settings.cluster == "none":
            run = runs.new_run(partitions, pool, store)
            events = learning(run, pool, store)
        else:
            connect = partial(
                RayCluster, settings.cluster, runs, pool.space, complain, settings.devices
            )
            grace_seconds = settings.grace_seconds
            run = ClusterRun(
                partitions,
                runs,
                pool,
                connect,
                force=force,
                grace_seconds=grace_seconds,
                warn=complain,
            )
            events = run.events()
        run.report.price_per_hour = settings.price_per_hour
        total = sum(partition.rows or 0 for partition in partitions)
        _follow(run, events, total or None, quiet)
    removed, refusal = (), None
    is_frames = record.place == _FRAMES
    if record.name or not is_frames:  # frames without a name may be a part of what the output holds
        # listing frames again may compute them, and finds the same keys
        source = partitions if is_frames else catalog
        removed, refusal = _handle_removed(settings, source, partitions, store, run.space)
    release(catalog)
    return EndedRun(run.report, removed, refusal)


def _handle_removed(
    settings: Settings,
    source: Iterable[Partition],
    listed: Iterable[Partition],
    store: Store,
    space: Space,
) -> tuple[tuple[str, ...], str | None]:
    """Record partitions that are not `listed`, or delete their files; see `EndedRun`."""
    is_delete, removed = settings.removed_partitions == "delete", list[str]()
    try:
        outputs = OutputState(store, space.name)
        keys = {partition.key for partition in listed}
        files = find_removed(outputs, space, keys)
        if files:  # another run may have embedded what was added since
            keys = {partition.key for partition in source}
            files = find_removed(outputs, space, keys)
        refusal = record_removed(outputs, space, files, keys)
        for key, file in files.items():
            if is_delete and not refusal:
                if not outputs.is_as_listed(file.stored.name):  # another run has published it since
                    continue
                store.delete(file.stored.name)
            removed.append(key)
    except SurgeError as error:
        reason = (
            f"Partitions that were removed from the source could not be handled: {error}".rstrip(
                "."
            )
        )
        complain(f"{reason}.")
        return tuple(removed), reason
    if refusal:
        complain(f"{refusal}.")
    elif removed:
        kept = "Readers leave out the rows; with removed_partitions set to delete, a run deletes the files."
        what = "The files were deleted." if is_delete else kept
        complain(
            f"{counted(len(removed), 'partition')} removed from the source: {named(map(repr, removed))}. {what}"
        )
    return tuple(removed), refusal if is_delete else None


def _follow(
    run: EmbeddingRun | ClusterRun[Any],
    run_events: Generator[Event],
    total: int | None,
    quiet: bool,
) -> None:
    not_encoded = 0

    def update() -> None:
        done = not_encoded + (run.in_flight.encoded if run.in_flight else run.report.texts_encoded)
        # of a refused partition some texts may have been encoded
        show(min(done, total) if total else done, total)

    with progress_bar("texts", total, quiet=quiet) as show:
        with every(_UPDATE_SECONDS, update, "surge-progress"), closing(run_events) as events:
            for event in events:
                match event:
                    case Receipt(action="encoded"):
                        not_encoded += event.texts_reused + event.skipped_rows
                    case Receipt():
                        not_encoded += event.rows + event.skipped_rows
                    case Failure():
                        complain(f"refused: {event.reason}")
        update()


def _with_settings(signature: inspect.Signature) -> inspect.Signature:
    """The signature with each setting in the place of `**settings`, for help and completion."""
    *own, _ = signature.parameters.values()
    keyword, fields = (
        inspect.Parameter.KEYWORD_ONLY,
        {name: Settings.model_fields[name] for name in sorted(_SETTINGS)},
    )
    settings = [
        inspect.Parameter(name, keyword, default=None, annotation=field.annotation)
        for name, field in fields.items()
    ]
    return signature.replace(parameters=[*own, *settings])


embed.__signature__ = _with_settings(inspect.signature(embed))  # pyright: ignore[reportFunctionMemberAccess]
