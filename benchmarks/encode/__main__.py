"""This engine compared with sentence-transformers and others: texts per second, fidelity, and what
a call and a start cost.

    python -m benchmarks.encode [--texts 600] [--rounds 3] [--inputs demo,short,long] [--quick]

The sides take turns on the same texts, round by round. What counts is the ratio of two sides within
a round, and the median of these over the rounds, because the speed of a shared machine changes. All
vectors are compared with those of fp32 sentence-transformers.
"""

from __future__ import annotations

import argparse
import logging
import os
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.encode.costs import call_cost_document, start_cost_document
from benchmarks.encode.inputs import (
    INPUTS,
    Workload,
    draw_workload,
    short_workload,
    token_lengths,
)
from benchmarks.encode.peers import Setting, peer_folder
from benchmarks.encode.report import lines, targets
from benchmarks.encode.sides import (
    PEERS,
    REFERENCE,
    PoolCall,
    Side,
    open_peer,
    open_pool,
    run_side,
)
from benchmarks.harness import (
    Document,
    Options,
    in_turns,
    median_ratio,
    print_document,
    say,
    seconds_of,
    start_document,
    temporary_folder,
)
from surge_dagster import EncodingSpec

_PRECISIONS = ("fp32", "bf16")
_LIBRARIES = (
    "torch",
    "sentence-transformers",
    "transformers",
    "tokenizers",
    "openvino",
    "pyarrow",
    "numpy",
    "onnxruntime",
    "daft",
)
_PILOT_TEXTS = 200


def measure_workload(workload: Workload, arguments: argparse.Namespace, scratch: Path) -> Document:
    """Measure every side; one that cannot take part is a row with the reason."""
    spec = EncodingSpec(max_length=workload.max_length)
    space = spec.resolve()
    texts = workload.texts
    measured: Document = {
        "input": workload.name,
        "texts": len(texts),
        "mean_tokens": float(token_lengths(space, texts).mean()),
        "superbatch": None,
    }
    pilot = texts[:: max(1, len(texts) // _PILOT_TEXTS)]
    setting = Setting(space, peer_folder(space, scratch / "model"), pilot)
    with ExitStack() as stack:
        peers = dict.fromkeys([REFERENCE, *arguments.peers])
        sides = [open_peer(name, setting, stack) for name in peers]
        calls: list[PoolCall] = []
        for precision in arguments.precisions:
            side, call = open_pool(precision, spec, texts, stack)
            sides.append(side)
            if call is not None:
                calls.append(call)
        if calls:
            sides.append(run_side(calls[0], workload, scratch))
        turns = {side.name: partial(side.take_turn, texts) for side in sides if not side.missing}
        in_turns(turns, arguments.rounds)
        measured["rows"] = row_documents(sides)
        if calls and workload.name == "short":
            measured["superbatch"] = measure_large_call(calls[0], arguments)
    return measured


def row_documents(sides: list[Side]) -> list[Document]:
    """Return a document per side: medians over the rounds, ratios within them, fidelity of the
    vectors."""
    named = {side.name: side for side in sides}
    reference = named[REFERENCE]
    if reference.vectors is None:
        raise RuntimeError(f"{REFERENCE} cannot take part: {reference.missing}")
    documents = []
    for side in sides:
        document = {"side": side.name, "kind": side.kind, **side.facts}
        documents.append(document)
        if side.missing:
            document["missing"] = side.missing
            continue
        pairs = zip(side.rates, reference.rates, strict=True)
        document["ratios"] = [ours / theirs for ours, theirs in pairs]
        document["ratio"] = median(document["ratios"])
        document["texts_per_second"] = median(side.rates)
        if side.vectors is not None:
            document["lowest_cosine"] = lowest_cosine(side.vectors, reference.vectors)
        if side.kind == "pool":
            cold = document["cold_texts_per_second"]
            document["cold_share"] = cold / document["texts_per_second"]
            products = named.get(f"products-{document['precision']}")
            if products is not None and not products.missing:
                document["share_of_products"] = median_ratio(side.rates, products.rates)
        if "idle_ratios" in document:
            document["worker_idle_ratio"] = median(document["idle_ratios"])
    return documents


def lowest_cosine(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the lowest cosine of a row of one [n, d] matrix to the same row of the other."""
    ours = ours.astype(np.float64)
    theirs = theirs.astype(np.float64)
    products = np.einsum("ij,ij->i", ours, theirs)
    norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    return float((products / norms).min())


def measure_large_call(call: PoolCall, arguments: argparse.Namespace) -> Document:
    """Measure one call as large as a SuperBatch: its padding, and the workers' idle time."""
    count = arguments.superbatch
    say(f"  one call of {count:,} texts")
    texts = short_workload(count, seed=1).texts
    large = PoolCall(call.pool, texts)
    try:
        seconds = seconds_of(lambda: large.encode(texts))
        return {"texts": count, "texts_per_second": count / seconds} | large.ratios()
    finally:
        large.close()


def main() -> None:
    options = Options(__doc__)
    options.add_size("--texts", 600, 60, "short texts; of the long ones a tenth")
    options.add_size("--rounds", 3, 1, "times that the sides take turns")
    options.add_names("--inputs", INPUTS)
    options.add_names("--peers", PEERS)
    options.add_names("--precisions", _PRECISIONS)
    options.add_size("--superbatch", 100_000, 200, "texts of the one large call")
    arguments = options.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)

    document = start_document("encode", arguments, _LIBRARIES)
    document["workloads"] = []
    for name in arguments.inputs:
        say(f"{name}: drawing texts")
        with temporary_folder() as folder:
            workload = draw_workload(name, arguments.texts, folder)
            document["workloads"].append(measure_workload(workload, arguments, folder))
    document["call_cost"] = call_cost_document(arguments.quick)
    document["start"] = start_cost_document(1 if arguments.quick else 5)
    print_document(document, lines, targets)


if __name__ == "__main__":
    main()
