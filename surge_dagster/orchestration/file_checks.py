"""The checks `dimensions_match` and `row_counts_match`, judged from what a run knows of each file.

A run reads the footer of each file to decide whether the partition is fresh, and has a receipt of
each file that it publishes. Both checks use these, so they cover every partition that the run
published or found fresh, and read nothing of their own.

The rows are compared with the row count of the source, if the source knows it without reading, as
folders of Parquet files and tables do. Otherwise they are what the run has read; of a fresh file
`row_counts_match` then judges nothing.

A file with a fault is not valid: the run that finds it encodes the partition again, if its config
selects missing partitions. The check still fails in this run, and passes in the next one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from surge_dagster.engine.files.facts import InvalidFile
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.run.report import Receipt
from surge_dagster.engine.sources.partition import Partition


@dataclass(slots=True)
class FileChecks:
    """What both checks found in a run, by the catalog keys of the partitions that they judged.

    Attributes:
        dimensions: why `dimensions_match` fails; "" if the file is right.
        rows: the same for `row_counts_match`.
    """

    dimensions: dict[str, str] = field(default_factory=dict)
    rows: dict[str, str] = field(default_factory=dict)

    def record(self, partition: Partition, receipt: Receipt, space: Space) -> None:
        """Record whether a file is as its space and source demand."""
        wrong_dimension = ""
        if receipt.dimension != space.dimension:
            wrong_dimension = (
                f"its file has {receipt.dimension} numbers per row; the space has "
                f"{space.dimension}."
            )
        _record(self.dimensions, partition.key, wrong_dimension)

        wrong_rows = ""
        if partition.source_rows not in (None, receipt.source_rows):
            wrong_rows = (
                f"its file is made of {receipt.source_rows:,} rows; its source has "
                f"{partition.source_rows:,}."
            )
        if partition.source_rows is not None or receipt.action != "fresh":
            _record(self.rows, partition.key, wrong_rows)

    def record_invalid(self, key: str, invalid: InvalidFile) -> None:
        """Record what is wrong with a file that is not valid."""
        if invalid.flaw == "dimension":
            _record(self.dimensions, key, f"{invalid}.")
        if invalid.flaw == "rows":
            _record(self.rows, key, f"{invalid}.")

    def fault(self, key: str) -> str:
        """Return what is wrong with the file of a partition; "" if it is right."""
        return self.dimensions.get(key) or self.rows.get(key) or ""


def _record(faults: dict[str, str], key: str, fault: str) -> None:
    # A fault stays on record if the run encodes the partition again.
    faults[key] = faults.get(key) or fault
