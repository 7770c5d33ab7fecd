"""How partitions that failed are told: in tables, as the failure of their run, and on the partitions themselves."""

from __future__ import annotations

from collections.abc import Sequence

import dagster as dg

from surge_dagster.engine.errors import ConfigError, SurgeError
from surge_dagster.engine.report import Failure
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.orchestration.dagster_internals import Planned
from surge_dagster.orchestration.events import report_events
from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.outcome import Outcome
from surge_dagster.orchestration.partition_keys import to_partition_key
from surge_dagster.orchestration.refusals import tell_of_refusals

_TABLE_ROWS = 200
_NAMED = 20
_TRY_AGAIN = "Run again."
_MEND = "Mend what the reason names, then launch this partition again."
_MEND_RUN = "Mend what the reason names, then run again."
_LOOK = "Look at the run's error, then run again."


def failure_table(rows: Sequence[tuple[str, str]], count: int | None = None) -> dg.MarkdownMetadataValue:
    """A table of keys and reasons, cut to what a person will read.

    Args:
        count: of all, where `rows` has only the first ones.
    """
    return _table(("partition", "reason"), rows, len(rows) if count is None else count)


def table_of_failures(failures: Sequence[Failure], ended_by: Exception | None = None) -> dg.MarkdownMetadataValue:
    """A table of partitions that failed: which, why, and what to do.

    Args:
        ended_by: the error that ended the run; it has a row of its own, the first one.
    """
    rows = [] if ended_by is None else [("(the whole run)", _told(ended_by), _remedy(ended_by))]
    rows += [
        (failure.key, _reason(failure), failure.remedy or (_TRY_AGAIN if failure.transient else _MEND))
        for failure in failures[:_TABLE_ROWS]
    ]
    return _table(("partition", "reason", "what to do"), rows, len(failures) + (ended_by is not None))


def failure_of(names: CatalogNames, outcome: Outcome) -> dg.Failure:
    """What a run ends with that did not do all it was to do, where another attempt would not do it either."""
    count, error = len(outcome.failures), outcome.ended_by
    named = [failure.reason for failure in outcome.failures[:_NAMED]]
    if count > _NAMED:
        named.append(f"… and {count - _NAMED:,} more, listed in the check {names.run_check.name}")
    failed = f"{count:,} partition{'' if count == 1 else 's'}"
    if error is None:
        told = f"{failed} failed; the others are published and will not be encoded again."
    else:
        told = f"{_told(error)}\n{failed} had failed by then:" if count else _told(error)
    return dg.Failure(
        "\n".join((told, *named)),
        metadata={"failed": table_of_failures(outcome.failures, error)},
        allow_retries=False,
    )


def tell_of_failures(names: CatalogNames, context: dg.OpExecutionContext, outcome: Outcome) -> None:
    """Make Dagster show exactly these partitions as failed when the run has ended, and why it refused any.

    Dagster shows a partition as failed when a failed run planned it and did not materialize it. One that was mended
    and embedded by another run meanwhile is left out.
    """
    if not outcome.failures:
        return
    done = {
        failure.key
        for failure in outcome.refused
        if _is_embedded_since(names, context.instance, outcome.partitions[failure.key])
    }
    tell_of_refusals(
        names, context, (failure for failure in outcome.refused if failure.key not in done), outcome.partitions
    )
    left = [failure for failure in outcome.failures if failure in outcome.unknown or failure.key not in done]
    keys = dict.fromkeys(_partition_key(outcome, failure) for failure in left)
    report_events(context.instance, context, [Planned(names.embeddings, key) for key in keys])


def _partition_key(outcome: Outcome, failure: Failure) -> str:
    return failure.key if failure in outcome.unknown else to_partition_key(failure.key)


def _is_embedded_since(names: CatalogNames, instance: dg.DagsterInstance, partition: Partition) -> bool:
    """Whether a partition has changed since it was listed, and has been embedded as it is now."""
    try:
        now = partition.current_source_version()
    except (SurgeError, OSError):
        return False  # nobody can tell now
    if now == partition.source_version:
        return False
    of_partition = dg.AssetRecordsFilter(names.embeddings, asset_partitions=[to_partition_key(partition.key)])
    records = instance.fetch_materializations(of_partition, limit=1).records
    made_from = [event.metadata.get("source_version") for record in records if (event := record.asset_materialization)]
    return any(version is not None and version.value == now for version in made_from)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], count: int) -> dg.MarkdownMetadataValue:
    if not rows:
        return dg.MetadataValue.md("none")
    lines = [f"| {' | '.join(titles)} |", f"| {' | '.join('---' for _ in titles)} |"]
    lines += [f"| `{_cell(key)}` | {' | '.join(map(_cell, others))} |" for key, *others in rows[:_TABLE_ROWS]]
    if count > _TABLE_ROWS:
        lines.append(f"| … | and {count - _TABLE_ROWS:,} more |{' |' * (len(titles) - 2)}")
    return dg.MetadataValue.md("\n".join(lines))


def _cell(text: str) -> str:
    """Text that cannot end its cell of a markdown table."""
    return text.replace("|", "\\|").replace("`", "'").replace("\n", " ")


def _told(error: Exception) -> str:
    """An error's text; of one that is not ours, with its kind, without which it often says little."""
    return str(error) if isinstance(error, SurgeError) else f"{type(error).__name__}: {error}"


def _remedy(error: Exception) -> str:
    match error:
        case ConfigError():
            return _MEND_RUN
        case SurgeError():
            return _TRY_AGAIN
        case _:
            return _LOOK


def _reason(failure: Failure) -> str:
    """The reason without what stands in the other columns."""
    reason = failure.reason.removesuffix(failure.remedy) if failure.remedy else failure.reason
    return reason.strip().removeprefix(f"partition {failure.key!r}").lstrip(":, ")
