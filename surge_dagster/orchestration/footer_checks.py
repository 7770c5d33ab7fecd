"""The checks `dimensions_match` and `row_counts_match`, judged from the footers that a run reads.

A footer has the column type and the row count that readers of the file get. A run reads the footer
of each file to decide whether the partition is fresh, and once more after it publishes the file.
Both checks use what was read then, so they cover every partition that the run published or found
fresh, and read nothing of their own.

The rows are compared with the row count of the source, if the source knows it without reading, as
folders of Parquet files and tables do. Otherwise they are compared with what the run encoded. If
the file was fresh, nothing is known to compare with, and `row_counts_match` does not judge it.

A file with a fault is not valid: the run that finds it encodes the partition again, if its config
selects missing partitions. The check still fails in this run, and passes in the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.files.rows import embedding_type
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.freshness import Freshness, OutputState
from surge_dagster.engine.run.report import Failure
from surge_dagster.engine.sources.partition import Partition

_ENCODE_AGAIN = "Run again: it is encoded again."
_MOVE_AWAY = "Move the file away and run again."


@dataclass(slots=True)
class FooterChecks:
    """What both checks found in a run, by the catalog keys of the partitions that they judged.

    Attributes:
        dimensions: why `dimensions_match` fails; "" if the footer is right.
        rows: the same for `row_counts_match`.
    """

    dimensions: dict[str, str] = field(default_factory=dict)
    rows: dict[str, str] = field(default_factory=dict)

    def record(
        self,
        partition: Partition,
        freshness: Freshness,
        space: Space,
        receipt_rows: int | None = None,
    ) -> str:
        """Record what the footer of a partition's file shows; return its fault or "".

        A fault stays on record if the run encodes the partition again.

        Args:
            receipt_rows: rows of the file's receipt; None before the run has one.
        """
        dimension_fault = _dimension_fault(freshness, space)
        if dimension_fault is not None:
            self.dimensions[partition.key] = self.dimensions.get(partition.key) or dimension_fault
        rows_fault = _rows_fault(partition, freshness, receipt_rows)
        if rows_fault is not None:
            self.rows[partition.key] = self.rows.get(partition.key) or rows_fault
        return dimension_fault or rows_fault or ""


def _dimension_fault(freshness: Freshness, space: Space) -> str | None:
    """Return why a file has other vectors than its space, or ""; None if that cannot be judged."""
    invalid = freshness.invalid
    if invalid is not None and invalid.flaw == "dimension":
        return f"{invalid}."
    file = freshness.file
    if file is None or freshness.status != "fresh":
        return None

    vectors = file.columns.field("embedding").type
    expected = embedding_type(space.dimension, space.dtype)
    if vectors == expected:
        return ""
    return f"its file has vectors of type {vectors}; the space has {expected}."


def _rows_fault(partition: Partition, freshness: Freshness, receipt_rows: int | None) -> str | None:
    """Return why a file has other rows than its source, or ""; None if that cannot be judged."""
    invalid = freshness.invalid
    if invalid is not None and invalid.flaw == "rows":
        return f"{invalid}."
    file = freshness.file
    if file is None or freshness.status != "fresh":
        return None

    expected = receipt_rows
    if partition.rows is not None:
        expected = partition.rows - file.facts.skipped_rows
    if expected is None:
        return None
    if file.facts.rows == expected:
        return ""
    return f"its file has {file.facts.rows:,} rows; its source has {expected:,}."


def footer_failures(
    outputs: OutputState,
    rows: Mapping[str, int],
    partitions: Mapping[str, Partition],
    space: Space,
    checks: FooterChecks,
) -> Iterator[Failure]:
    """Judge the footers of files that a run has published, and yield what is wrong with them.

    Args:
        rows: of each file, by catalog key.
    """
    outputs.refresh()
    outputs.look_at(rows)
    for key, published_rows in rows.items():
        partition = partitions[key]
        freshness = outputs.freshness(partition)
        fault = checks.record(partition, freshness, space, published_rows)
        file = freshness.file
        if freshness.error is not None:
            yield unreadable(key, freshness.error)
        elif fault:
            yield _failure(key, fault, _ENCODE_AGAIN)
        elif file is None:
            finding = "its published file is missing or damaged."
            yield _failure(key, finding, _ENCODE_AGAIN, transient=True)
        elif freshness.status == "foreign":
            finding = (
                f"its file holds vectors of the space {file.facts.space!r}; expected "
                f"{outputs.space!r}."
            )
            yield _failure(key, finding, _MOVE_AWAY)
        # If the status is "stale", another writer has published the file of a newer source.


def unreadable(key: str, error: TransientError) -> Failure:
    return Failure(key, str(error), transient=True)


def _failure(key: str, finding: str, remedy: str, *, transient: bool = False) -> Failure:
    reason = f"partition {key!r}: {finding} {remedy}"
    return Failure(key, reason, transient, remedy, in_source=False)
