"""This engine beside sentence-transformers and others: texts per second, fidelity, and what a call and a start cost.

    python -m benchmarks.encode [--texts 600] [--rounds 3] [--inputs demo,short,long] [--quick]

Prints a table and, as the last line of standard output, one JSON document. Every figure is a ratio to peers in the same
run, with the lowest and the mean cosine to fp32 sentence-transformers beside it; docs/benchmarks.md says what each one
means. Exits with 1 when the pool is slower than sentence-transformers, and for no other figure.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.arguments import names_of
from benchmarks.call_cost import call_cost_document
from benchmarks.environment import library_versions, machine_facts
from benchmarks.inputs import INPUTS, Workload, demo_workload, load_tokenizer, long_workload, short_workload
from benchmarks.rounds import say
from benchmarks.shapes import SHAPES, write_model
from benchmarks.start_cost import start_document
from benchmarks.table import lines
from benchmarks.targets import targets
from benchmarks.throughput import PEERS, Plan, measure_workload
from surge_dagster.engine.model.spec import EncodingSpec

PRECISIONS = ("fp32", "fp16", "bf16")
_LIBRARIES = (
    *("torch", "sentence-transformers", "transformers", "tokenizers", "openvino", "pyarrow", "numpy"),
    *("onnxruntime", "fastembed", "daft", "flash-attn"),
)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run everything that was asked for and give the document."""
    device, gpu = _device()
    quick: bool = arguments.quick
    texts = arguments.texts or (60 if quick else 600 if device == "cpu" else 200_000)
    precisions = arguments.precisions or (["fp32", "bf16"] if device == "cpu" else ["fp16", "bf16", "fp32"])
    plan = Plan(
        device=device,
        peers=list(dict.fromkeys(["sentence-transformers", *arguments.peers])),
        precisions=precisions,
        rounds=arguments.rounds or (1 if quick else 3),
        superbatch=arguments.superbatch or (200 if quick else 100_000),
        seed=arguments.seed,
    )
    scratch = Path(tempfile.mkdtemp(prefix="surge-bench-"))
    try:
        workloads = [
            found
            for model in arguments.models or (["default"] if device == "cpu" else ["default", *SHAPES])
            for found in _model_workloads(model, arguments.inputs, texts, plan, scratch)
        ]
        say("fixed cost of a call")
        call = call_cost_document(quick)
        say("start")
        start = start_document(EncodingSpec(), device, 1 if quick else 5)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    document: dict[str, Any] = {
        "benchmark": "encode",
        "machine": machine_facts(device, gpu),
        "versions": library_versions(_LIBRARIES),
        "settings": {"texts": texts, "rounds": plan.rounds, "seed": plan.seed, "quick": quick},
        "workloads": workloads,
        "call_cost": call,
        "start": start,
    }
    return document | {
        "targets": [aim.as_dict() for aim in targets(document)],
        "slower_than_sentence_transformers": slower(document),
    }


def slower(document: dict[str, Any]) -> bool:
    """Whether the pool, at its first precision, lost to sentence-transformers on any workload."""
    return any(row["ratio"] < 1 for found in document["workloads"] for row in _pool_rows(found)[:1])


def _pool_rows(workload: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for row in workload["rows"] if row["kind"] == "pool" and "missing" not in row]


def _model_workloads(model: str, inputs: list[str], texts: int, plan: Plan, scratch: Path) -> list[dict[str, Any]]:
    folder = scratch / model
    folder.mkdir()
    spec = EncodingSpec() if model == "default" else EncodingSpec(write_model(model, folder))
    found = []
    for name in inputs:
        say(f"{model}, {name}: drawing texts")
        # A model ten times as large gets fewer texts, and a long text has as many tokens as ten short ones.
        amount = texts if model == "default" else max(20, texts // 8)
        workload = _workload(name, amount, plan.seed, spec, folder)
        here = folder / name
        here.mkdir()
        document = measure_workload(workload, spec, plan, here, folder / "model.onnx")
        found.append(document | {"model": model if model in SHAPES else spec.model, "random_weights": model in SHAPES})
    return found


def _workload(name: str, texts: int, seed: int, spec: EncodingSpec, folder: Path) -> Workload:
    if name == "demo":
        return demo_workload(folder / "catalog", texts, seed)
    if name == "short":
        return short_workload(texts, seed)
    return long_workload(max(20, texts // 10), seed, load_tokenizer(spec.resolve()))


def _device() -> tuple[str, str | None]:
    import torch

    if torch.cuda.is_available():
        return "cuda:0", torch.cuda.get_device_name(0)
    return "cpu", None


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--texts", type=int, help="texts of a short workload (1,500; 200,000 on a GPU); long ones get a tenth")
    add("--rounds", type=int, help="times that the sides take turns (3)")
    add("--seed", type=int, default=0, help="of every draw")
    add("--inputs", type=names_of(INPUTS), default=list(INPUTS), help=f"of {','.join(INPUTS)}")
    add("--peers", type=names_of(tuple(PEERS)), default=list(PEERS), help=f"of {','.join(PEERS)}")
    add("--precisions", type=names_of(PRECISIONS), help=f"of {','.join(PRECISIONS)}")
    add("--models", type=names_of(("default", *SHAPES)), help=f"of default,{','.join(SHAPES)} (random weights)")
    add("--superbatch", type=int, help="texts of the one large call (100,000)")
    add("--quick", action="store_true", help="tiny sizes: shows that everything runs, measures nothing")
    return parser.parse_args(words)


def main() -> None:
    """Parse, measure, print."""
    arguments = parse()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.getLogger("sentence_transformers").setLevel(logging.ERROR)
    document = measure(arguments)
    print("\n".join(lines(document, targets(document))))
    print(json.dumps(document))
    sys.exit(1 if document["slower_than_sentence_transformers"] else 0)


if __name__ == "__main__":
    main()
