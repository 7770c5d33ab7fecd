"""A run without Dagster, composed of settings: the function and the command `embed`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from surge_dagster.cluster.cluster_run import OpenedRun, open_run
from surge_dagster.config.catalog_settings import FRAMES
from surge_dagster.config.run_setup import RunSetup
from surge_dagster.config.settings import Settings, load_settings
from surge_dagster.engine.errors import SurgeError
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.readers.removed_partitions import handle_removed
from surge_dagster.engine.run.events import Follower, Progress
from surge_dagster.engine.run.report import Failure, RunReport
from surge_dagster.engine.sources.partition import Partition, Source
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.counts import counted, named
from surge_dagster.engine.tables.frames import Frame
from surge_dagster.terminal import complain, progress_bar

# A frame, or frames by partition key.
Frames: TypeAlias = Frame | Mapping[str, Frame | Callable[[], Frame]]

_NAMED = 10
_UPDATE_SECONDS = 0.5  # of the progress of a run


class PartitionsFailed(SurgeError):
    """Some partitions were refused or not published; all others are.

    Attributes:
        report: of the run.
    """

    def __init__(self, report: RunReport) -> None:
        self.report = report
        failed = report.partitions_failed
        reasons = [failure.reason for failure in failed[:_NAMED]]
        if len(failed) > _NAMED:
            reasons.append(f"… and {len(failed) - _NAMED:,} more in report.partitions_failed")
        super().__init__(
            f"{counted(len(failed), 'partition')} failed ({report.partitions_written:,} written, "
            f"{report.partitions_skipped:,} up to date):\n" + "\n".join(reasons)
        )


class DeletionRefused(SurgeError):
    """Too many removed partitions to delete, or an error in handling them.

    Attributes:
        report: of the run.
    """

    def __init__(self, refusal: str, report: RunReport) -> None:
        super().__init__(refusal)
        self.report = report


def embed(
    source: str | Path | Frames | None = None,
    output: str | Path | None = None,
    *,
    force: bool = False,
    quiet: bool = False,
    raise_on_failure: bool = True,
    **settings: Any,
) -> RunReport:
    """Embed what is missing or stale. After a crash, call it again: it continues.

        embed(
            "products.csv",
            "embeddings",
            partition_by="category",
            id="sku",
            text="{title}. {description}",
        )

    Args:
        source: a path, URL or pattern; a frame of polars, pandas or pyarrow, a Hugging Face dataset
            or a Delta table, which `partition_by` divides; or frames by partition key, also as
            functions that open one. Frames with a `catalog_name` are the whole catalog: what they
            lack was removed from it.
        output: a path or URL.
        force: encode fresh partitions again.
        quiet: show no progress on standard error, only refused partitions.
        raise_on_failure: raise at the end if partitions failed; otherwise look at
            `partitions_failed` of the report.
        settings: those of the command `embed`, by name. As for the command, `SURGE_…` variables and
            `surge.yaml` give the others.

    Returns:
        The report of the run, which has ended.

    Raises:
        PartitionsFailed: partitions were refused or could not be published; all others were.
        ConfigError, EncoderError, TransientError: there is no run, or it ended early; what was
            published stays.
        DeletionRefused: removed partitions were too many to delete, or an error ended their
            handling; all else is done.
    """
    if isinstance(output, Path):
        output = str(output)
    read, catalog = _read_settings(source, output, settings)

    ended = run_catalog(read, catalog, read.open_store(), force=force, quiet=quiet)
    if ended.report.partitions_failed and raise_on_failure:
        raise PartitionsFailed(ended.report)
    if ended.refusal and raise_on_failure:
        raise DeletionRefused(ended.refusal, ended.report)
    return ended.report


def _read_settings(
    source: str | Path | Frames | None, output: str | None, settings: Mapping[str, Any]
) -> tuple[Settings, Source]:
    """Return the settings of a run, and its catalog."""
    if isinstance(source, Path):
        source = str(source)
    if source is None or isinstance(source, str):
        read = load_settings(source=source, output=output, **settings)
        return read, read.open_source()

    read = load_settings(output=output, **settings)
    catalog = read.open_frames(source, read.encoding_spec())
    return read.model_copy(update={"source": FRAMES}), catalog


@dataclass(frozen=True, slots=True)
class EndedRun:
    """A run that has ended.

    Attributes:
        removed: keys of partitions that were removed from the source, whose files are recorded or
            deleted.
        refusal: why files were not deleted although they were to be, or the error itself.
    """

    report: RunReport
    removed: Sequence[str] = ()
    refusal: str | None = None


def run_catalog(
    settings: Settings, catalog: Source, store: Store, *, force: bool, quiet: bool
) -> EndedRun:
    """Embed what is missing or stale of an open catalog, and report on standard error."""
    partitions = list(catalog)
    if not partitions:
        complain(f"the source {catalog.url!r} has no rows, and so no partitions")

    options = settings.cloud_options()
    setup = RunSetup(
        catalog=settings,
        encoder=settings,
        files=settings,
        source=settings.source,
        output=settings.output,
        source_options=options,
        output_options=options,
        grace_seconds=settings.grace_seconds,
        force=force,
    )
    with settings.pool_of_run() as pool:
        opened = open_run(setup, partitions, pool, store, complain)
        _follow(opened, partitions, quiet=quiet)
    ended = EndedRun(opened.run.report)
    # Frames without a name may be a part of what the output has.
    if settings.source != FRAMES or settings.catalog_name:
        ended = _handle_removed(settings, partitions, store, opened)
    return ended


def _follow(opened: OpenedRun, partitions: Sequence[Partition], *, quiet: bool) -> None:
    follower = Follower(opened.run, partitions)
    knows_texts = follower.all_texts is not None
    unit = "texts" if knows_texts else "partitions"
    with progress_bar(unit, quiet=quiet) as show_amount:

        def show(progress: Progress) -> None:
            if knows_texts:
                show_amount(progress.texts, progress.all_texts)
            else:
                show_amount(progress.partitions, progress.all_partitions)

        with closing(follower.follow(opened.events(), show, _UPDATE_SECONDS)) as events:
            for event in events:
                if isinstance(event, Failure):
                    complain(f"refused: {event.reason}")
        show(follower.progress())


@dataclass
class _TerminalReporter:
    """See `RemovalReporter`."""

    deletes: bool
    removed: list[str] = field(default_factory=list)

    def found(self, keys: Sequence[str], refusal: str | None) -> None:
        if refusal:
            complain(f"{refusal}.")
        if refusal or not self.deletes:
            self.removed.extend(keys)

    def deleting(self, key: str, location: str) -> None:
        pass

    def deleted(self, key: str) -> None:
        self.removed.append(key)


def _handle_removed(
    settings: Settings, partitions: Sequence[Partition], store: Store, opened: OpenedRun
) -> EndedRun:
    """Record partitions that were removed from the source, or delete their files."""
    report = opened.run.report
    space = opened.run.space
    reporter = _TerminalReporter(settings.removed_partitions == "delete")
    keys = {partition.key for partition in partitions}
    try:
        refusal = handle_removed(
            OutputState(store, space.name), space, keys, reporter, delete=reporter.deletes
        )
    except SurgeError as error:
        reason = f"Partitions that were removed from the source could not be handled: {error}"
        reason = reason.removesuffix(".")
        complain(f"{reason}.")
        return EndedRun(report, reporter.removed, reason)

    if reporter.removed and not refusal:
        then = (
            "Readers leave out the rows; with removed_partitions set to delete, a run deletes the "
            "files."
        )
        if reporter.deletes:
            then = "The files were deleted."
        count = counted(len(reporter.removed), "partition")
        named_keys = named(map(repr, reporter.removed))
        complain(f"{count} removed from the source: {named_keys}. {then}")
    return EndedRun(report, reporter.removed, refusal if reporter.deletes else None)
