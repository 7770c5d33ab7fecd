"""Texts per second of every side on one workload.

The sides take turns on the same texts, round by round. What counts is the ratio of two sides within a round, and the
median of these over the rounds, because the speed of a shared machine changes. All vectors are compared with those of
fp32 sentence-transformers.
"""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.encode_sides import REFERENCE, PoolCall, Side, open_peer, open_pool, run_side
from benchmarks.harness import Document, first_line, say
from benchmarks.inputs import Workload, short_workload, token_lengths
from benchmarks.matmul_limit import MatmulLimit, read_shape
from benchmarks.peers import Setting, peer_folder
from surge_dagster.engine.model.spec import EncodingSpec

_PILOT_TEXTS = 200


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: peers and precisions by name, rounds, the device of the peers, texts of the one large call."""

    device: str
    peers: list[str]
    precisions: list[str]
    rounds: int
    superbatch: int
    seed: int


def measure_workload(workload: Workload, spec: EncodingSpec, plan: Plan, scratch: Path, onnx_file: Path) -> Document:
    """Measure every side; one that cannot take part is a row with the reason."""
    spec = replace(spec, max_length=workload.max_length)
    space = spec.resolve()
    texts = workload.texts
    lengths = token_lengths(space, texts)
    shape = read_shape(space.model_path)
    large = None
    with ExitStack() as stack:
        pilot = texts[:: max(1, len(texts) // _PILOT_TEXTS)]
        setting = Setting(space, peer_folder(space, scratch / "model"), onnx_file, plan.device, pilot)
        sides = [open_peer(name, setting, stack) for name in plan.peers]
        opened = [open_pool(precision, spec, plan.device, texts, stack) for precision in plan.precisions]
        sides += [side for side, _ in opened]
        pools = [(side, call) for side, call in opened if call is not None]
        if pools:
            sides.append(run_side(pools[0][1], workload, scratch))
        limits = [MatmulLimit(call.pool.start().backend, plan.device, call.pool.precision, shape) for _, call in pools]
        for limit in limits:
            limit.measure()
        take_rounds(sides, texts, plan.rounds)
        for (side, call), limit in zip(pools, limits, strict=True):
            limit.measure()
            side.facts |= call.ratios() | _limit_facts(side, call, shape.flops(lengths) / len(texts), limit)
        rows = row_documents(sides)
        if pools and workload.name == "short":
            large = _large_call(pools[0][1], plan)
    return {
        "model": spec.model,
        "input": workload.name,
        "texts": len(texts),
        "mean_text_bytes": workload.mean_text_bytes,
        "mean_tokens": float(lengths.mean()),
        "rows": rows,
        "superbatch": large,
    }


def take_rounds(sides: list[Side], texts: list[str], rounds: int) -> None:
    """Run all rounds in rotating order; a peer that fails in one is left out from there on."""
    for index in range(rounds):
        say(f"  round {index + 1} of {rounds}")
        first = index % len(sides)
        for side in sides[first:] + sides[:first]:
            if side.missing is not None:
                continue
            try:
                side.take_turn(texts)
            except Exception as error:
                if side.kind != "peer" or side.name == REFERENCE:
                    raise
                side.missing = first_line(error)


def row_documents(sides: list[Side]) -> list[Document]:
    """A document per side: medians over the rounds, ratios within them, fidelity of the vectors."""
    present = [side for side in sides if side.missing is None]
    reference = next(side for side in present if side.name == REFERENCE)
    assert reference.vectors is not None
    documents = []
    for side in sides:
        document = {"side": side.name, "kind": side.kind, **side.facts}
        if side.missing is not None:
            documents.append(document | {"missing": side.missing})
            continue
        document["texts_per_second"] = statistics.median(side.rates)
        document["ratios"] = [ours / theirs for ours, theirs in zip(side.rates, reference.rates, strict=True)]
        document["ratio"] = statistics.median(document["ratios"])
        document["ratio_to"] = {
            peer.name: statistics.median(a / b for a, b in zip(side.rates, peer.rates, strict=True))
            for peer in present
            if peer.kind == "peer" and peer is not side
        }
        if "cold_texts_per_second" in document:
            document["cold_share"] = document["cold_texts_per_second"] / document["texts_per_second"]
        if side.vectors is not None:
            found = cosines(side.vectors, reference.vectors)
            document |= {"lowest_cosine": float(found.min()), "mean_cosine": float(found.mean())}
        if idle := document.pop("idle_ratios", None):
            document["worker_idle_ratio"] = statistics.median(idle)
        documents.append(document)
    return documents


def cosines(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Cosine of each row of one [n, d] matrix to the same row of the other."""
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    return np.einsum("ij,ij->i", ours, theirs) / (np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1))


def _limit_facts(side: Side, call: PoolCall, flops_per_text: float, limit: MatmulLimit) -> Document:
    """The share of the machine's matmul limit that the pool reached, in a whole call and inside the forward passes."""
    if not limit.flops_per_second:
        return {}
    share = flops_per_text * statistics.median(side.rates) / limit.flops_per_second
    ratios = call.ratios()
    busy = (1 - ratios["worker_idle_ratio"]) * (1 - ratios["padding_ratio"])
    return {
        "matmul_limit_gflops": limit.flops_per_second / 1e9,
        "matmul_limit_library": limit.library,
        "share_of_matmul_limit": share,
        "share_of_matmul_limit_inside_passes": share / busy if busy else None,
    }


def _large_call(call: PoolCall, plan: Plan) -> Document:
    """One call as large as a SuperBatch: its padding, and the workers' idle time."""
    say(f"  one call of {plan.superbatch:,} texts")
    texts = short_workload(plan.superbatch, plan.seed + 1).texts
    large = PoolCall(call.pool, texts)
    try:
        begun = time.perf_counter()
        large.encode(texts)
        rate = len(texts) / (time.perf_counter() - begun)
        return {"texts": len(texts), "texts_per_second": rate} | large.ratios()
    finally:
        large.close()
