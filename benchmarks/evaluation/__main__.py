"""Measures the tables and figures of the paper at this machine's scale, and writes
docs/evaluation.md.

    python -m benchmarks.evaluation [--scale eval|full] [--only packing,scaling] [--render]

What was measured is kept in docs/evaluation.json; experiments that are left out keep their rows
there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.evaluation.aims import aims
from benchmarks.evaluation.charts import draw
from benchmarks.evaluation.experiments import EXPERIMENTS
from benchmarks.evaluation.page import render, rows_of
from benchmarks.evaluation.scales import SCALES
from benchmarks.harness import Document, Options, aim_lines, say, start_document

_DOCUMENT = Path(__file__).parents[2] / "docs" / "evaluation.json"
_LIBRARIES = ("numpy", "pyarrow", "sentence-transformers", "torch", "openvino")


def measure(arguments: argparse.Namespace, before: Document) -> Iterator[Document]:
    """Run the requested experiments, and yield the document after each, with the rows of the others
    as they were.

    Rows of another machine or of other libraries are dropped.
    """
    document = start_document("evaluation", argparse.Namespace(), _LIBRARIES)
    kept: Document = {}
    if before and _environment(before) == _environment(document):
        kept = before["experiments"]
    document["experiments"] = kept
    for name in arguments.only:
        say(name)
        kept[name] = {
            "scale": arguments.scale,
            "date": datetime.now(UTC).date().isoformat(),
            "rows": list(EXPERIMENTS[name](SCALES[arguments.scale])),
        }
        yield document


def _environment(document: Document) -> Document:
    return document["machine"] | document["versions"] | {"load_average": None}


def write(document: Document, path: Path) -> None:
    """Write a document, its page and its charts."""
    path.write_text(json.dumps(document, indent=1) + "\n")
    path.with_suffix(".md").write_text(render(document))
    draw(rows_of(document), path.parent / "images")


def main() -> None:
    options = Options(__doc__)
    options.add_argument("--scale", choices=SCALES, default="eval", help="of the sizes (eval)")
    options.add_names("--only", EXPERIMENTS)
    options.add_argument(
        "--document",
        type=Path,
        default=_DOCUMENT,
        help="where it is written, with page and charts (docs/evaluation.json)",
    )
    options.add_argument("--render", action="store_true", help="write the page, measure nothing")
    arguments = options.parse_args()
    if arguments.quick:
        arguments.scale = "tiny"
    path = arguments.document
    before = json.loads(path.read_text()) if path.exists() else {}
    document = before
    # Written after each experiment, so that an interrupted evaluation goes on with --only.
    for document in [before] if arguments.render else measure(arguments, before):
        write(document, path)
    print(*aim_lines(aims(rows_of(document))), sep="\n")


if __name__ == "__main__":
    main()
