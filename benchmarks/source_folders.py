"""Feeding an encoder of a fixed speed from folders of small files, on a disk and in a bucket with a latency.

The encoder sleeps for as long as a CPU would encode, because one that computes takes its cores from what is measured,
and from the server of the bucket. It idles from the beginning of the run until the first texts are read, and whenever
no further ones are ready.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.bucket_server import bucket_of, requests_of
from benchmarks.harness import Document, Target, at_most
from benchmarks.paced_runs import paced_pool
from surge_dagster.catalogs.synthetic import draw_texts
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.report import SuperBatchReport
from surge_dagster.engine.sources.partition import Source
from surge_dagster.engine.store import open_store
from surge_dagster.engine.store.object_client import StorageOptions
from surge_dagster.engine.tables.opening import open_source

AIM_IDLE_SHARE = 0.02
LATENCY_SECONDS = 0.02
TEXTS_PER_SECOND = 1_200.0  # short texts on two cores with bf16
TEXTS = 100  # of a partition


def write_folders(folder: Path, partitions: int) -> None:
    """Write a folder with one Parquet file for each partition."""
    for number in range(partitions):
        path = folder / f"category=c{number:05d}" / "0.parquet"
        path.parent.mkdir(parents=True)
        texts = draw_texts(0, number, np.arange(TEXTS, dtype=np.uint64))
        pq.write_table(pa.table({"id": pa.array([f"{number}-{row}" for row in range(TEXTS)]), "text": texts}), path)


def feed_from_folders(folder: Path) -> Document:
    """Run over the folder `catalog` below `folder`, then over the same as a bucket; vectors go to the local disk."""
    with paced_pool(TEXTS_PER_SECOND) as pool, bucket_of(folder / "catalog", LATENCY_SECONDS) as (url, endpoint):
        options = StorageOptions(endpoint=endpoint, access_key_id="a", secret_access_key="b")
        disk = _run(pool, open_source(folder / "catalog"), folder / "from-disk")
        bucket = _run(pool, open_source(url, storage_options=options), folder / "from-bucket")
        return {"disk": disk, "bucket": bucket | {"requests": requests_of(endpoint)}}


def _run(pool: EncoderPool, source: Source, output: Path) -> Document:
    run = EmbeddingRun(source, open_store(output), pool)
    encoded = 0.0
    for event in run.events():
        if isinstance(event, SuperBatchReport) and event.encode_span is not None:
            encoded = max(encoded, event.encode_span.ended)
    if run.failed or not encoded:
        raise SystemExit(f"partitions failed: {run.report.partitions_failed[:3]}")
    report = run.report
    return {
        "partitions": report.partitions_written,
        "texts": report.texts_encoded,
        "seconds": encoded,
        "idle_share": max(0.0, 1 - report.costs.encode_seconds / encoded),
        "duty_cycle": report.duty_cycle,
        "run_seconds": report.wall_seconds,
    }


def folders_lines(document: Document) -> Iterator[str]:
    """The table."""
    yield ""
    yield (
        f"folders of {TEXTS} texts, an encoder of {TEXTS_PER_SECOND:,.0f} texts/s in place of a model; idle until the "
        "last text is encoded"
    )
    for place, found in document.items():
        where = f"bucket, {1_000 * LATENCY_SECONDS:.0f} ms" if place == "bucket" else place
        requests = sum(found.get("requests", {}).values()) / found["partitions"]
        sent = f", {requests:.2f} requests per partition" if requests else ""
        yield (
            f"{where:16}{found['partitions']:>6,} partitions{found['seconds']:>8.1f} s, idle "
            f"{found['idle_share']:.1%}, duty with the last publications {found['duty_cycle']:.3f}{sent}"
        )


def folders_targets(document: Document) -> Iterator[Target]:
    """What was to be reached."""
    for place, found in document.items():
        yield at_most(f"idle share of a CPU's encoder that reads from a {place}", AIM_IDLE_SHARE, found["idle_share"])
