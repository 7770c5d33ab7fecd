"""How partitions that failed are told: in tables, as the failure of their run, and on the partitions themselves."""

from __future__ import annotations

from collections.abc import Sequence

import dagster as dg

from surge_dagster.assets.names import CatalogNames
from surge_dagster.assets.outcome import Outcome
from surge_dagster.assets.partition_keys import to_partition_key
from surge_dagster.assets.planned import plan
from surge_dagster.assets.refusals import tell_of_refusals
from surge_dagster.engine.catalog import Partition
from surge_dagster.engine.errors import SurgeError
from surge_dagster.engine.telemetry import Failure

_TABLE_ROWS = 200
_NAMED = 20
_TRY_AGAIN = "Run again."
_MEND = "Mend what the reason names, then launch this partition again."


def failure_table(rows: Sequence[tuple[str, str]], count: int | None = None) -> dg.MarkdownMetadataValue:
    """A table of keys and reasons, cut to what a person will read.

    Args:
        count: of all, where `rows` has only the first ones.
    """
    return _table(("partition", "reason"), rows, len(rows) if count is None else count)


def table_of_failures(failures: Sequence[Failure]) -> dg.MarkdownMetadataValue:
    """A table of partitions that failed: which, why, and what to do."""
    rows = [
        (failure.key, _reason(failure), failure.remedy or (_TRY_AGAIN if failure.transient else _MEND))
        for failure in failures[:_TABLE_ROWS]
    ]
    return _table(("partition", "reason", "what to do"), rows, len(failures))


def failure_of(names: CatalogNames, outcome: Outcome) -> dg.Failure:
    """What a run with refused partitions ends with; nothing that went wrong in the data gets better by trying again."""
    count = len(outcome.failures)
    named = [failure.reason for failure in outcome.failures[:_NAMED]]
    if count > _NAMED:
        named.append(f"… and {count - _NAMED:,} more, listed in the check {names.run_check.name}")
    return dg.Failure(
        f"{count:,} partition{'' if count == 1 else 's'} failed; "
        "the others are published and will not be encoded again.\n" + "\n".join(named),
        metadata={"failed": table_of_failures(outcome.failures)},
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
    plan(names, context, (to_partition_key(failure.key) for failure in outcome.failures if failure.key not in done))


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


def _reason(failure: Failure) -> str:
    """The reason without what stands in the other columns."""
    reason = failure.reason.removesuffix(failure.remedy) if failure.remedy else failure.reason
    return reason.strip().removeprefix(f"partition {failure.key!r}").lstrip(":, ")
