"""Storage profiles: what a slow store costs a run that publishes while it encodes, and one that does not.

The encoder has a fixed speed. An object appears in a store in main memory after its profile's latency plus its bytes
over the profile's bandwidth. *Synchronous* publishes a SuperBatch, object by object, before the next one is encoded;
this module builds it around the engine, which has no such mode. The paper's gains stand beside the measured ones.
"""

from __future__ import annotations

import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from benchmarks.harness import Document, Target, at_most, say
from benchmarks.paced_runs import embed, paced_pool, ready_partitions
from surge_dagster.engine.encoder.arena import Slot
from surge_dagster.engine.encoder.calls import EncodeCall
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.report import Event, RunReport, SuperBatchReport
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.engine.store.store import StoredObject, Upload
from surge_dagster.engine.thresholds import Thresholds

# The paper's encoder does 26,413 texts/s in partitions of 2,500. Speed, partitions and bandwidths are scaled down
# alike, so that two cores keep up with serialization and an object takes as long, beside its encoding, as in the
# paper.
PUBLISHED_TEXTS_PER_SECOND = 26_413
PUBLISHED_TEXTS_PER_PARTITION = 2_500
PARTITIONS_PER_SUPERBATCH = 4


@dataclass(frozen=True, slots=True)
class StorageProfile:
    """A store's latency per object in seconds and its bandwidth per object in bytes per second (None: no limit).

    `published_gain` is what the paper gives for asynchronous over synchronous publishing, less one.
    """

    name: str
    latency_seconds: float
    bytes_per_second: float | None
    published_gain: float


# Latencies, and the bandwidth of GCS, are the paper's; the other bandwidths are chosen.
PROFILES = {
    profile.name: profile
    for profile in (
        StorageProfile("null", 0.0, None, -0.007),
        StorageProfile("hdfs", 0.002, 1_000e6, 0.055),
        StorageProfile("gcs", 0.010, 200e6, 0.201),
        StorageProfile("s3", 0.020, 200e6, 0.286),
        StorageProfile("cross-region", 0.050, 100e6, 0.923),
    )
}


class DelayedStore(LocalStore):
    """A local store whose objects appear after the profile's delay."""

    def __init__(self, root: Path, profile: StorageProfile, scale: float = 1.0) -> None:
        super().__init__(root)
        self._latency = profile.latency_seconds
        self._rate = profile.bytes_per_second and scale * profile.bytes_per_second

    def create(self, name: str) -> Upload:  # pyright: ignore[reportIncompatibleMethodOverride]
        upload = super().create(name)
        return upload if name.endswith(".json") else _DelayedUpload(upload, self._latency, self._rate)


class _DelayedUpload(Upload):
    def __init__(self, upload: Upload, latency: float, rate: float | None) -> None:
        self.sink = upload.sink
        self._upload = upload
        self._latency = latency
        self._rate = rate

    def publish(self, still_wanted: Callable[[], None]) -> StoredObject:
        """Wait for the object's delay, then publish it."""
        size = self.sink.tell()
        time.sleep(self._latency + (size / self._rate if self._rate else 0.0))
        return self._upload.publish(still_wanted)

    def __enter__(self) -> Self:
        self._upload.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._upload.__exit__(kind, error, trace)


class OneAtATime:
    """Wraps a pool and encodes a SuperBatch only after the one before is published."""

    def __init__(self, pool: EncoderPool) -> None:
        self._pool = pool
        self._may_encode = threading.Semaphore(1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def submit(self, slot: Slot, borders: np.ndarray | None = None, rows: np.ndarray | None = None) -> EncodeCall:
        """Wait until the previous SuperBatch is published, then encode; the returned call has ended."""
        self._may_encode.acquire()
        call = self._pool.submit(slot, borders, rows)
        call.result()
        return call

    def seen(self, event: Event) -> None:
        """Receive every event of the run."""
        if isinstance(event, SuperBatchReport):
            self._may_encode.release()


def profiles_document(
    names: list[str], partitions: int, texts_per_second: float, rounds: int, folder: Path
) -> Document:
    """Both ways of publishing on each profile, by turns; ratios are within a round."""
    scale = texts_per_second / PUBLISHED_TEXTS_PER_SECOND
    work = ready_partitions(partitions, round(scale * PUBLISHED_TEXTS_PER_PARTITION))
    few = work[:PARTITIONS_PER_SUPERBATCH]
    runs: dict[tuple[str, str], list[RunReport]] = {(name, way): [] for name in names for way in ("sync", "async")}
    with paced_pool(texts_per_second) as pool:
        _run(pool, "async", PROFILES["null"], scale, few, folder)  # warms up
        for index in range(rounds):
            say(f"  round {index + 1} of {rounds}")
            first = index % len(runs)
            order = list(runs)
            for name, way in order[first:] + order[:first]:
                runs[name, way].append(_run(pool, way, PROFILES[name], scale, work, folder))
    reference = runs[names[0], "async"]
    rows = []
    for name in names:
        ours, theirs = runs[name, "async"], runs[name, "sync"]
        rows.append(
            asdict(PROFILES[name])
            | {
                "async_texts_per_second": statistics.median(run.texts_per_second for run in ours),
                "sync_texts_per_second": statistics.median(run.texts_per_second for run in theirs),
                "gain": _ratio(ours, theirs) - 1,
                "async_to_first": _ratio(ours, reference),
                "async_overlap_ratio": statistics.median(run.overlap_ratio for run in ours),
                "sync_overlap_ratio": statistics.median(run.overlap_ratio for run in theirs),
            }
        )
    constant = [row["async_to_first"] for row in rows]
    return {
        "profiles": rows,
        "partitions": partitions,
        "texts_per_partition": round(scale * PUBLISHED_TEXTS_PER_PARTITION),
        "partitions_per_superbatch": PARTITIONS_PER_SUPERBATCH,
        "bandwidth_scale": scale,
        "encoder_texts_per_second": texts_per_second,
        "rounds": rounds,
        "async_spread": (max(constant) - min(constant)) / max(constant),
    }


def profiles_lines(found: Document) -> Iterator[str]:
    """The table."""
    yield ""
    yield (
        f"storage profiles: {found['partitions']} partitions of {found['texts_per_partition']:,} texts, an encoder of "
        f"{found['encoder_texts_per_second']:,.0f} texts/s, median of {found['rounds']} rounds"
    )
    yield (
        f"{'':14}{'latency':>9}{'sync':>9}{'async':>9}{'gain':>8}{'published':>11}{'async to first':>16}"
        f"{'rho sync':>10}{'rho async':>11}"
    )
    for row in found["profiles"]:
        yield (
            f"{row['name']:14}{1_000 * row['latency_seconds']:>6.0f} ms{row['sync_texts_per_second']:>9,.0f}"
            f"{row['async_texts_per_second']:>9,.0f}{row['gain']:>+8.1%}{row['published_gain']:>+11.1%}"
            f"{row['async_to_first']:>16.3f}{row['sync_overlap_ratio']:>10.2f}{row['async_overlap_ratio']:>11.2f}"
        )


def profiles_targets(found: Document) -> Iterator[Target]:
    """The aims of the scenario."""
    yield at_most("asynchronous throughput over the profiles, spread", 0.03, found["async_spread"])


def _ratio(ours: list[RunReport], theirs: list[RunReport]) -> float:
    return statistics.median(a.texts_per_second / b.texts_per_second for a, b in zip(ours, theirs, strict=True))


def _run(
    pool: EncoderPool, way: str, profile: StorageProfile, scale: float, work: list[Partition], folder: Path
) -> RunReport:
    output = folder / "profiles"
    wanted = PARTITIONS_PER_SUPERBATCH * round(scale * PUBLISHED_TEXTS_PER_PARTITION)
    thresholds = Thresholds(b_min=wanted, b_max=5 * wanted)
    store = DelayedStore(output, profile, scale)
    try:
        if way == "async":
            return embed(pool, work, store, thresholds)
        front: Any = OneAtATime(pool)
        return embed(front, work, store, thresholds, seen=front.seen, publish_threads=1)
    finally:
        shutil.rmtree(output, ignore_errors=True)
