"""Around the publication of a file: the last look at its source, and the receipt."""

from __future__ import annotations

from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.files.embedding_file import FileFacts
from surge_dagster.engine.output.drift import Drift
from surge_dagster.engine.report import Receipt
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.store import StoredObject


def require_unchanged(partition: Partition) -> None:
    """Look the source version up once more, so that of two writers the one with the newer source wins.

    Raises:
        TransientError: the source has changed, or has gone, since the partition was listed.
    """
    current = partition.current_source_version()
    if current != partition.source_version:
        came = "it has gone" if current is None else f"it is {current!r} now"
        raise TransientError(
            f"partition {partition.key!r}: its source changed while it was encoded (source version "
            f"{partition.source_version!r} was read, {came}). The result was thrown away; run again.",
            partition.key,
        )


def receipt_of(
    facts: FileFacts,
    stored: StoredObject,
    location: str,
    *,
    superbatch: int | None = None,
    texts_per_second: float | None = None,
    action: str = "encoded",
    texts_reused: int = 0,
    drift: Drift | None = None,
) -> Receipt:
    """The receipt of a published file."""
    return Receipt(
        key=facts.partition_key,
        action=action,  # pyright: ignore[reportArgumentType]
        path=location,
        rows=facts.rows,
        dimension=facts.dimension,
        bytes=stored.size,
        etag=stored.etag,
        truncated=facts.truncated,
        source_version=facts.source_version,
        content_digest=facts.content_digest,
        desired_version=facts.desired_version,
        space=facts.space,
        superbatch=superbatch,
        texts_per_second=texts_per_second,
        texts_reused=texts_reused,
        compared_rows=drift.rows if drift else 0,
        previous_cosine=drift.mean_cosine if drift else None,
    )
