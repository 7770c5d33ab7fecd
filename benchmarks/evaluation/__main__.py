"""Measures the tables and figures of the paper at this machine's scale, and writes docs/evaluation.md.

    python -m benchmarks.evaluation [--scale eval|full] [--only packing,scaling] [--render]

What was measured is kept in docs/evaluation.json; experiments that are left out keep their rows there.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.evaluation.aims import aims
from benchmarks.evaluation.charts import draw
from benchmarks.evaluation.experiments import EXPERIMENTS
from benchmarks.evaluation.page import DOCUMENT, IMAGES, render, rows_of
from benchmarks.evaluation.scales import SCALES
from benchmarks.harness import Document, aim_lines, names_of, say, start_document

_LIBRARIES = ("numpy", "pyarrow", "sentence-transformers", "torch", "openvino")


def measure(arguments: argparse.Namespace, before: Document) -> Iterator[Document]:
    """Run the requested experiments; gives the document after each, with the rows of the others as they were."""
    scale = SCALES[arguments.scale]
    settings = argparse.Namespace(scale=arguments.scale)
    document = start_document("evaluation", settings, _LIBRARIES) | {"date": datetime.now(UTC).date().isoformat()}
    is_same = before.get("settings") == document["settings"]
    document["experiments"] = dict(before["experiments"]) if is_same else {}
    for name in arguments.only:
        say(name)
        begun = time.perf_counter()
        rows = [asdict(row) for row in EXPERIMENTS[name](scale)]
        document["experiments"][name] = {"seconds": time.perf_counter() - begun, "rows": rows}
        yield document


def write(document: Document, path: Path) -> None:
    """Write a document, its page and its charts."""
    path.write_text(json.dumps(document, indent=1) + "\n")
    path.with_suffix(".md").write_text(render(document))
    draw(rows_of(document), path.parent / IMAGES.name)


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=SCALES, default="eval", help="sizes of the experiments (eval)")
    parser.add_argument("--only", type=names_of(EXPERIMENTS), default=list(EXPERIMENTS), help=",".join(EXPERIMENTS))
    parser.add_argument(
        "--document", type=Path, default=DOCUMENT, help="page and charts beside it (docs/evaluation.json)"
    )
    parser.add_argument("--render", action="store_true", help="write the page of the document, and measure nothing")
    arguments = parser.parse_args()
    document = before = json.loads(arguments.document.read_text()) if arguments.document.exists() else {}
    for document in [before] if arguments.render else measure(arguments, before):
        write(document, arguments.document)  # after each experiment: an interrupted evaluation goes on with --only
    for line in aim_lines(aims(rows_of(document))):
        print(line)


if __name__ == "__main__":
    main()
