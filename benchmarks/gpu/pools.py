"""The pool and a whole run on a GPU, next to sentence-transformers itself."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu_models import SHAPES
from benchmarks.harness import seconds_of
from benchmarks.paced_runs import embed
from surge_dagster import EncoderPool, open_source, open_store
from surge_dagster.engine.encoder.metrics import Costs

_PARTS = ("encode", "tokenize", "forward", "read", "serialize", "upload")


def pool(bench: Bench) -> None:
    """Texts per second of the pool, tokenizing included."""
    cases = [
        ("minilm", "auto", 1),
        ("minilm", "torch", 1),
        ("bge-base", "auto", 1),
        ("e5-large", "auto", 1),
        ("qwen3-0.6b", "auto", 1),
        ("minilm", "auto", 2),
    ]
    # The first case is the last one of a full run, because later stages go on with its pool.
    cases = bench.first_if_quick(cases)
    for name, backend, workers in cases[1:] + cases[:1]:
        if not bench.has_time(45, f"pool: {name} {backend} {workers}"):
            continue
        encoders = bench.encoders(name, backend, workers)
        facts = encoders.start()
        names = {"model": name, "workers": workers, "backend": facts.backend}
        bench.say(
            "pool",
            **names,
            start_seconds=encoders.start_seconds,
            lowest_cosine=facts.lowest_cosine,
            token_budget=facts.calibration.read("token_budget"),
            detail=facts.device_reason,
        )
        share = {"minilm": 1, "bge-base": 4, "e5-large": 10, "qwen3-0.6b": 15}[name]
        for mean, full in ((11, 1_500_000), (57, 300_000), (256, 60_000)):
            _time_pool(bench, encoders, mean, bench.size(full // share, 300), names)


def _time_pool(
    bench: Bench, encoders: EncoderPool, mean: int, count: int, names: dict[str, Any]
) -> None:
    texts = bench.texts(mean, count)
    with encoders.arena(slots=1, max_texts=count, max_bytes=texts.nbytes) as arena:
        slot = arena.acquire()
        slot.append(texts)
        encoders.encode(slot)
        metrics = encoders.encode(slot)
        slot.release()
    costs = metrics.costs
    bench.say(
        "pool",
        **names,
        mean_tokens=mean,
        texts_per_s=count / costs.encode_seconds,
        mtok_per_s=costs.tokens / costs.encode_seconds / 1e6,
        padding=costs.padding_ratio,
        **_seconds_by_part(costs, _PARTS[:3]),
    )


def _seconds_by_part(costs: Costs, parts: Iterable[str]) -> dict[str, float]:
    return {part: getattr(costs, f"{part}_seconds") for part in parts}


def run(bench: Bench) -> None:
    """A catalog of short texts, from Parquet files to Parquet files in memory."""
    count = bench.size(6_000_000, 400)
    partitions = bench.size(300, 4)
    step = count // partitions
    texts = bench.texts(11, count)
    catalog = bench.folder / "catalog"
    for number in range(partitions):
        path = catalog / f"partition=p{number}" / "part-0.parquet"
        path.parent.mkdir(parents=True)
        ids = [str(row) for row in range(step)]
        pq.write_table(pa.table({"id": ids, "text": texts.slice(number * step, step)}), path)
    for workers, threads in bench.first_if_quick([(1, None), (2, None)]):
        if not bench.has_time(30, f"run: {workers} workers, {threads} publishing threads"):
            continue
        encoders = bench.encoders("minilm", "auto", workers)
        encoders.start()
        output = bench.folder / "output"
        source = open_source(catalog)
        report = embed(encoders, source, open_store(output), publish_threads=threads)
        bench.say(
            "run",
            workers=workers,
            publish_threads=threads,
            texts=count,
            b_min=report.b_min,
            texts_per_s=count / report.wall_seconds,
            wall_seconds=report.wall_seconds,
            **_seconds_by_part(report.costs, _PARTS),
        )
        shutil.rmtree(output)
    bench.close_encoders()


def peer(bench: Bench) -> None:
    """sentence-transformers itself, in the same precision, with cuDNN's attention off as here."""
    from sentence_transformers import SentenceTransformer

    torch.backends.cuda.enable_cudnn_sdp(False)
    for name in bench.first_if_quick(list(SHAPES)):
        if not bench.has_time(30, f"peer: {name}"):
            continue
        model = SentenceTransformer(
            bench.model(name),
            device=str(bench.device),
            local_files_only=True,
            model_kwargs={"torch_dtype": bench.kind},
        )
        for mean, full in ((11, 40_000), (57, 10_000)):
            texts = bench.texts(mean, bench.size(full, 100)).to_pylist()
            rates: dict[int, float] = {}
            for size in (32,) if bench.quick else (512, 2_048):
                model.encode(texts[:size], batch_size=size)
                encode = partial(model.encode, texts, batch_size=size, show_progress_bar=False)
                rates[size] = len(texts) / seconds_of(encode)
            best = max(rates, key=lambda size: rates[size])
            facts = {"texts_per_s": rates[best], "batch_size": best, "note": "cuDNN off"}
            bench.say("peer", model=name, mean_tokens=mean, **facts)
