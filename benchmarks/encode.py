"""Texts per second of this engine beside plain sentence-transformers, on the demo catalog, in one run.

Machines are noisy, so the two take turns on the same texts, round by round, and what counts is the ratio within a
round. Two things of this engine are measured: the pool alone (texts in shared memory to vectors in shared memory) and a
whole run (Parquet catalog to published files). sentence-transformers encodes the same texts, read beforehand, with the
best of three batch sizes. The first round of the pool is on texts it never saw and is printed on its own.

    python -m benchmarks.encode [--texts 1500] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from surge_dagster.catalogs.demo import build_demo_catalog
from surge_dagster.engine.catalog import encode_key
from surge_dagster.engine.encoder.arena import Slot
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.spec import EncodingSpec
from surge_dagster.engine.output.store import open_store
from surge_dagster.engine.run import EmbeddingRun
from surge_dagster.engine.sources import open_source

BATCH_SIZES = (16, 32, 128)
_CATALOG_TEXTS = 10_000


@dataclass(frozen=True, slots=True)
class Sample:
    """Texts drawn from the demo catalog, and the catalog they were written to, with its partitions."""

    texts: list[str]
    catalog: Path


def draw_sample(folder: Path, texts: int, seed: int) -> Sample:
    """Draw texts from a capped demo catalog and write them as a catalog with the same partitions."""
    build_demo_catalog(folder / "demo", limit=max(_CATALOG_TEXTS, texts))
    rows = [
        (partition.key, identity, text)
        for partition in open_source(folder / "demo")
        for batch in partition.read()
        for identity, text in zip(batch.ids.to_pylist(), batch.texts.to_pylist(), strict=True)
    ]
    rows = sorted(random.Random(seed).sample(rows, min(texts, len(rows))))
    by_key: dict[str, list[tuple[str, str]]] = {}
    for key, identity, text in rows:
        by_key.setdefault(key, []).append((identity, text))
    for key, pairs in by_key.items():
        path = folder / "sample" / f"partition={encode_key(key)}" / "part-0.parquet"
        path.parent.mkdir(parents=True)
        pq.write_table(pa.table({"id": [pair[0] for pair in pairs], "text": [pair[1] for pair in pairs]}), path)
    return Sample([row[2] for row in rows], folder / "sample")


class SentenceTransformers:
    """The peer: `SentenceTransformer.encode` in fp32 on the CPU, with the best of three batch sizes."""

    def __init__(self, model_path: str, pilot: list[str]) -> None:
        from sentence_transformers import SentenceTransformer

        self._model = SentenceTransformer(model_path, device="cpu")
        self.encode(pilot[:32], 32)
        self.batch_size = min(BATCH_SIZES, key=lambda size: self._seconds(pilot, size))

    def encode(self, texts: list[str], batch_size: int | None = None) -> np.ndarray:
        return self._model.encode(texts, batch_size=batch_size or self.batch_size, show_progress_bar=False)

    def _seconds(self, texts: list[str], batch_size: int) -> float:
        begun = time.perf_counter()
        self.encode(texts, batch_size)
        return time.perf_counter() - begun


def cosines(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Cosine of each row of one matrix to the same row of the other."""
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    return np.einsum("ij,ij->i", ours, theirs) / lengths


def measure(texts: int, rounds: int, seed: int) -> dict[str, object]:
    """Run the benchmark and give its document."""
    folder = Path(tempfile.mkdtemp(prefix="surge-bench-"))
    try:
        say("building the demo catalog and drawing texts from it")
        sample = draw_sample(folder, texts, seed)
        say(f"starting the pool and sentence-transformers for {len(sample.texts):,} texts")
        with EncoderPool(EncodingSpec()) as pool:
            peer = SentenceTransformers(pool.space.model_path, sample.texts[:: max(1, len(sample.texts) // 200)])
            size = max(1, sum(len(text.encode()) for text in sample.texts))
            with pool.arena(slots=1, max_texts=len(sample.texts), max_bytes=size) as arena:
                slot = arena.acquire()
                slot.append(pa.array(sample.texts, pa.large_string()))  # pyright: ignore[reportArgumentType]
                return _rounds(pool, peer, slot, sample, rounds, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _rounds(
    pool: EncoderPool, peer: SentenceTransformers, slot: Slot, sample: Sample, rounds: int, folder: Path
) -> dict[str, object]:
    count = len(sample.texts)
    cold = count / pool.encode(slot).encode_seconds
    rates: dict[str, list[float]] = {"peer": [], "pool": [], "run": []}
    reference = np.empty((0, 0))
    padding = 0.0
    for index in range(rounds):
        say(f"round {index + 1} of {rounds}")
        begun = time.perf_counter()
        reference = peer.encode(sample.texts)
        rates["peer"].append(count / (time.perf_counter() - begun))
        figures = pool.encode(slot)
        rates["pool"].append(count / figures.encode_seconds)
        padding = 1 - figures.tokens / max(1, figures.padded_tokens)
        run = EmbeddingRun(open_source(sample.catalog), open_store(folder / f"out-{index}"), pool)
        list(run)
        rates["run"].append(run.report.texts_per_second)
    close = cosines(slot.matrix(0, count).astype(np.float32), reference.astype(np.float32))
    ratios = {
        name: [ours / theirs for ours, theirs in zip(rates[name], rates["peer"], strict=True)]
        for name in ("pool", "run")
    }
    return {
        "benchmark": "encode",
        "texts": count,
        "mean_text_bytes": round(slot.text_bytes / count, 1),
        "rounds": rounds,
        "model": pool.space.name,
        "backend": pool.backend,
        "precision": pool.precision,
        "peer_batch_size": peer.batch_size,
        "peer_texts_per_second": statistics.median(rates["peer"]),
        "pool_texts_per_second": statistics.median(rates["pool"]),
        "run_texts_per_second": statistics.median(rates["run"]),
        "cold_texts_per_second": cold,
        "pool_ratio": statistics.median(ratios["pool"]),
        "pool_ratios": ratios["pool"],
        "run_ratio": statistics.median(ratios["run"]),
        "run_ratios": ratios["run"],
        "cold_ratio": cold / statistics.median(rates["peer"]),
        "padding_ratio": padding,
        "lowest_cosine": float(close.min()),
        "mean_cosine": float(close.mean()),
        "versions": {name: version(name) for name in ("torch", "sentence-transformers", "transformers", "pyarrow")}
        | ({"openvino": version("openvino")} if pool.backend == "openvino" else {})
        | {"python": platform.python_version()},
    }


def print_table(document: dict[str, object]) -> None:
    """The figures for people."""
    print(
        f"\n{document['texts']:,} docstrings of {document['mean_text_bytes']} bytes on average, {document['model']}, "
        f"{document['backend']} {document['precision']}, median of {document['rounds']} rounds\n"
    )
    print(f"{'':44}{'texts/s':>10}{'ratio':>9}")
    peer = f"sentence-transformers fp32, batch {document['peer_batch_size']}"
    for label, rate, ratio in (
        (peer, document["peer_texts_per_second"], 1.0),
        ("pool, first pass over the texts", document["cold_texts_per_second"], document["cold_ratio"]),
        ("pool", document["pool_texts_per_second"], document["pool_ratio"]),
        ("run: catalog to published files", document["run_texts_per_second"], document["run_ratio"]),
    ):
        print(f"{label:44}{rate:>10,.0f}{ratio:>8.2f}x")
    print(
        f"\ncosine to sentence-transformers fp32: lowest {document['lowest_cosine']:.7f}, "
        f"mean {document['mean_cosine']:.7f}; padding {document['padding_ratio']:.1%} of tokens\n"
    )


def say(text: str) -> None:
    """Progress, on standard error."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Parse the arguments, measure, print; exits with 1 when this engine is slower than its peer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=1500, help="texts drawn from the demo catalog")
    parser.add_argument("--rounds", type=int, default=3, help="times that the two take turns")
    parser.add_argument("--seed", type=int, default=0, help="of the draw")
    arguments = parser.parse_args()
    document = measure(arguments.texts, arguments.rounds, arguments.seed)
    print_table(document)
    print(json.dumps(document))
    ratio = document["run_ratio"]
    sys.exit(0 if isinstance(ratio, float) and ratio >= 1.0 else 1)


if __name__ == "__main__":
    main()
