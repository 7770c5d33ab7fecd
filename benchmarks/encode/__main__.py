"""This engine beside sentence-transformers and others: texts per second, fidelity, and what a call
and a start cost.

    python -m benchmarks.encode [--texts 600] [--rounds 3] [--inputs demo,short,long] [--quick]

Prints a table and, as the last line of standard output, one JSON document; docs/benchmarks.md
explains it. Exits with 1 when the pool is slower than sentence-transformers.

The sides take turns on the same texts, round by round. What counts is the ratio of two sides within
a round, and the median of these over the rounds, because the speed of a shared machine changes. All
vectors are compared with those of fp32 sentence-transformers.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.encode.costs import call_cost_document, start_cost_document
from benchmarks.encode.inputs import (
    INPUTS,
    SHAPES,
    Workload,
    draw_workload,
    short_workload,
    token_lengths,
    write_model,
)
from benchmarks.encode.peers import Setting, peer_folder
from benchmarks.encode.report import lines, targets
from benchmarks.encode.sides import PEERS, REFERENCE, PoolCall, Side, open_peer, open_pool, run_side
from benchmarks.harness import (
    Document,
    add_quick,
    command_line,
    first_line,
    names_of,
    print_document,
    say,
    start_document,
)
from surge_dagster.engine.model.spec import EncodingSpec

PRECISIONS = ("fp32", "fp16", "bf16")
_LIBRARIES = (
    *(
        "torch",
        "sentence-transformers",
        "transformers",
        "tokenizers",
        "openvino",
        "pyarrow",
        "numpy",
    ),
    *("onnxruntime", "daft", "flash-attn"),
)
_PILOT_TEXTS = 200


def measure(arguments: argparse.Namespace) -> Document:
    """Run everything that was requested and give the document."""
    document = start_document("encode", arguments, _LIBRARIES)
    with tempfile.TemporaryDirectory(prefix="surge-bench-", ignore_cleanup_errors=True) as folder:
        document["workloads"] = [
            workload
            for model in arguments.models
            for workload in _measure_model(model, arguments, Path(folder))
        ]
    document |= {"device": arguments.device, "call_cost": call_cost_document(arguments.quick)}
    document["start"] = start_cost_document(
        EncodingSpec(), arguments.device, 1 if arguments.quick else 5
    )
    return document | {"slower_than_sentence_transformers": slower(document)}


def slower(document: Document) -> bool:
    """Whether the pool, at its first precision, lost to sentence-transformers on any workload."""
    rows = [
        [row for row in workload["rows"] if row["kind"] == "pool"]
        for workload in document["workloads"]
    ]
    first = [next((row["ratio"] for row in pools if "missing" not in row), 1) for pools in rows]
    return min(first) < 1


def _measure_model(model: str, arguments: argparse.Namespace, scratch: Path) -> list[Document]:
    """Every input with one model; a shape that is ten times as large gets an eighth of the texts."""
    folder = scratch / model
    folder.mkdir()
    spec = EncodingSpec() if model == "default" else EncodingSpec(write_model(model, folder))
    workloads = []
    for name in arguments.inputs:
        say(f"{model}, {name}: drawing texts")
        texts = arguments.texts if model == "default" else max(20, arguments.texts // 8)
        workload = draw_workload(name, texts, arguments.seed, spec, folder)
        (folder / name).mkdir()
        measured = measure_workload(workload, spec, arguments, folder / name, folder / "model.onnx")
        workloads.append(
            measured | {"model": f"{model}, random weights" if model in SHAPES else spec.model}
        )
    return workloads


def measure_workload(
    workload: Workload,
    spec: EncodingSpec,
    arguments: argparse.Namespace,
    scratch: Path,
    onnx_file: Path,
) -> Document:
    """Measure every side; one that cannot take part is a row with the reason."""
    spec = replace(spec, max_length=workload.max_length)
    space = spec.resolve()
    texts = workload.texts
    lengths = token_lengths(space, texts)
    large = None
    with ExitStack() as stack:
        pilot = texts[:: max(1, len(texts) // _PILOT_TEXTS)]
        setting = Setting(
            space, peer_folder(space, scratch / "model"), onnx_file, arguments.device, pilot
        )
        sides = [
            open_peer(name, setting, stack) for name in dict.fromkeys([REFERENCE, *arguments.peers])
        ]
        opened = [
            open_pool(precision, spec, arguments.device, texts, stack)
            for precision in arguments.precisions
        ]
        sides += [side for side, _ in opened]
        pools = [(side, call) for side, call in opened if call is not None]
        if pools:
            sides.append(run_side(pools[0][1], workload, scratch))
        take_rounds(sides, texts, arguments.rounds)
        for side, call in pools:
            side.facts |= call.ratios()
        rows = row_documents(sides)
        if pools and workload.name == "short":
            large = _large_call(pools[0][1], arguments)
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
        document["ratios"] = [
            ours / theirs for ours, theirs in zip(side.rates, reference.rates, strict=True)
        ]
        document["ratio"] = statistics.median(document["ratios"])
        document["ratio_to"] = {
            peer.name: statistics.median(a / b for a, b in zip(side.rates, peer.rates, strict=True))
            for peer in present
            if peer.kind == "peer" and peer is not side
        }
        if "cold_texts_per_second" in document:
            document["cold_share"] = (
                document["cold_texts_per_second"] / document["texts_per_second"]
            )
        if side.vectors is not None:
            cosine = cosines(side.vectors, reference.vectors)
            document |= {"lowest_cosine": float(cosine.min()), "mean_cosine": float(cosine.mean())}
        if idle := document.pop("idle_ratios", None):
            document["worker_idle_ratio"] = statistics.median(idle)
        documents.append(document)
    return documents


def cosines(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Cosine of each row of one [n, d] matrix to the same row of the other."""
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    return np.einsum("ij,ij->i", ours, theirs) / (
        np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    )


def _large_call(call: PoolCall, arguments: argparse.Namespace) -> Document:
    """One call as large as a SuperBatch: its padding, and the workers' idle time."""
    say(f"  one call of {arguments.superbatch:,} texts")
    texts = short_workload(arguments.superbatch, arguments.seed + 1).texts
    large = PoolCall(call.pool, texts)
    try:
        begun = time.perf_counter()
        large.encode(texts)
        rate = len(texts) / (time.perf_counter() - begun)
        return {"texts": len(texts), "texts_per_second": rate} | large.ratios()
    finally:
        large.close()


def main() -> None:
    parser = command_line(__doc__)
    add, quick = parser.add_argument, add_quick(parser)
    texts = 60 if quick else None
    add(
        "--texts",
        type=int,
        default=texts,
        help="short texts (600; 200,000 on a GPU); of the long ones a tenth",
    )
    add("--rounds", type=int, default=1 if quick else 3, help="times that the sides take turns (3)")
    add("--seed", type=int, default=0, help="of every draw")
    add("--inputs", type=names_of(INPUTS), default=list(INPUTS), help=f"of {','.join(INPUTS)}")
    add("--peers", type=names_of(PEERS), default=list(PEERS), help=f"of {','.join(PEERS)}")
    add("--precisions", type=names_of(PRECISIONS), help=f"of {','.join(PRECISIONS)}")
    add(
        "--models",
        type=names_of(("default", *SHAPES)),
        help=f"of default,{','.join(SHAPES)} (random weights)",
    )
    add(
        "--superbatch",
        type=int,
        default=200 if quick else 100_000,
        help="texts of the one large call (100,000)",
    )
    arguments = parser.parse_args()
    arguments.device = "cuda:0" if torch.cuda.is_available() else "cpu"
    is_cpu = arguments.device == "cpu"
    arguments.texts = arguments.texts or (600 if is_cpu else 200_000)
    arguments.models = arguments.models or (["default"] if is_cpu else ["default", *SHAPES])
    arguments.precisions = arguments.precisions or (
        ["fp32", "bf16"] if is_cpu else ["fp16", "bf16", "fp32"]
    )
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)
    document = measure(arguments)
    print_document(document, lines(document), targets(document))
    sys.exit(1 if document["slower_than_sentence_transformers"] else 0)


if __name__ == "__main__":
    main()
