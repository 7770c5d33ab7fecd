"""This engine beside sentence-transformers and others: texts per second, fidelity, and what a call and a start cost.

    python -m benchmarks.encode [--texts 600] [--rounds 3] [--inputs demo,short,long] [--quick]

Prints a table and, as the last line of standard output, one JSON document; docs/benchmarks.md explains it.
Exits with 1 when the pool is slower than sentence-transformers.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path

from benchmarks.encode_report import lines, targets
from benchmarks.encode_rounds import Plan, measure_workload
from benchmarks.encode_sides import PEERS
from benchmarks.fixed_costs import call_cost_document, start_cost_document
from benchmarks.harness import Document, names_of, print_document, say, start_document
from benchmarks.inputs import INPUTS, draw_workload
from benchmarks.shapes import SHAPES, write_model
from surge_dagster.engine.model.spec import EncodingSpec

PRECISIONS = ("fp32", "fp16", "bf16")
_LIBRARIES = (
    *("torch", "sentence-transformers", "transformers", "tokenizers", "openvino", "pyarrow", "numpy"),
    *("onnxruntime", "daft", "flash-attn"),
)


def measure(arguments: argparse.Namespace) -> Document:
    """Run everything that was requested and give the document."""
    device, gpu = _device()
    on_cpu, quick = device == "cpu", arguments.quick
    texts = arguments.texts or (60 if quick else 600 if on_cpu else 200_000)
    plan = Plan(
        device=device,
        peers=list(dict.fromkeys(["sentence-transformers", *arguments.peers])),
        precisions=arguments.precisions or (["fp32", "bf16"] if on_cpu else ["fp16", "bf16", "fp32"]),
        rounds=arguments.rounds or (1 if quick else 3),
        superbatch=arguments.superbatch or (200 if quick else 100_000),
        seed=arguments.seed,
    )
    document = start_document("encode", arguments, _LIBRARIES) | {"device": device, "gpu": gpu}
    models = arguments.models or (["default"] if on_cpu else ["default", *SHAPES])
    scratch = Path(tempfile.mkdtemp(prefix="surge-bench-"))
    try:
        document["workloads"] = [
            workload for model in models for workload in _measure_model(model, arguments.inputs, texts, plan, scratch)
        ]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    document["call_cost"] = call_cost_document(quick)
    document["start"] = start_cost_document(EncodingSpec(), device, 1 if quick else 5)
    return document | {"slower_than_sentence_transformers": slower(document)}


def slower(document: Document) -> bool:
    """Whether the pool, at its first precision, lost to sentence-transformers on any workload."""
    for workload in document["workloads"]:
        pools = [row for row in workload["rows"] if row["kind"] == "pool" and "missing" not in row]
        if pools and pools[0]["ratio"] < 1:
            return True
    return False


def _measure_model(model: str, inputs: list[str], texts: int, plan: Plan, scratch: Path) -> list[Document]:
    """Every input with one model; a shape that is ten times as large gets an eighth of the texts."""
    folder = scratch / model
    folder.mkdir()
    spec = EncodingSpec() if model == "default" else EncodingSpec(write_model(model, folder))
    found = []
    for name in inputs:
        say(f"{model}, {name}: drawing texts")
        amount = texts if model == "default" else max(20, texts // 8)
        workload = draw_workload(name, amount, plan.seed, spec, folder)
        (folder / name).mkdir()
        measured = measure_workload(workload, spec, plan, folder / name, folder / "model.onnx")
        found.append(measured | {"model": f"{model}, random weights" if model in SHAPES else spec.model})
    return found


def _device() -> tuple[str, str | None]:
    import torch

    if torch.cuda.is_available():
        return "cuda:0", torch.cuda.get_device_name(0)
    return "cpu", None


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--texts", type=int, help="texts of a short workload (600; 200,000 on a GPU); the long mix gets a tenth")
    add("--rounds", type=int, help="times that the sides take turns (3)")
    add("--seed", type=int, default=0, help="of every draw")
    add("--inputs", type=names_of(INPUTS), default=list(INPUTS), help=f"of {','.join(INPUTS)}")
    add("--peers", type=names_of(PEERS), default=list(PEERS), help=f"of {','.join(PEERS)}")
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
    print_document(document, lines(document), targets(document))
    sys.exit(1 if document["slower_than_sentence_transformers"] else 0)


if __name__ == "__main__":
    main()
