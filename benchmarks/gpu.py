"""What a GPU makes of this engine, in one command of less than eight minutes: ceilings, passes,
tokens, pool and run.

    python -m benchmarks.gpu

Needs torch, transformers, sentence-transformers 6.2, pyarrow, filelock and psutil, and no network;
`benchmarks.gpu_models` makes a folder of 50 MB to take to a GPU machine. Every result is printed,
and appended to results.jsonl, as soon as it is measured; an error ends only its stage. `--device
cpu --quick` is a rehearsal.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from benchmarks.gpu_models import SHAPES, make_model
from benchmarks.harness import Options, seconds_of, temporary_folder, versions_of
from benchmarks.paced_runs import drawn_texts, embed
from surge_dagster import EncoderPool, EncodingSpec, open_source, open_store
from surge_dagster.engine.encoder.metrics import Costs
from surge_dagster.engine.encoder.worker import parity
from surge_dagster.engine.encoder.worker.backends import (
    BackendSettings,
    LaunchedPortion,
    Rows,
    encode_texts,
)
from surge_dagster.engine.encoder.worker.parity import (
    load_reference,
    reference_vectors,
)
from surge_dagster.engine.encoder.worker.tokenization import (
    TextTokenizer,
    TokenizerFacts,
    Tokens,
)
from surge_dagster.engine.inference.packed_attention import packed_attention
from surge_dagster.engine.inference.packed_backend import load_packed
from surge_dagster.engine.inference.packing import CELL, LONGEST_IN_CELLS
from surge_dagster.engine.inference.torch_backend import load_torch
from surge_dagster.engine.model.spec import Space

_PACKAGES = (
    "torch",
    "transformers",
    "sentence-transformers",
    "tokenizers",
    "numpy",
    "pyarrow",
    "triton",
)
_QUICK_SHAPE = (64, 128, 2, 4)
_MEAN_TOKENS = (11, 57, 256)
_BYTES_OF_TOKENS = {11: 47, 57: 260, 256: 1_280}
# Of an H100 or H200 SXM by NVIDIA's data sheet: dense fp16 and bf16, floating-point operations per
# second.
_SHEET_FLOPS = 989e12
_PARTS = ("encode", "tokenize", "forward", "read", "serialize", "upload")


class Bench:
    """The settings, the results so far, and the models that were made."""

    def __init__(self, settings: argparse.Namespace, folder: Path) -> None:
        self.settings = settings
        self.quick: bool = settings.quick
        self.device = torch.device(settings.device)
        self.on_cuda = self.device.type == "cuda"
        self.kind = torch.float16
        self.precision = "fp16"
        if not self.on_cuda:
            self.kind = torch.float32
            self.precision = "fp32"
        self.began = time.monotonic()
        self.folder = folder
        self.results = Path(settings.out)
        self.results.mkdir(parents=True, exist_ok=True)
        self.peak = _SHEET_FLOPS
        self.missed: list[str] = []
        self._case: tuple[str, str, int] | None = None
        self._encoders: EncoderPool | None = None

    def say(self, stage: str, **facts: Any) -> None:
        """Print a result and append it to the file."""
        row = {"at": round(time.monotonic() - self.began, 1), "stage": stage} | facts
        with (self.results / "results.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        shown = []
        for name, value in row.items():
            form = ".4g" if isinstance(value, float) else ""
            shown.append(f"{name}={value:{form}}")
        print(*shown, flush=True)

    def size(self, full: int, quick: int) -> int:
        return quick if self.quick else full

    def first_if_quick(self, cases: list[Any]) -> list[Any]:
        return cases[:1] if self.quick else cases

    def has_time(self, seconds: int, name: str) -> bool:
        """Return whether this many seconds remain; if not, the case is listed as not measured."""
        remaining = self.settings.seconds - (time.monotonic() - self.began)
        if remaining < self.size(seconds, 5):
            self.missed.append(name)
            return False
        return True

    def model(self, name: str) -> str:
        """Return the folder of a model of this shape: MiniLM's own, others with random weights and
        its tokenizer."""
        own = Path(self.settings.model)
        if name == "minilm":
            return str(own)
        folder = self.folder / name
        if not folder.exists():
            shape = _QUICK_SHAPE if self.quick else SHAPES[name]
            make_model(folder, shape, own, str(self.device), "float16")
        return str(folder)

    def new_pool(self, name: str, workers: int = 1, backend: str = "auto") -> EncoderPool:
        return EncoderPool(
            EncodingSpec(self.model(name)),
            devices=[str(self.device)] * workers,
            precision=self.precision,
            backend=backend,
        )

    def encoders(self, name: str, backend: str, workers: int) -> EncoderPool:
        """Return a pool that stays until another one is requested."""
        if self._encoders is None or self._case != (name, backend, workers):
            self.close_encoders()
            self._case = (name, backend, workers)
            self._encoders = self.new_pool(name, workers, backend)
        return self._encoders

    def close_encoders(self) -> None:
        if self._encoders is not None:
            self._encoders.close()
        self._encoders = None

    def texts(self, mean_tokens: int, count: int) -> pa.LargeStringArray:
        """Return synthetic titles and descriptions."""
        return drawn_texts(count, _BYTES_OF_TOKENS[mean_tokens], seed=1)

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype or self.kind)

    def timed(self, call: Callable[[], Any], seconds: float = 0.3) -> float:
        """Return the median seconds of a call on the device, after it ran three times."""
        times: list[float] = []
        for _ in range(self.size(3, 1)):
            call()
        end = time.perf_counter()
        if not self.quick:
            end += seconds
        while len(times) < 3 or time.perf_counter() < end:
            times.append(self.once(call))
        return float(np.median(times))

    def once(self, call: Callable[[], Any]) -> float:
        """Return the seconds of one call on the device."""
        self.wait()
        started = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - started

    def wait(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize(self.device)


def environment(bench: Bench) -> None:
    """Versions, and facts of the card."""
    cores = len(os.sched_getaffinity(0))
    python = platform.python_version()
    bench.say("environment", python=python, cores=cores, **versions_of(_PACKAGES))
    if bench.on_cuda:
        facts = torch.cuda.get_device_properties(bench.device)
        gigabytes = facts.total_memory / 1e9
        cuda = torch.version.cuda
        bench.say("environment", gpu=facts.name, gigabytes=gigabytes, cuda=cuda)


def ceilings(bench: Bench) -> None:
    """What the card reaches, less than its data sheet says: copies and matrix products."""
    size = 1 << bench.size(32, 20)
    source = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    target = torch.zeros(size, dtype=torch.uint8, device=bench.device)
    source.random_()
    seconds = bench.timed(partial(target.copy_, source))
    bench.say("ceilings", copy_tb_per_s=2 * size / seconds / 1e12)
    del source, target

    side = bench.size(8_192, 256)
    for kind in (torch.float16, torch.bfloat16) if bench.on_cuda else (torch.float32,):
        one = bench.random(side, side, dtype=kind)
        other = bench.random(side, side, dtype=kind)
        flops = 2 * side**3 / bench.timed(partial(torch.matmul, one, other), 0.6)
        if kind is torch.float16:
            bench.peak = flops
        bench.say("ceilings", product=f"{side}^3", dtype=str(kind), tflops=flops / 1e12)

    rows = bench.size(65_536, 512)
    for name, (hidden, inner, *_) in SHAPES.items():
        for inputs, outputs in ((hidden, hidden), (hidden, inner), (inner, hidden)):
            one = bench.random(rows, inputs)
            seconds = bench.timed(partial(linear, one, bench.random(outputs, inputs)), 0.1)
            tflops = 2 * rows * inputs * outputs / seconds / 1e12
            shape = f"{rows}x{inputs}x{outputs}"
            bench.say("ceilings", model=name, product=shape, tflops=tflops)


def cudnn(bench: Bench) -> None:
    """Milliseconds of the first call for each new shape: why cuDNN's attention is turned off."""
    for enabled in (True, False) if bench.on_cuda else ():
        torch.backends.cuda.enable_cudnn_sdp(enabled)
        times = []
        for rows in (701, 702, 703, 1_411):
            states = bench.random(rows, 13, 12, 32).transpose(1, 2)
            seconds = bench.once(partial(scaled_dot_product_attention, states, states, states))
            times.append(round(1e3 * seconds, 2))
        bench.say("cudnn", cudnn_attention=enabled, first_calls_ms=str(times))


def attention(bench: Bench) -> None:
    """Nanoseconds of attention per token and layer: texts of one length, packed, and in cells (some
    cut in two)."""
    for (heads, size), length in product(((12, 32), (12, 64), (16, 64)), _MEAN_TOKENS):
        rows = bench.size(65_536, 1_024) // length
        tokens = rows * length
        states = bench.random(rows, length, heads, size)
        dense = states.transpose(1, 2)
        flat = states.reshape(1, -1, heads, size).transpose(1, 2)
        borders = torch.arange(0, tokens + 1, length, device=bench.device, dtype=torch.int32)
        longest = -(-length // 128) * 128
        facts = (borders, longest, size**-0.5, False, -1)
        cases: dict[str, Callable[[], Any]] = {
            "padded": partial(scaled_dot_product_attention, dense, dense, dense),
            "packed": partial(packed_attention, flat, flat, flat, *facts),
        }
        if length <= CELL:
            cells = torch.arange(tokens, device=bench.device) // length
            numbers = cells[: tokens // CELL * CELL].view(-1, 1, CELL)
            shape = (len(numbers), 1, CELL, CELL)
            apart = torch.zeros(shape, dtype=bench.kind, device=bench.device)
            apart.masked_fill_(numbers[..., None] != numbers[:, :, None], -torch.inf)
            part = flat[:, :, : numbers.numel()]
            cases["cells"] = partial(packed_attention, part, part, part, *facts, apart)
        found = {name: 1e9 * bench.timed(call, 0.1) / tokens for name, call in cases.items()}
        bench.say("attention", heads=heads, size=size, length=length, **found)


def passes(bench: Bench) -> None:
    """Forward passes of ids that are on the host: padded (torch) and packed, by the backends' own
    `forward`."""
    max_length = None if bench.quick else 512
    for name in bench.first_if_quick(list(SHAPES)):
        space = EncodingSpec(bench.model(name), max_length=max_length).resolve()
        reference = load_reference(space, str(bench.device))
        expected = reference_vectors(reference, space, parity.PARITY_TEXTS)
        encoder: Any = reference[0].model
        config = encoder.config
        weights = _matrix_weights(encoder)
        del reference, encoder
        for kind in ("padded", "packed"):
            if bench.has_time(20, f"passes: {name} {kind}"):
                names = {"model": name, "precision": bench.precision, "passes": kind}
                _measure_passes(bench, space, names, expected, PassCosts(config, weights))
                if bench.on_cuda:
                    torch.cuda.empty_cache()


def _matrix_weights(encoder: torch.nn.Module) -> int:
    weights = 0
    for name, weight in encoder.named_parameters():
        if weight.dim() == 2 and "layer" in name:
            weights += weight.numel()
    return weights


class PassCosts:
    """The floating-point operations of a model's passes.

    Args:
        config: of the transformer.
        weights: of its layers' matrices.
    """

    def __init__(self, config: Any, weights: int) -> None:
        self.vocabulary: int = config.vocab_size
        self._attended: int = config.hidden_size * config.num_hidden_layers
        self._weights = weights

    def operations(self, lengths: np.ndarray) -> float:
        squares = float((lengths.astype(float) ** 2).sum())
        return 2.0 * self._weights * int(lengths.sum()) + 4.0 * self._attended * squares


def _measure_passes(
    bench: Bench,
    space: Space,
    names: dict[str, str],
    expected: np.ndarray,
    costs: PassCosts,
) -> None:
    """Load a backend, compare its vectors, and time its passes."""
    settings = BackendSettings(str(bench.device), names["precision"], threads=4)
    kind = names["passes"]
    started = time.perf_counter()
    backend: Any = (load_packed if kind == "packed" else load_torch)(space, settings)
    vectors, _ = encode_texts(backend, parity.PARITY_TEXTS, space)
    bench.say(
        "passes",
        **names,
        detail=backend.detail,
        start_seconds=time.perf_counter() - started,
        lowest_cosine=parity.lowest_cosine(vectors, expected),
    )
    if kind == "packed":
        _compare_company(bench, backend, space, names)
    for mean in _MEAN_TOKENS:
        for budget in (1_024,) if bench.quick else (131_072, 262_144):
            backend.token_budget = budget
            _time_passes(bench, backend, space, costs, mean, names | {"passes": f"{kind} {budget}"})


def _compare_company(bench: Bench, backend: Any, space: Space, names: dict[str, str]) -> None:
    """Report the share of vectors that do not change with the texts that they are computed with."""
    times = bench.size(20, 2)
    few = parity.PARITY_TEXTS * times
    many = parity.PARITY_TEXTS * (3 * times)
    one, _ = encode_texts(backend, few, space)
    other, _ = encode_texts(backend, many, space)
    equal = (one == other[: len(one)]).all(axis=1)
    short = backend.prepare(few).lengths <= LONGEST_IN_CELLS
    shares = {"short": float(equal[short].mean()), "longer": float(equal[~short].mean())}
    facts = {"model": names["model"], "precision": names["precision"]}
    bench.say("passes", **facts, equal_bytes_in_other_company=str(shares))


def _time_passes(
    bench: Bench,
    backend: Any,
    space: Space,
    costs: PassCosts,
    mean: int,
    names: dict[str, str],
) -> None:
    """Report the rate of passes over texts of this mean length."""
    total = bench.size(524_288, 2_048)
    tokens = _draw_tokens(max(8, total // mean), mean, space, costs.vocabulary)
    lengths = tokens.lengths
    count = len(lengths)
    matrix = np.empty((count, space.dimension), np.float32)
    rows = Rows.of_all(matrix, np.empty(count, np.uint8))
    launch = getattr(backend, "launch", None) or partial(_computed, backend)
    launch(tokens, rows, lambda: None).finish()

    # As a worker does: the next portion is launched before the previous one is waited for.
    times = bench.size(6, 2)
    started = time.perf_counter()
    launched = launch(tokens, rows, lambda: None)
    for _ in range(times - 1):
        following = launch(tokens, rows, lambda: None)
        launched.finish()
        launched = following
    launched.finish()
    seconds = (time.perf_counter() - started) / times
    flops = costs.operations(lengths) / seconds
    bench.say(
        "passes",
        **names,
        mean_tokens=mean,
        mtok_per_s=len(tokens.ids) / seconds / 1e6,
        tflops=flops / 1e12,
        share_of_sheet=flops / _SHEET_FLOPS,
        share_of_measured=flops / bench.peak,
    )


def _draw_tokens(count: int, mean: int, space: Space, vocabulary: int) -> Tokens:
    rng = np.random.default_rng(0)
    drawn = np.round(rng.normal(mean, 0.35 * mean, count))
    lengths = np.clip(drawn, 4, space.max_length).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = rng.integers(0, vocabulary, offsets[-1]).astype(np.int32)
    return Tokens(ids, offsets, np.zeros(count, np.bool_), 0)


def _computed(backend: Any, *arguments: Any) -> LaunchedPortion:
    costs = backend.forward(*arguments)
    return LaunchedPortion(is_done=lambda: True, finish=lambda: costs)


def tokenizer(bench: Bench) -> None:
    """Microseconds per text, with all cores."""
    document = (Path(bench.settings.model) / "tokenizer.json").read_text()
    space = EncodingSpec(bench.settings.model).resolve()
    texts_to_ids = TextTokenizer(TokenizerFacts(document), space)
    for mean in _MEAN_TOKENS:
        count = bench.size(1_000_000 // mean, 500)
        texts = bench.texts(mean, count)
        tokenize = partial(texts_to_ids.encode, texts.to_pylist())
        tokenize()
        bench.say("tokenizer", mean_tokens=mean, us_per_text=1e6 * seconds_of(tokenize) / count)


def pool(bench: Bench) -> None:
    """Texts per second of the pool, tokenizing included."""
    cases = [
        ("minilm", "auto", 1),
        ("minilm", "torch", 1),
        ("bge-base", "auto", 1),
        ("e5-large", "auto", 1),
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
        share = {"minilm": 1, "bge-base": 4, "e5-large": 10}[name]
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
    for workers, threads in bench.first_if_quick([(1, None), (2, None), (3, 8)]):
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


def lanes(bench: Bench) -> None:
    """Milliseconds of queries during bulk work of another process on the same card, as the encoder
    service has them."""
    for name, full in bench.first_if_quick([("minilm", 150_000), ("e5-large", 13_000)]):
        if not bench.has_time(70, f"lanes: {name}"):
            continue
        bulk = bench.encoders(name, "auto", 1)
        texts = bench.texts(57, bench.size(full, 300))
        queried = bench.texts(57, bench.size(1_150, 20))
        with bench.new_pool(name) as queries:
            queries.start()
            _measure_lanes(bench, name, Lane(bulk, texts), Lane(queries, queried))


class Lane:
    """A pool and the texts that it encodes."""

    def __init__(self, pool: EncoderPool, texts: pa.LargeStringArray) -> None:
        self.texts = texts
        self._pool = pool
        self._arena = pool.arena(slots=1, max_texts=len(texts), max_bytes=texts.nbytes)
        self._slot = self._arena.acquire()

    def encode(self, count: int) -> float:
        """Return the seconds of a call of the first texts."""
        if len(self._slot) != count:
            self._slot.truncate(0)
            self._slot.append(self.texts[:count])
        return seconds_of(partial(self._pool.encode, self._slot))

    def close(self) -> None:
        self._slot.release()
        self._arena.close()


def _measure_lanes(bench: Bench, name: str, bulk: Lane, queries: Lane) -> None:
    with contextlib.closing(bulk), contextlib.closing(queries):
        work = partial(bulk.encode, len(bulk.texts))
        work()
        undisturbed = work()
        for size, is_beside in product((1, 64, len(queries.texts)), (False, True)):
            bulk_work = work if is_beside else None
            times, calls = _ask_during(bench, partial(queries.encode, size), bulk_work)
            p50, p99 = 1e3 * np.percentile(times, [50, 99])
            kept = undisturbed / float(np.mean(calls)) if calls else 1.0
            facts = {"p50_ms": p50, "p99_ms": p99, "kept": kept}
            bench.say("lanes", model=name, texts=size, beside_bulk=is_beside, **facts)


def _ask_during(
    bench: Bench, ask: Callable[[], float], bulk_work: Callable[[], float] | None
) -> tuple[list[float], list[float]]:
    """Ask for four seconds; return the seconds of the queries and of the bulk calls."""
    times: list[float] = []
    calls: list[float] = []
    ended = threading.Event()

    def work_until_the_end(work: Callable[[], float]) -> None:
        while not ended.is_set():
            calls.append(work())

    with ThreadPoolExecutor(1) as threads:
        if bulk_work is not None:
            threads.submit(work_until_the_end, bulk_work)
        until = time.perf_counter() + (0.1 if bench.quick else 4.0)
        while time.perf_counter() < until or (bulk_work is not None and not calls):
            times.append(ask())
            time.sleep(0.02)
        ended.set()
    return times, calls


_ALL: tuple[Callable[[Bench], None], ...] = (
    environment,
    ceilings,
    cudnn,
    passes,
    attention,
    tokenizer,
    pool,
    run,
    peer,
    lanes,
)
_STAGES = {stage.__name__: stage for stage in _ALL}


@contextlib.contextmanager
def _stage(bench: Bench, name: str) -> Iterator[None]:
    started = time.monotonic()
    try:
        yield
    except Exception as error:
        bench.missed.append(f"{name}: {type(error).__name__}: {error}"[:300])
        bench.say(name, error=traceback.format_exc()[-2_000:])
    bench.say(name, stage_seconds=time.monotonic() - started)


def main() -> None:
    options = Options(__doc__)
    options.add_argument("--model", help="folder of all-MiniLM-L6-v2, also in fp16")
    options.add_argument("--device", default="cuda:0")
    options.add_names("--stages", _STAGES)
    options.add_argument("--seconds", type=float, default=470.0, help="when nothing new begins")
    options.add_argument("--out", default=os.environ.get("OUT", "gpu-results"))
    settings = options.parse_args()
    settings.model = settings.model or EncodingSpec().resolve().model_path
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with temporary_folder(memory) as folder:
        bench = Bench(settings, folder)
        os.environ |= {"SURGE_CACHE_DIR": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
        try:
            for name in settings.stages:
                with _stage(bench, name):
                    _STAGES[name](bench)
        finally:
            bench.close_encoders()
    title = "Not measured:" if bench.missed else "Everything was measured."
    print("", title, *bench.missed, sep="\n")


if __name__ == "__main__":
    main()
