"""Measures the tables and figures of the paper at this machine's scale, and writes
docs/evaluation.md.

    python -m benchmarks.evaluation [--scale eval|full] [--only packing,scaling] [--render]

What was measured is kept in docs/evaluation.json; experiments that are left out keep their rows
there.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.evaluation.aims import aims
from benchmarks.evaluation.charts import draw
from benchmarks.evaluation.experiments import EXPERIMENTS
from benchmarks.evaluation.page import render, rows_of
from benchmarks.evaluation.scales import SCALES
from benchmarks.harness import Document, aim_lines, command_line, names_of, say, start_document

DOCUMENT = Path(__file__).parents[2] / "docs" / "evaluation.json"
_LIBRARIES = ("numpy", "pyarrow", "sentence-transformers", "torch", "openvino")


def measure(arguments: argparse.Namespace, before: Document) -> Iterator[Document]:
    """Run the requested experiments; gives the document after each, with the rows of the others as
    they were.

    Rows of another machine or of other libraries are dropped.
    """
    document = start_document("evaluation", argparse.Namespace(), _LIBRARIES)
    kept = before["experiments"] if _measured_with(before) == _measured_with(document) else {}
    document["experiments"] = {
        name: experiment for name, experiment in kept.items() if name in EXPERIMENTS
    }
    for name in arguments.only:
        say(name)
        load, begun = os.getloadavg()[0], time.perf_counter()
        rows = list(EXPERIMENTS[name](SCALES[arguments.scale]))
        document["experiments"][name] = {
            "scale": arguments.scale,
            "date": datetime.now(UTC).date().isoformat(),
            "load_average": load,
            "seconds": time.perf_counter() - begun,
            "rows": rows,
        }
        yield document


def _measured_with(document: Document) -> Any:
    return document and ({**document["machine"], "load_average": None}, document["versions"])


def write(document: Document, path: Path) -> None:
    """Write a document, its page and its charts."""
    path.write_text(json.dumps(document, indent=1) + "\n")
    path.with_suffix(".md").write_text(render(document))
    draw(rows_of(document), path.parent / "images")


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument(
        "--scale", choices=SCALES, default="eval", help="sizes of the experiments (eval)"
    )
    parser.add_argument(
        "--only", type=names_of(EXPERIMENTS), default=list(EXPERIMENTS), help=",".join(EXPERIMENTS)
    )
    parser.add_argument(
        "--document",
        type=Path,
        default=DOCUMENT,
        help="where it is written, with page and charts (docs/evaluation.json)",
    )
    parser.add_argument(
        "--render", action="store_true", help="write the page of the document, and measure nothing"
    )
    arguments = parser.parse_args()
    document = before = (
        json.loads(arguments.document.read_text()) if arguments.document.exists() else {}
    )
    for document in [before] if arguments.render else measure(arguments, before):
        # after each experiment: an interrupted evaluation goes on with --only
        write(document, arguments.document)
    for line in aim_lines(aims(rows_of(document))):
        print(line)


if __name__ == "__main__":
    main()
