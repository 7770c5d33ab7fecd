"""What a GPU makes of this engine, in one command of less than eight minutes: ceilings, passes,
tokens, pool and run.

    python -m benchmarks.gpu

Needs torch, transformers, sentence-transformers 6.2, pyarrow, filelock and psutil, and no network;
`benchmarks.gpu_models` makes a folder of 50 MB to take to a GPU machine. Every result is printed,
and appended to results.jsonl, as soon as it is known; an error ends its stage alone. `--device cpu
--quick` is a rehearsal.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.gpu_models import make_model
from benchmarks.synthetic import draw_texts
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.worker import parity
from surge_dagster.engine.encoder.worker.backends.base import (
    BackendSettings,
    LaunchedChunk,
    Rows,
    encode_texts,
)
from surge_dagster.engine.encoder.worker.sentence_model import load_reference, reference_vectors
from surge_dagster.engine.encoder.worker.tokenization import TextTokenizer, TokenizerFacts, Tokens
from surge_dagster.engine.inference.packed_attention import packed_attention
from surge_dagster.engine.inference.packed_backend import load_packed
from surge_dagster.engine.inference.packing import CELL, LONGEST_IN_CELLS
from surge_dagster.engine.inference.torch_backend import load_torch
from surge_dagster.engine.model.spec import EncodingSpec, Space
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.store import open_store
from surge_dagster.engine.tables.opening import open_source

STAGES = (
    "environment",
    "ceilings",
    "cudnn",
    "passes",
    "attention",
    "tokenizer",
    "pool",
    "run",
    "peer",
    "lanes",
)
PACKAGES = (
    "torch",
    "transformers",
    "sentence-transformers",
    "tokenizers",
    "numpy",
    "pyarrow",
    "triton",
)
# Hidden size, inner size, layers, heads.
SHAPES = {
    "minilm": (384, 1536, 6, 12),
    "bge-base": (768, 3072, 12, 12),
    "e5-large": (1024, 4096, 24, 16),
}
MEAN_TOKENS = (11, 57, 256)
# Of an H100 or H200 SXM by NVIDIA's data sheet: dense fp16 and bf16, floating-point operations per
# second.
SHEET_FLOPS = 989e12
_PARTS = ("encode", "tokenize", "forward", "copy", "read", "serialize", "upload")
BYTES_OF_TOKENS = {11: 47, 57: 260, 256: 1_280}


class Bench:
    """The settings, the results so far, and the models that were made."""

    def __init__(self, settings: argparse.Namespace) -> None:
        self.settings = settings
        self.quick: bool = settings.quick
        self.device = torch.device(settings.device)
        self.on_cuda = self.device.type == "cuda"
        self.precisions = settings.precisions.split(",") if self.on_cuda else ["fp32"]
        self.began = time.monotonic()
        self.folder = Path(
            tempfile.mkdtemp(
                prefix="surge-gpu-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None
            )
        )
        self.results = Path(settings.out)
        self.results.mkdir(parents=True, exist_ok=True)
        self.peak = SHEET_FLOPS
        self.missed: list[str] = []
        self._encoders: tuple[tuple[str, str, int], EncoderPool] | None = None

    def say(self, stage: str, **facts: Any) -> None:
        row = {"at": round(time.monotonic() - self.began, 1), "stage": stage} | facts
        with (self.results / "results.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        shown = (
            f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
            for name, value in row.items()
        )
        print(" ".join(shown), flush=True)

    def left(self) -> float:
        return self.settings.seconds - (time.monotonic() - self.began)

    def model(self, name: str) -> str:
        """The folder of a model of this shape: MiniLM's own, others with random weights and its
        tokenizer."""
        own = Path(self.settings.model)
        if name == "minilm":
            return str(own)
        if not (folder := self.folder / name).exists():
            make_model(folder, (64, 128, 2, 4) if self.quick else SHAPES[name], own, self.device)
        return str(folder)

    def encoders(self, name: str, backend: str, workers: int) -> EncoderPool:
        """A pool that stays until another one is asked for."""
        case = (name, backend, workers)
        if self._encoders is None or self._encoders[0] != case:
            self.close_encoders()
            devices = [str(self.device)] * workers
            spec = EncodingSpec(self.model(name))
            encoders = EncoderPool(
                spec, devices=devices, precision=self.precisions[0], backend=backend
            )
            self._encoders = (case, encoders)
        return self._encoders[1]

    def close_encoders(self) -> None:
        if self._encoders is not None:
            self._encoders[1].close()
        self._encoders = None

    def texts(self, mean: int, count: int) -> pa.LargeStringArray:
        """Synthetic titles and descriptions of so many tokens in the mean."""
        return draw_texts(1, 1, np.arange(count, dtype=np.uint64), BYTES_OF_TOKENS[mean]).cast(
            pa.large_string()
        )

    def timed(self, call: Callable[[], Any], seconds: float = 0.3) -> float:
        """Median seconds of a call on the device, after it ran three times."""
        times: list[float] = []
        for _ in range(1 if self.quick else 3):
            call()
        end = time.perf_counter() + (0.0 if self.quick else seconds)
        while len(times) < 3 or time.perf_counter() < end:
            self.wait()
            started = time.perf_counter()
            call()
            self.wait()
            times.append(time.perf_counter() - started)
        return float(np.median(times))

    def wait(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize(self.device)


def environment(bench: Bench) -> None:
    found: dict[str, str] = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    bench.say(
        "environment", python=sys.version.split()[0], cores=len(os.sched_getaffinity(0)), **found
    )
    if bench.on_cuda:
        facts = torch.cuda.get_device_properties(bench.device)
        bench.say(
            "environment",
            gpu=facts.name,
            gigabytes=facts.total_memory / 1e9,
            cuda=torch.version.cuda,
        )


def ceilings(bench: Bench) -> None:
    """What the card does today, which is less than its data sheet says: copies and matrix products."""
    size = 1 << (20 if bench.quick else 32)
    source, target = (torch.zeros(size, dtype=torch.uint8, device=bench.device) for _ in range(2))
    source.random_()
    bench.say(
        "ceilings", copy_tb_per_s=2 * size / bench.timed(partial(target.copy_, source)) / 1e12
    )
    source = target = None
    for kind in (torch.float16, torch.bfloat16) if bench.on_cuda else (torch.float32,):
        side = 256 if bench.quick else 8_192
        one, other = (torch.randn(side, side, device=bench.device, dtype=kind) for _ in range(2))
        flops = 2 * side**3 / bench.timed(partial(torch.matmul, one, other), 0.6)
        bench.peak = flops if kind is torch.float16 else bench.peak
        bench.say("ceilings", product=f"{side}^3", dtype=str(kind), tflops=flops / 1e12)
    for name, (hidden, inner, *_) in SHAPES.items():
        rows, kind = (
            512 if bench.quick else 65_536,
            torch.float16 if bench.on_cuda else torch.float32,
        )
        for inputs, outputs in ((hidden, hidden), (hidden, inner), (inner, hidden)):
            one = torch.randn(rows, inputs, device=bench.device, dtype=kind)
            weights = torch.randn(outputs, inputs, device=bench.device, dtype=kind)
            seconds = bench.timed(partial(torch.nn.functional.linear, one, weights), 0.1)
            shape = f"{rows}x{inputs}x{outputs}"
            bench.say(
                "ceilings",
                model=name,
                product=shape,
                tflops=2 * rows * inputs * outputs / seconds / 1e12,
            )


def cudnn(bench: Bench) -> None:
    """Milliseconds of the first call for each new shape: why cuDNN's attention is turned off."""
    for enabled in (True, False) if bench.on_cuda else ():
        torch.backends.cuda.enable_cudnn_sdp(enabled)
        times = []
        for rows in (701, 702, 703, 1_411):
            states = torch.randn(
                rows, 13, 12, 32, device=bench.device, dtype=torch.float16
            ).transpose(1, 2)
            bench.wait()
            started = time.perf_counter()
            torch.nn.functional.scaled_dot_product_attention(states, states, states)
            bench.wait()
            times.append(round(1e3 * (time.perf_counter() - started), 2))
        bench.say("cudnn", cudnn_attention=enabled, first_calls_ms=str(times))


def attention(bench: Bench) -> None:
    """Nanoseconds of attention per token and layer: texts of one length, packed, and in cells (some
    cut in two)."""
    tokens, kind = (
        1_024 if bench.quick else 65_536,
        torch.float16 if bench.on_cuda else torch.float32,
    )
    for (heads, size), length in product(((12, 32), (12, 64), (16, 64)), MEAN_TOKENS):
        rows = tokens // length
        states = torch.randn(rows, length, heads, size, device=bench.device, dtype=kind)
        dense, flat = states.transpose(1, 2), states.reshape(1, -1, heads, size).transpose(1, 2)
        borders = torch.arange(0, rows * length + 1, length, device=bench.device, dtype=torch.int32)
        longest = -(-length // 128) * 128
        cases: dict[str, Callable[[], Any]] = {
            "padded": partial(
                torch.nn.functional.scaled_dot_product_attention, dense, dense, dense
            ),
            "packed": partial(
                packed_attention, flat, flat, flat, borders, longest, size**-0.5, False, -1
            ),
        }
        if length <= CELL:
            cells = (torch.arange(rows * length, device=bench.device) // length)[
                : rows * length // CELL * CELL
            ]
            numbers = cells.view(-1, 1, CELL)
            zeros = torch.zeros(len(numbers), 1, CELL, CELL, dtype=kind, device=bench.device)
            apart = zeros.masked_fill_(numbers[..., None] != numbers[:, :, None], -torch.inf)
            part = flat[:, :, : len(cells)]
            cases["cells"] = partial(
                packed_attention, part, part, part, borders, longest, size**-0.5, False, -1, apart
            )
        found = {
            name: 1e9 * bench.timed(call, 0.1) / (rows * length) for name, call in cases.items()
        }
        bench.say("attention", heads=heads, size=size, length=length, **found)


def passes(bench: Bench) -> None:
    """Forward passes of ids that are on the host: padded (torch) and packed, by the backends' own
    `forward`."""
    for name, precision in product(list(SHAPES)[: 1 if bench.quick else None], bench.precisions):
        space = EncodingSpec(bench.model(name), max_length=None if bench.quick else 512).resolve()
        settings = BackendSettings(str(bench.device), precision, threads=4)
        reference = load_reference(space, str(bench.device))
        expected = reference_vectors(reference, space, parity.PARITY_TEXTS)
        encoder: Any = reference[0].model
        config = encoder.config
        weights = sum(
            one.numel()
            for name, one in encoder.named_parameters()
            if one.dim() == 2 and "layer" in name
        )
        del reference, encoder
        for kind, load in (("padded", load_torch), ("packed", load_packed)):
            if bench.left() < 20:
                bench.missed.append(f"passes: {name} {precision} {kind}")
                continue
            started = time.perf_counter()
            backend: Any = load(space, settings)
            vectors, _ = encode_texts(backend, parity.PARITY_TEXTS, space.dimension, space.dtype)
            cosine = parity.lowest_cosine(vectors, expected)
            bench.say("passes", model=name, precision=precision, passes=kind, detail=backend.detail,
                      start_seconds=time.perf_counter() - started, lowest_cosine=cosine)  # fmt: skip
            if kind == "packed":
                times = 2 if bench.quick else 20
                alone, company = parity.PARITY_TEXTS * times, parity.PARITY_TEXTS * (3 * times)
                one, other = (
                    encode_texts(backend, texts, space.dimension, space.dtype)[0]
                    for texts in (alone, company)
                )
                equal = (one == other[: len(one)]).all(axis=1)
                short = backend.prepare(alone).lengths <= LONGEST_IN_CELLS
                shares = {
                    "short": float(equal[short].mean()),
                    "longer": float(equal[~short].mean()),
                }
                bench.say(
                    "passes",
                    model=name,
                    precision=precision,
                    equal_bytes_in_other_company=str(shares),
                )
            for mean, budget in product(
                MEAN_TOKENS, (1_024,) if bench.quick else (131_072, 262_144)
            ):
                backend.token_budget = budget
                _time_passes(bench, backend, space, config, weights, mean,
                             {"model": name, "precision": precision, "passes": f"{kind} {budget}"})  # fmt: skip
            del backend
            if bench.on_cuda:
                torch.cuda.empty_cache()


def _time_passes(
    bench: Bench,
    backend: Any,
    space: Space,
    config: Any,
    weights: int,
    mean: int,
    names: dict[str, Any],
) -> None:
    rng = np.random.default_rng(0)
    total = 2_048 if bench.quick else 524_288
    lengths = np.clip(
        np.round(rng.normal(mean, 0.35 * mean, max(8, total // mean))), 4, space.max_length
    ).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = rng.integers(0, config.vocab_size, offsets[-1]).astype(np.int32)
    tokens = Tokens(ids, offsets, np.zeros(len(lengths), np.bool_), 0)
    rows = Rows.of_all(
        np.empty((len(lengths), space.dimension), np.float32), np.empty(len(lengths), np.uint8)
    )
    launch = getattr(backend, "launch", None) or partial(_computed, backend)
    launch(tokens, rows, lambda: None).finish()
    # As a worker does: the next chunk is launched before this one is waited for.
    times = 2 if bench.quick else 6
    started = time.perf_counter()
    launched = launch(tokens, rows, lambda: None)
    for _ in range(times - 1):
        following = launch(tokens, rows, lambda: None)
        launched.finish()
        launched = following
    launched.finish()
    seconds = (time.perf_counter() - started) / times
    flops = 2.0 * weights * len(ids)
    flops += (
        4.0
        * config.hidden_size
        * config.num_hidden_layers
        * float((lengths.astype(float) ** 2).sum())
    )
    shares = {
        "share_of_sheet": flops / seconds / SHEET_FLOPS,
        "share_of_measured": flops / seconds / bench.peak,
    }
    rate = {"mtok_per_s": len(ids) / seconds / 1e6, "tflops": flops / seconds / 1e12}
    bench.say("passes", **names, mean_tokens=mean, **rate, **shares)


def _computed(backend: Any, *arguments: Any) -> LaunchedChunk:
    costs = backend.forward(*arguments)
    return LaunchedChunk(is_done=lambda: True, finish=lambda: costs)


def tokenizer(bench: Bench) -> None:
    """Microseconds per text: the library with all cores, and the words' cache with one thread."""
    document = (Path(bench.settings.model) / "tokenizer.json").read_text()
    texts_to_ids = TextTokenizer(
        TokenizerFacts(document), EncodingSpec(bench.settings.model).resolve()
    )
    for mean in MEAN_TOKENS:
        count = 500 if bench.quick else 1_000_000 // mean
        texts = bench.texts(mean, count)
        strings = texts.to_pylist()
        borders, data = (
            np.frombuffer(texts.buffers()[1 + i], kind)
            for i, kind in enumerate((np.int64, np.uint8))
        )
        starts, stops = borders[:count], borders[1 : count + 1]
        found: dict[str, float] = {}
        calls = {"library": partial(texts_to_ids.encode, strings),
                 "words": partial(texts_to_ids.encode_bytes, data, starts, stops)}  # fmt: skip
        for name, call in calls.items():
            call()
            started = time.perf_counter()
            call()
            found[f"{name}_us_per_text"] = 1e6 * (time.perf_counter() - started) / count
        bench.say("tokenizer", mean_tokens=mean, **found)


def pool(bench: Bench) -> None:
    cases = [("minilm", "torch", 1), ("bge-base", "auto", 1), ("e5-large", "auto", 1)]
    cases += [("minilm", "auto", workers) for workers in (2, 1)]
    for name, backend, workers in cases[-1:] if bench.quick else cases:
        if bench.left() < (5 if bench.quick else 45):
            bench.missed.append(f"pool: {name} {backend} {workers}")
            continue
        encoders = bench.encoders(name, backend, workers)
        facts = encoders.start()
        budget = facts.calibration.read("token_budget")
        bench.say("pool", model=name, workers=workers, backend=facts.backend, start_seconds=encoders.start_seconds,
                  lowest_cosine=facts.lowest_cosine, token_budget=budget, detail=facts.device_reason)  # fmt: skip
        for mean, count in ((11, 1_500_000), (57, 300_000), (256, 60_000)):
            count = (
                300 if bench.quick else count // {"minilm": 1, "bge-base": 4, "e5-large": 10}[name]
            )
            texts = bench.texts(mean, count)
            with encoders.arena(slots=1, max_texts=count, max_bytes=texts.nbytes) as arena:
                slot = arena.acquire()
                slot.append(texts)
                encoders.encode(slot)
                metrics = encoders.encode(slot)
                slot.release()
            costs, seconds = metrics.costs, metrics.costs.encode_seconds
            bench.say("pool", model=name, workers=workers, backend=facts.backend, mean_tokens=mean,
                      texts_per_s=count / seconds, mtok_per_s=costs.tokens / seconds / 1e6,
                      padding=costs.padding_ratio, gpu=metrics.gpu_utilisation,
                      **{part: getattr(costs, f"{part}_seconds") for part in _PARTS[:4]})  # fmt: skip


def run(bench: Bench) -> None:
    """A catalog of short texts, from Parquet files to Parquet files in memory."""
    count, partitions = (400, 4) if bench.quick else (6_000_000, 300)
    texts, step = bench.texts(11, count), count // partitions
    for number in range(partitions):
        path = bench.folder / "catalog" / f"partition=p{number}" / "part-0.parquet"
        path.parent.mkdir(parents=True)
        ids = [str(row) for row in range(step)]
        pq.write_table(pa.table({"id": ids, "text": texts.slice(number * step, step)}), path)
    cases: list[tuple[int, int | None]] = [(1, None), (2, None), (3, 8)]
    for workers, threads in cases[: 1 if bench.quick else None]:
        if bench.left() < (5 if bench.quick else 30):
            bench.missed.append(f"run: {workers} workers, {threads} publishing threads")
            continue
        encoders = bench.encoders("minilm", "auto", workers)
        encoders.start()
        output = bench.folder / "output"
        source, store = open_source(bench.folder / "catalog"), open_store(output)
        embedding = EmbeddingRun(source, store, encoders, publish_threads=threads)
        for _ in embedding:
            pass
        report = embedding.report
        costs = report.costs
        seconds = {part: getattr(costs, f"{part}_seconds") for part in _PARTS}
        bench.say("run", workers=workers, publish_threads=threads, texts=count, b_min=report.b_min,
                  texts_per_s=count / report.wall_seconds, wall_seconds=report.wall_seconds,
                  failed=len(report.partitions_failed), **seconds)  # fmt: skip
        shutil.rmtree(output)
    bench.close_encoders()


def peer(bench: Bench) -> None:
    """sentence-transformers itself, in the same precision, with cuDNN's attention off as here."""
    from sentence_transformers import SentenceTransformer

    torch.backends.cuda.enable_cudnn_sdp(False)
    dtype = torch.float16 if bench.on_cuda else torch.float32
    for name in list(SHAPES)[: 1 if bench.quick else None]:
        settings: dict[str, Any] = {
            "local_files_only": True,
            "model_kwargs": {"torch_dtype": dtype},
        }
        model = SentenceTransformer(bench.model(name), device=str(bench.device), **settings)
        for mean, count in ((11, 40_000), (57, 10_000)):
            texts = bench.texts(mean, 100 if bench.quick else count).to_pylist()
            rates: dict[int, float] = {}
            for size in (32,) if bench.quick else (512, 2_048):
                model.encode(texts[:size], batch_size=size)
                started = time.perf_counter()
                model.encode(texts, batch_size=size, show_progress_bar=False)
                rates[size] = len(texts) / (time.perf_counter() - started)
            size = max(rates, key=lambda size: rates[size])
            bench.say(
                "peer",
                model=name,
                mean_tokens=mean,
                texts_per_s=rates[size],
                batch_size=size,
                note="cuDNN off",
            )


def lanes(bench: Bench) -> None:
    """Milliseconds of queries beside bulk work of another process on the same card, as the encoder
    service has them."""
    for name, count in list({"minilm": 150_000, "e5-large": 13_000}.items())[
        : 1 if bench.quick else None
    ]:
        if bench.left() < (5 if bench.quick else 70):
            bench.missed.append(f"lanes: {name}")
            continue
        bulk, spec = bench.encoders(name, "auto", 1), EncodingSpec(bench.model(name))
        texts, asked = (
            bench.texts(57, 300 if bench.quick else count),
            bench.texts(57, 20 if bench.quick else 1_150),
        )
        with EncoderPool(
            spec, devices=[str(bench.device)], precision=bench.precisions[0]
        ) as queries:
            queries.start()
            arena, small = (
                pool.arena(slots=1, max_texts=len(each), max_bytes=each.nbytes)
                for pool, each in ((bulk, texts), (queries, asked))
            )
            with arena, small:
                slot = arena.acquire()
                slot.append(texts)
                bulk.encode(slot)
                alone = bulk.encode(slot).costs.encode_seconds
                for size, is_beside in product((1, 64, len(asked)), (False, True)):
                    with ThreadPoolExecutor(1) as threads:
                        ended, calls = threading.Event(), list[float]()
                        if is_beside:
                            threads.submit(_encode_until, ended, bulk, slot, calls)
                        times = list[float]()
                        until = time.perf_counter() + (0.1 if bench.quick else 4.0)
                        while time.perf_counter() < until or (is_beside and not calls):
                            query = small.acquire()
                            query.append(asked[:size])
                            started = time.perf_counter()
                            queries.encode(query)
                            times.append(1e3 * (time.perf_counter() - started))
                            query.release()
                            time.sleep(0.02)
                        ended.set()
                    p50, p99 = np.percentile(times, [50, 99])
                    kept = alone / float(np.mean(calls)) if calls else 1.0
                    bench.say(
                        "lanes",
                        model=name,
                        texts=size,
                        beside_bulk=is_beside,
                        p50_ms=p50,
                        p99_ms=p99,
                        kept=kept,
                    )
                slot.release()


def _encode_until(
    ended: threading.Event, pool: EncoderPool, slot: Any, seconds: list[float]
) -> None:
    while not ended.is_set():
        started = time.perf_counter()
        pool.encode(slot)
        seconds.append(time.perf_counter() - started)


@contextlib.contextmanager
def _stage(bench: Bench, name: str) -> Iterator[None]:
    started = time.monotonic()
    try:
        yield
    except Exception as error:
        bench.missed.append(f"{name}: {type(error).__name__}: {error}"[:300])
        bench.say(name, error=traceback.format_exc()[-2_000:])
    bench.say(name, stage_seconds=time.monotonic() - started)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        help="folder of all-MiniLM-L6-v2, in which fp16 will do; that of the package else",
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument(
        "--precisions", default="fp16", help="of passes; the first one is the pool's too"
    )
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument(
        "--seconds", type=float, default=470.0, help="after which nothing new is begun"
    )
    parser.add_argument("--out", default=os.environ.get("OUT", "gpu-results"))
    parser.add_argument("--quick", action="store_true")
    settings = parser.parse_args()
    settings.model = settings.model or EncodingSpec().resolve().model_path
    bench = Bench(settings)
    os.environ |= {"SURGE_CACHE_DIR": str(bench.folder / "cache"), "HF_HUB_OFFLINE": "1"}
    try:
        for name in bench.settings.stages.split(","):
            with _stage(bench, name):
                globals()[name](bench)
    finally:
        bench.close_encoders()
        shutil.rmtree(bench.folder, ignore_errors=True)
    print(
        "\nNot measured:" if bench.missed else "\nEverything was measured.", *bench.missed, sep="\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
