"""What the card itself reaches: copies, matrix products and attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.nn.functional import linear, scaled_dot_product_attention

from benchmarks.gpu.bench import MEAN_TOKENS, Bench
from benchmarks.gpu_models import SHAPES
from surge_dagster.engine.inference.packed_attention import packed_attention
from surge_dagster.engine.inference.packing import CELL


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
    for name, sizes in SHAPES.items():
        hidden = sizes.hidden_size
        inner = sizes.intermediate_size
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
    for (heads, size), length in product(((12, 32), (12, 64), (16, 64)), MEAN_TOKENS):
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
