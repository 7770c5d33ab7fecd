"""What partitions weigh where work is divided among machines whose costs are not known: bytes of
text."""

from __future__ import annotations

from surge_dagster.engine.sources.partition import Partition

FILE_BYTES = 4096  # what publishing a file costs beside its texts
_ROW_BYTES = 64  # of a row whose partition has only a row count


def weight_of(partition: Partition) -> int:
    """The cost of a partition, in bytes of text; one whose source knows nothing of its size counts
    as small."""
    if partition.text_bytes is not None:
        return FILE_BYTES + partition.text_bytes
    return FILE_BYTES + (partition.rows or 0) * _ROW_BYTES
