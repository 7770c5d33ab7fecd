"""What reading and publishing took in earlier runs, and the costs that follow from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from urllib.parse import urlsplit

import numpy as np

from surge_dagster.engine.run.report import SuperBatchReport
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.support.fitting import fit_costs


@dataclass(frozen=True, slots=True)
class Io:
    """A SuperBatch that was read and published.

    Attributes:
        reused: texts that kept their old vectors.
        file_bytes: of its vectors and texts.
        publish_seconds: by the clock, without waiting for the SuperBatch before.
    """

    files: float
    texts: float
    reused: float
    file_bytes: float
    read_seconds: float
    publish_seconds: float


@dataclass(frozen=True, slots=True)
class IoCosts:
    """Seconds of reading SuperBatches and publishing them to one kind of store; 0 if unknown.

    Attributes:
        read: of a partition, of a row, of a row that keeps its old vector, and of a byte of text.
        publish: of a SuperBatch, of a file and of a byte.
    """

    read: np.ndarray
    publish: np.ndarray


def io_costs(seen: Sequence[Io], vector_bytes: float = 0.0) -> IoCosts:
    """Fit the costs to what was seen.

    Args:
        vector_bytes: of a row.
    """
    rows = np.array([astuple(superbatch) for superbatch in seen], float)
    files, texts, reused, file_bytes, read, publish = rows.reshape(-1, len(fields(Io))).T
    to_read = np.column_stack([files, texts, reused, file_bytes - texts * vector_bytes])
    to_publish = np.column_stack([np.ones(len(seen)), files, file_bytes])
    return IoCosts(fit_costs(to_read, read), fit_costs(to_publish, publish))


def io_of(report: SuperBatchReport, vector_bytes: int) -> Io:
    """Return what reading and publishing a SuperBatch took."""
    costs = report.costs
    waited = 0.0
    if report.serialize_span is not None and report.encode_span is not None:
        waited = max(0.0, report.serialize_span.begun - report.encode_span.ended)
    return Io(
        files=report.partitions,
        texts=report.texts,
        reused=costs.rows_reused,
        file_bytes=report.text_bytes + report.texts * vector_bytes,
        read_seconds=costs.read_seconds,
        publish_seconds=max(0.0, costs.publish_seconds - waited),
    )


def store_kind(store: Store) -> str:
    """Return what stores of equal costs have in common: a bucket, or the local disk."""
    if not store.is_remote:
        return "local"
    url = urlsplit(store.url)
    return f"{url.scheme}://{url.netloc}"
