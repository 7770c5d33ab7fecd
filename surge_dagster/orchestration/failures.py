"""Failed partitions: their tables, the failure of their run, and the events that show them in
Dagster.

Bad data stays bad until its source or a setting changes. So a partition that a run refuses for its
content gets an observation of `embeddings` with the reason. An operator finds it on the page of the
partition, and the sensor reads in one query which partitions it must not request. A partition that
failed for a transient reason gets no observation.

The observation names the source version and the fingerprint of the settings with which the
partition was read: the run may report it hours later, when the source or the settings have changed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import dagster as dg
from sqlalchemy.exc import InterfaceError, OperationalError

from surge_dagster.engine.errors import EncoderError, SurgeError, TransientError
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.support.counts import counted
from surge_dagster.orchestration.asset_events import DATA_VERSION_TAG
from surge_dagster.orchestration.dagster_internals import Event, Planned
from surge_dagster.orchestration.events import report_events
from surge_dagster.orchestration.launch import RETRY_TAG
from surge_dagster.orchestration.names import CatalogNames, CatalogResources
from surge_dagster.orchestration.outcome import Outcome
from surge_dagster.orchestration.partition_keys import to_partition_key
from surge_dagster.orchestration.records import Catalogued

_TABLE_ROWS = 200
_NAMED = 20
# After these errors Dagster launches the run again; the last two are of Dagster's own database.
_PASSING = EncoderError, TransientError, OperationalError, InterfaceError


def failure_table(rows: Sequence[tuple[str, str]]) -> dg.MarkdownMetadataValue:
    """Return a table of at most 200 failed partitions with their reasons and remedies."""
    shown = [("partition", "reason")]
    for key, reason in rows[:_TABLE_ROWS]:
        shown.append((key.replace("\n", " "), reason.replace("\n", " ")))
    if len(rows) > _TABLE_ROWS:
        shown.append(("…", f"and {len(rows) - _TABLE_ROWS:,} more"))
    return markdown_table(shown)


def markdown_table(rows: Sequence[Sequence[str]]) -> dg.MarkdownMetadataValue:
    """Return a table whose first row is its header; the lines of a cell stand in a row."""
    header, *others = rows
    lines = [f"| {' | '.join(header)} |", f"|{' --- |' * len(header)}"]
    lines += [f"| {' | '.join(map(_cell, row))} |" for row in others]
    return dg.MetadataValue.md("\n".join(lines))


def table_of_failures(outcome: Outcome) -> dg.MarkdownMetadataValue:
    """Return a table of what ended a run and of its failed partitions."""
    rows = [(failure.key, failure.reason) for failure in outcome.failures.values()]
    if outcome.ended_by is not None:
        rows.insert(0, ("(the whole run)", _text(outcome.ended_by)))
    return failure_table(rows)


def failed_metadata(rows: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return metadata of a check: a table of wrong partitions, and all their keys for alerts."""
    if not rows:
        return {}  # Dagster would show a dialog that holds nothing
    keys = dg.MetadataValue.json([{"key": key} for key in dict.fromkeys(key for key, _ in rows)])
    return {"failed": failure_table(rows), "partitions_failed": keys}


@contextmanager
def errors_as_failures(context: dg.OpExecutionContext) -> Iterator[None]:
    """Raise errors of the engine as failures of the run."""
    try:
        yield
    except SurgeError as error:
        is_transient = isinstance(error, TransientError)
        raise run_failure(context, str(error), is_transient=is_transient) from error


def run_failure(
    context: dg.OpExecutionContext,
    description: str,
    *,
    is_transient: bool = False,
    metadata: Mapping[str, Any] | None = None,
) -> dg.Failure:
    """Return the failure that ends a run, which Dagster launches again if it is transient."""
    allow_run_retry(context, is_transient)
    return dg.Failure(description, metadata=metadata, allow_retries=is_transient)


def allow_run_retry(context: dg.OpExecutionContext, is_allowed: bool) -> None:
    """Tag a run that fails with whether Dagster may launch it again."""
    # Without a database the tag stays that of the job, which allows it.
    with suppress(Exception):
        context.instance.add_run_tags(context.run_id, {RETRY_TAG: str(is_allowed).lower()})


def is_passing(error: BaseException) -> bool:
    """Return whether Dagster launches a run again that ended with this error."""
    return isinstance(error, _PASSING) or isinstance(error.__cause__, _PASSING)


def failure_of(names: CatalogNames, context: dg.OpExecutionContext, outcome: Outcome) -> dg.Failure:
    """Return the failure that ends a run with failed partitions, or one that an error ended."""
    failures = list(outcome.failures.values())
    error = outcome.ended_by
    failed = counted(len(failures), "partition")
    if error is None:
        is_transient = any(failure.transient for failure in failures)
        lines = [f"{failed} failed; the others are published and will not be encoded again."]
    else:
        is_transient = is_passing(error)
        lines = [_text(error)]
        if failures:
            lines.append(f"{failed} had failed by then:")
    lines += [failure.reason for failure in failures[:_NAMED]]
    if len(failures) > _NAMED:
        lines.append(f"The check {names.run_check.name} lists all of them.")
    return run_failure(
        context,
        "\n".join(lines),
        is_transient=is_transient,
        metadata={"failed": table_of_failures(outcome)},
    )


def report_failures(names: CatalogNames, context: dg.OpExecutionContext, outcome: Outcome) -> None:
    """Make Dagster show exactly these partitions as failed: planned and not materialized; report
    the reasons of those that were refused."""
    if not outcome.failures:
        return
    fingerprint = refusal_fingerprint(names.resources(context))
    events: list[Event] = []
    for failure in outcome.failures.values():
        partition = outcome.partitions.get(failure.key)
        is_refused = failure.in_source and not failure.transient
        if partition is None or not is_refused:
            continue
        refusal = dg.AssetObservation(
            outcome.asset,
            partition=to_partition_key(failure.key),
            description="Refused; not requested again until its source or a setting changes.",
            metadata={"key": failure.key, "refused": failure.reason},
            # Dagster can read no other tag of many partitions in one query.
            tags={DATA_VERSION_TAG: _refused_version(partition, fingerprint)},
        )
        events.append(refusal)
    events += [Planned(outcome.asset, key) for key in outcome.failures]
    report_events(context.instance, context, events)


def refusal_fingerprint(resources: CatalogResources) -> str:
    catalog = resources.catalog.model_dump(
        include={"id", "text", "missing_text", "max_text_bytes", "columns", "bad_rows", "long_text"}
    )
    # Devices count: a text may kill workers of one device only.
    prices = {"price_per_hour", "price_per_million_tokens", "max_cost"}
    encoder = resources.encoder.model_dump(exclude={"grace_seconds", *prices})
    return hashlib.sha256(json.dumps([catalog, encoder], sort_keys=True).encode()).hexdigest()[:12]


def still_refused(
    catalogued: Catalogued, by_key: Mapping[str, Partition], fingerprint: str
) -> set[str]:
    """Return partition keys whose present content was refused with these settings."""
    refused: set[str] = set()
    for key, version in catalogued.refused.items():
        if key not in by_key or version != _refused_version(by_key[key], fingerprint):
            continue
        if catalogued.refusal_ids.get(key, -1) > catalogued.embedding_ids.get(key, -1):
            refused.add(key)
    return refused


def _refused_version(partition: Partition, fingerprint: str) -> str:
    return hashlib.sha256(f"{partition.source_version}\0{fingerprint}".encode()).hexdigest()[:32]


def _cell(text: str) -> str:
    """Return code, because a file's name may be Markdown of an image or a link."""
    shown = text.replace("|", "\\|").replace("`", "'")
    return " ".join(f"`{line or ' '}`" for line in shown.split("\n"))


def _text(error: BaseException) -> str:
    if isinstance(error, SurgeError):
        return str(error)
    return f"{type(error).__name__}: {error}"
