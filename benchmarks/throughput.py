"""Texts per second of every side on one workload, in rounds.

Machines are noisy, so the sides take turns on the same texts, round by round; what counts is the ratio of two sides
within a round, and of the rounds the median. A pool's first pass over the texts, which it never saw, comes before the
rounds and is a figure of its own. All vectors are compared with those of fp32 sentence-transformers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.inputs import Workload, short_workload, token_lengths
from benchmarks.matmul_limit import MatmulLimit, read_shape
from benchmarks.onnx_peers import FastEmbed, OnnxRuntime
from benchmarks.peers import Daft, Peer, SentenceTransformers, SentenceTransformersPool, Setting, peer_folder
from benchmarks.rounds import REFERENCE, Row, first_line, row_documents, say, take_rounds
from benchmarks.sides import PoolSide, RunSide
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import EncodingSpec

PEERS: dict[str, Callable[[Setting], Peer]] = {
    REFERENCE: SentenceTransformers,
    "sentence-transformers-pool": SentenceTransformersPool,
    "sentence-transformers-fp16": lambda setting: SentenceTransformers(setting, "fp16"),
    "onnxruntime": OnnxRuntime,
    "fastembed": FastEmbed,
    "daft": Daft,
}
_PILOT_TEXTS = 200
_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: peers and precisions by name, rounds, the device of the peers, texts of one large call."""

    device: str
    peers: list[str]
    precisions: list[str]
    rounds: int
    superbatch: int
    seed: int


def measure_workload(
    workload: Workload, spec: EncodingSpec, plan: Plan, scratch: Path, onnx_file: Path
) -> dict[str, Any]:
    """Every side on one workload; a side that cannot take part is a row with the reason."""
    spec = replace(spec, max_length=workload.max_length)
    space = spec.resolve()
    texts = workload.texts
    lengths = token_lengths(space, texts)
    pilot = texts[:: max(1, len(texts) // _PILOT_TEXTS)]
    with ExitStack() as stack:
        setting = Setting(space, peer_folder(space, scratch / "model"), onnx_file, plan.device, pilot)
        rows = [_open_peer(name, setting, stack) for name in plan.peers]
        pools = [_open_pool(precision, spec, plan.device, texts, stack) for precision in plan.precisions]
        sides = {row.name: side for row, side in pools if side is not None}
        rows += [row for row, _ in pools]
        limits = {
            name: MatmulLimit(side.pool.backend, plan.device, side.pool.precision, read_shape(space.model_path))
            for name, side in sides.items()
        }
        idle: list[float] = []
        if sides:
            name, side = next(iter(sides.items()))
            rows.append(_run_row(name, side, workload, scratch, idle))
        for limit in limits.values():
            limit.measure()
        take_rounds(rows, texts, plan.rounds)
        for limit in limits.values():
            limit.measure()
        work = read_shape(space.model_path).flops(lengths)
        for name, side in sides.items():
            row = next(row for row in rows if row.name == name)
            row.facts |= _pool_facts(row, side, work, len(texts), limits[name])
        documents = row_documents(rows, texts, idle)
        large = next((_superbatch(side, plan) for side in sides.values()), None) if workload.name == "short" else None
    return {
        "model": spec.model,
        "input": workload.name,
        "texts": len(texts),
        "mean_text_bytes": workload.mean_text_bytes,
        "mean_tokens": float(lengths.mean()),
        "longest_tokens": int(lengths.max()),
        "rows": documents,
        "superbatch": large,
    }


def _open_peer(name: str, setting: Setting, stack: ExitStack) -> Row:
    say(f"  {name}")
    try:
        peer = PEERS[name](setting)
    except Exception as error:  # whatever a peer's library does: the row says it, the others go on
        return Row(name, "peer", {}, lambda _: 0.0, missing=first_line(error))
    stack.callback(peer.close)
    facts = {"precision": peer.precision, "batch_size": peer.batch_size or None}
    facts |= {"attention": peer.attention} if isinstance(peer, SentenceTransformers) else {}
    return Row(name, "peer", facts, peer.encode)


def _open_pool(
    precision: str, spec: EncodingSpec, device: str, texts: list[str], stack: ExitStack
) -> tuple[Row, PoolSide | None]:
    """A started pool; its first pass over the texts is timed at once."""
    name = f"pool {precision}"
    say(f"  {name}")
    if device == "cpu" and precision == "bf16" and not _BF16.intersection(cpu_instructions()):
        reason = "this CPU has no bf16 arithmetic; a library that offers it there imitates it"
        return Row(name, "pool", {"precision": precision}, lambda _: 0.0, missing=reason), None
    try:
        devices = "cpu" if device == "cpu" else "auto"  # all GPUs, and never another kind than the peers use
        pool = stack.enter_context(EncoderPool(spec, precision=precision, devices=devices))
    except ConfigError as error:
        return Row(name, "pool", {"precision": precision}, lambda _: 0.0, missing=first_line(error)), None
    side = PoolSide(pool, texts)
    stack.callback(side.close)
    begun = time.perf_counter()
    side.encode(texts)
    facts = {
        "precision": pool.precision,
        "backend": pool.backend,
        "device": pool.device,
        "device_reason": pool.device_reason,
        "cold_texts_per_second": len(texts) / (time.perf_counter() - begun),
    }
    return Row(name, "pool", facts, side.encode), side


def _run_row(name: str, side: PoolSide, workload: Workload, scratch: Path, idle: list[float]) -> Row:
    run = RunSide(side.pool, workload.write_catalog(scratch / "catalog"), scratch)

    def work(_: list[str]) -> float:
        figures = run.run()
        idle.append(figures.idle_ratio)
        return figures.seconds

    return Row(f"run {name.removeprefix('pool ')}", "run", {"precision": side.pool.precision}, work)


def _pool_facts(row: Row, side: PoolSide, work: float, texts: int, limit: MatmulLimit) -> dict[str, Any]:
    """Padding, idle time, and the share of the matmul limit with what takes the rest."""
    facts: dict[str, Any] = {"padding_ratio": side.padding_ratio, "worker_idle_ratio": side.idle_ratio}
    if not limit.flops_per_second:
        return facts
    share = work * statistics.median(row.rates) / texts / limit.flops_per_second
    busy = (1 - side.idle_ratio) * (1 - side.padding_ratio)
    return facts | {
        "matmul_limit_gflops": limit.flops_per_second / 1e9,
        "matmul_limit_library": limit.library,
        "share_of_matmul_limit": share,
        # Of the time that workers compute tokens that count: everything in the passes but the products' own speed.
        "share_of_matmul_limit_inside_passes": share / busy if busy else None,
    }


def _superbatch(side: PoolSide, plan: Plan) -> dict[str, Any]:
    """One call as large as a SuperBatch is: its padding, and the workers' idle time in it."""
    say(f"  one call of {plan.superbatch:,} texts")
    texts = short_workload(plan.superbatch, plan.seed + 1).texts
    large = PoolSide(side.pool, texts)
    try:
        begun = time.perf_counter()
        large.encode(texts)
        rate = len(texts) / (time.perf_counter() - begun)
    finally:
        large.close()
    return {
        "texts": len(texts),
        "precision": side.pool.precision,
        "texts_per_second": rate,
        "padding_ratio": large.padding_ratio,
        "worker_idle_ratio": large.idle_ratio,
    }


def cpu_instructions() -> set[str]:
    """What the processor says that it can do, by the kernel's names."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {flag for line in lines if line.startswith(("flags", "Features")) for flag in line.split(":", 1)[1].split()}
