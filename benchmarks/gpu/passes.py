"""Forward passes of the backends without a pool, and tokenization without a model."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.bench import MEAN_TOKENS, SHEET_FLOPS, Bench
from benchmarks.gpu_models import SHAPES, CausalShape
from benchmarks.harness import in_turns, seconds_of
from surge_dagster import EncodingSpec
from surge_dagster.engine.encoder.worker import parity
from surge_dagster.engine.encoder.worker.backends import (
    BackendSettings,
    LaunchedPortion,
    Rows,
    encode_texts,
)
from surge_dagster.engine.encoder.worker.tokenization import (
    TextTokenizer,
    TokenizerFacts,
    Tokens,
)
from surge_dagster.engine.inference.packed_backend import PackedOptions, load_packed
from surge_dagster.engine.inference.packing import LONGEST_IN_CELLS
from surge_dagster.engine.inference.torch_backend import load_torch
from surge_dagster.engine.model.spec import Space


def passes(bench: Bench) -> None:
    """Forward passes of ids that are on the host: padded (torch) and packed, by the backends' own
    `forward`."""
    for name, shape in SHAPES.items():
        if not isinstance(shape, CausalShape):
            _measure_model(bench, name, ("padded", "packed"), bench.precision)


def causal(bench: Bench) -> None:
    """The same of decoders, whose vector is that of the last token."""
    for name, shape in SHAPES.items():
        if isinstance(shape, CausalShape):
            _measure_model(bench, name, ("padded", "packed"), bench.precision)


def bf16(bench: Bench) -> None:
    """Packed passes in bf16."""
    for name in SHAPES if bench.on_cuda else ():
        _measure_model(bench, name, ("packed",), "bf16")


def _measure_model(bench: Bench, name: str, kinds: Sequence[str], precision: str) -> None:
    if not bench.has_time(20 * len(kinds), f"passes: {name} {precision}"):
        return
    max_length = None if bench.quick else 512
    space = EncodingSpec(bench.model(name), max_length=max_length).resolve()
    reference = parity.load_reference(space, str(bench.device))
    expected = parity.reference_vectors(reference, space, parity.PARITY_TEXTS)
    encoder: Any = reference[0].model
    is_causal = isinstance(SHAPES[name], CausalShape)
    costs = PassCosts(encoder.config, _matrix_weights(encoder), is_causal)
    del reference, encoder
    for kind in kinds:
        names = {"model": name, "precision": precision, "passes": kind}
        _measure_passes(bench, space, names, expected, costs)
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

    def __init__(self, config: Any, weights: int, is_causal: bool) -> None:
        self.vocabulary: int = config.vocab_size
        head: int = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
        self._attended = head * config.num_attention_heads * config.num_hidden_layers
        if is_causal:
            self._attended //= 2  # a token attends to those before it
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
    bench.forget_compiled()
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
    for mean in MEAN_TOKENS:
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
    tokens = draw_tokens(max(8, total // mean), mean, space, costs.vocabulary)
    seconds = seconds_of_portions(backend, tokens, space, bench.size(6, 2))
    flops = costs.operations(tokens.lengths) / seconds
    bench.say(
        "passes",
        **names,
        mean_tokens=mean,
        mtok_per_s=len(tokens.ids) / seconds / 1e6,
        tflops=flops / 1e12,
        share_of_sheet=flops / SHEET_FLOPS,
        share_of_measured=flops / bench.peak,
    )


def seconds_of_portions(backend: Any, tokens: Tokens, space: Space, times: int) -> float:
    """Return the seconds of a portion of these texts, one of so many after a first one."""
    count = len(tokens.lengths)
    matrix = np.empty((count, space.dimension), np.float32)
    rows = Rows.of_all(matrix, np.empty(count, np.uint8))
    launch = getattr(backend, "launch", None) or partial(_computed, backend)
    launch(tokens, rows, lambda: None).finish()

    # As a worker does: the next portion is launched before the previous one is waited for.
    started = time.perf_counter()
    launched = launch(tokens, rows, lambda: None)
    for _ in range(times - 1):
        following = launch(tokens, rows, lambda: None)
        launched.finish()
        launched = following
    launched.finish()
    return (time.perf_counter() - started) / times


def vocabulary_of(space: Space) -> int:
    """Return how many tokens a model of the benchmark knows."""
    return json.loads((Path(space.model_path) / "config.json").read_text())["vocab_size"]


def draw_tokens(count: int, mean: int, space: Space, vocabulary: int) -> Tokens:
    rng = np.random.default_rng(0)
    drawn = np.round(rng.normal(mean, 0.35 * mean, count))
    lengths = np.clip(drawn, 4, space.max_length).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = rng.integers(0, vocabulary, offsets[-1]).astype(np.int32)
    return Tokens(ids, offsets, np.zeros(count, np.bool_), 0)


_PARTS = {
    "three products": PackedOptions(has_joined_products=False, has_compiled_embeddings=False),
    "one product": PackedOptions(has_compiled_embeddings=False),
    "one product, compiled embeddings": PackedOptions(),
}


def parts(bench: Bench) -> None:
    """Millions of tokens per second, in turns, of passes with three products for query, key and
    value, with one, and with compiled embeddings too."""
    for name in bench.first_if_quick(["minilm", "bge-base", "e5-large"]):
        if not bench.has_time(40, f"parts: {name}"):
            continue
        space = EncodingSpec(bench.model(name)).resolve()
        budget = bench.size(262_144, 1_024)
        settings = BackendSettings(str(bench.device), bench.precision, 4, token_budget=budget)
        bench.forget_compiled()
        sides: dict[str, Callable[[], float]] = {}
        tokens = draw_tokens(bench.size(524_288, 2_048) // 57, 57, space, vocabulary_of(space))
        for side, options in _PARTS.items():
            backend = load_packed(space, settings, options)
            sides[side] = partial(seconds_of_portions, backend, tokens, space, bench.size(4, 1))
        times = in_turns(sides, bench.size(4, 1))
        rates = {side: len(tokens.ids) / median(times[side]) / 1e6 for side in sides}
        bench.say("parts", model=name, mean_tokens=57, mtok_per_s=str(rates))


def _computed(backend: Any, *arguments: Any) -> LaunchedPortion:
    costs = backend.forward(*arguments)
    return LaunchedPortion(is_done=lambda: True, finish=lambda: costs)


def tokenizer(bench: Bench) -> None:
    """Microseconds per text, with all cores."""
    document = (Path(bench.settings.model) / "tokenizer.json").read_text()
    space = EncodingSpec(bench.settings.model).resolve()
    texts_to_ids = TextTokenizer(TokenizerFacts(document), space)
    for mean in MEAN_TOKENS:
        count = bench.size(1_000_000 // mean, 500)
        texts = bench.texts(mean, count)
        tokenize = partial(texts_to_ids.encode, texts.to_pylist())
        tokenize()
        bench.say("tokenizer", mean_tokens=mean, us_per_text=1e6 * seconds_of(tokenize) / count)
