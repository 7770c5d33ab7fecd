"""The table that a person reads when partitions failed: which, why, and what to do."""

from __future__ import annotations

from collections.abc import Sequence

from surge_dagster.engine.telemetry import Failure

_ROWS = 200
_TRY_AGAIN = "Run again."


def table_of_failures(failures: Sequence[Failure]) -> str:
    """A markdown table, cut to what a person will read."""
    if not failures:
        return "none"
    lines = ["| partition | reason | what to do |", "| --- | --- | --- |"]
    for failure in failures[:_ROWS]:
        remedy = failure.remedy or (_TRY_AGAIN if failure.transient else "")
        lines.append(f"| `{cell(failure.key)}` | {cell(_reason(failure))} | {cell(remedy)} |")
    if len(failures) > _ROWS:
        lines.append(f"| … | and {len(failures) - _ROWS:,} more | |")
    return "\n".join(lines)


def cell(text: str) -> str:
    """Text that cannot end its cell of a markdown table."""
    return text.replace("|", "\\|").replace("`", "'").replace("\n", " ")


def _reason(failure: Failure) -> str:
    """The reason without what stands in the other columns."""
    reason = failure.reason.removesuffix(failure.remedy) if failure.remedy else failure.reason
    return reason.strip().removeprefix(f"partition {failure.key!r}").lstrip(":, ")
