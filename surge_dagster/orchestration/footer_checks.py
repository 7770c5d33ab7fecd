"""The checks `dimensions_match` and `row_counts_match`, judged from the footers that a run reads.

A footer has the column type and the row count that readers of the file get. A run reads the footer
of each file to decide whether the partition is fresh, and once more after it publishes the file.
Both checks use what was read then, so they cover every partition that the run published or found
fresh, and read nothing of their own.

The rows are compared with the row count of the source, if the source knows it without reading, as
folders of Parquet files and tables do. Otherwise they are compared with what the run encoded. If
the file was fresh, nothing is known to compare with, and `row_counts_match` does not judge it.

A file with a violation is not valid: the run that finds it encodes the partition again, if its
config selects missing partitions. The check still fails in this run, and passes in the next one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.files.facts import Flaw
from surge_dagster.engine.files.formats import PublishedFile
from surge_dagster.engine.files.rows import embedding_type
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.freshness import Freshness, OutputState
from surge_dagster.engine.run.report import Failure
from surge_dagster.engine.sources.partition import Partition

_ENCODE_AGAIN = "Run again: it is encoded again."
_MOVE_AWAY = "Move the file away and run again."


@dataclass(slots=True)
class FooterChecks:
    """What both checks found in a run, by catalog key.

    Attributes:
        sound: partitions whose footer was judged without a violation.
        dimensions: reasons why `dimensions_match` fails.
        rows: reasons why `row_counts_match` fails.
        uncounted: sound partitions of whose rows the source has no count.
    """

    sound: set[str] = field(default_factory=set)
    dimensions: dict[str, str] = field(default_factory=dict)
    rows: dict[str, str] = field(default_factory=dict)
    uncounted: set[str] = field(default_factory=set)

    @property
    def judged_dimensions(self) -> set[str]:
        return self.sound | self.dimensions.keys()

    @property
    def judged_rows(self) -> set[str]:
        return (self.sound - self.uncounted) | self.rows.keys()

    def record(
        self,
        partition: Partition,
        freshness: Freshness,
        space: Space,
        receipt_rows: int | None = None,
    ) -> str | None:
        """Record what the footer of a partition's file shows, and return its violation.

        Args:
            receipt_rows: rows of the file's receipt; None before the run has one.
        """
        found = _violation(partition, freshness, space, receipt_rows)
        if found is None:
            if freshness.status == "fresh":
                self.sound.add(partition.key)
                if partition.rows is None and receipt_rows is None:
                    self.uncounted.add(partition.key)
                else:
                    self.uncounted.discard(partition.key)
            return None

        flaw, reason = found
        violations = self.dimensions if flaw == "dimension" else self.rows
        violations[partition.key] = reason
        return reason


def _violation(
    partition: Partition, freshness: Freshness, space: Space, receipt_rows: int | None
) -> tuple[Flaw, str] | None:
    invalid = freshness.invalid
    if invalid is not None and invalid.flaw in ("dimension", "rows"):
        return invalid.flaw, f"{invalid}."

    file = freshness.file
    if file is None or freshness.status != "fresh":
        return None

    vectors = file.columns.field("embedding").type
    expected_vectors = embedding_type(space.dimension, space.dtype)
    if vectors != expected_vectors:
        finding = f"its file has vectors of type {vectors}; the space has {expected_vectors}."
        return "dimension", finding

    expected_rows = _rows_of_source(partition, file, receipt_rows)
    if expected_rows is not None and file.facts.rows != expected_rows:
        return "rows", f"its file has {file.facts.rows:,} rows; its source has {expected_rows:,}."
    return None


def _rows_of_source(
    partition: Partition, file: PublishedFile, receipt_rows: int | None
) -> int | None:
    """Return the rows that the file should have; None if only its own facts tell, which the footer
    agrees with."""
    if partition.rows is not None:
        return partition.rows - file.facts.skipped_rows
    return receipt_rows


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
        violation = checks.record(partition, freshness, space, published_rows)
        file = freshness.file
        if freshness.error is not None:
            yield unreadable(key, freshness.error)
        elif violation is not None:
            yield _failure(key, violation, _ENCODE_AGAIN)
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
