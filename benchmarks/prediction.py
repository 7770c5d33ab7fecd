"""Prediction compared with outcome: plan a run, run it, and compare the wall times.

    python -m benchmarks.prediction [--model minilm] [--seconds 25] [--repeats 3]
        [--catalogs short,long,german,code,duplicates,tiny] [--quick]

For each catalog the pool forgets all runs, times the calls of a first start and embeds a part of
the catalog before it in the list. Then the catalog is planned and embedded a few times with default
settings. Its first plan knows the texts of another catalog only, and later ones learn from its own
runs. No plan can be closer than the spread of the repeated runs.

The texts are real ones of this machine:

- short: first paragraphs of docstrings of the installed packages, a partition per package;
- long: their docstrings of at least 400 characters;
- german: German translations (/usr/share/locale/de/LC_MESSAGES/*.mo), a partition per program;
- code: functions of the standard library, a partition per module;
- duplicates: the short texts in five versions, of which each changes a tenth, next to each other;
- tiny: the short texts, a partition per class or module.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import gettext
import random
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain, islice
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa

from benchmarks.encode.inputs import spec_of
from benchmarks.gpu_models import SHAPES
from benchmarks.harness import (
    Document,
    Options,
    Target,
    at_most,
    print_document,
    say,
    start_document,
    temporary_folder,
)
from benchmarks.paced_runs import embed
from surge_dagster import EncoderPool, open_source, open_store, plan
from surge_dagster.catalogs.demo import clear_catalog, first_paragraph, write_partition
from surge_dagster.engine.plan.catalog_sample import token_counter
from surge_dagster.engine.plan.cost_model import store_kind
from surge_dagster.engine.sources.partition import Partition

_FIRST_ERROR = 0.10
_LATER_ERROR = 0.03
_OTHER_SHARE = 0.4  # of the seconds of a run, for the catalog that is embedded before
_LONG_CHARACTERS = 400
_SHORTEST_CHARACTERS = 20
_VERSIONS = 5
_CHANGED = 10  # of so many texts, a version changes one
_SAMPLED_TEXTS = 200
_GERMAN = Path("/usr/share/locale/de/LC_MESSAGES")
_COMPARED = ("wall_seconds", "encode_seconds", "publish_seconds", "tokens", "superbatches")

Rows = Iterator[tuple[str, str]]  # partition and text
_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def short_rows() -> Rows:
    """Yield first paragraphs of docstrings by package."""
    for name, docstring in _docstrings():
        yield name.partition(".")[0], first_paragraph(docstring)


def long_rows() -> Rows:
    """Yield long docstrings by package."""
    for name, docstring in _docstrings():
        if len(docstring) >= _LONG_CHARACTERS:
            yield name.partition(".")[0], docstring


def tiny_rows() -> Rows:
    """Yield first paragraphs of docstrings by class or module."""
    for name, docstring in _docstrings():
        yield name.rpartition(".")[0], first_paragraph(docstring)


def duplicate_rows() -> Rows:
    """Yield first paragraphs of docstrings in some versions."""
    for row, (package, text) in enumerate(short_rows()):
        for version in range(_VERSIONS):
            is_changed = version and (row + version) % _CHANGED == 0
            yield package, f"{text} Since {version}.0." if is_changed else text


def german_rows() -> Rows:
    """Yield German translations by program; none on a machine without them."""
    for path in _scattered(_GERMAN, "*.mo"):
        with path.open("rb") as file, contextlib.suppress(UnicodeDecodeError):
            for key, text in vars(gettext.GNUTranslations(file))["_catalog"].items():
                if key and len(text) >= _SHORTEST_CHARACTERS:
                    yield path.stem, text


def code_rows() -> Rows:
    """Yield functions of the standard library by module."""
    for module, source, node in _definitions("stdlib"):
        if not isinstance(node, ast.ClassDef):
            yield module, "\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno])


_CATALOGS: dict[str, Callable[[], Rows]] = {
    "short": short_rows,
    "long": long_rows,
    "german": german_rows,
    "code": code_rows,
    "duplicates": duplicate_rows,
    "tiny": tiny_rows,
}


def _docstrings() -> Iterator[tuple[str, str]]:
    """Yield docstrings of the installed packages with the names of what they describe."""
    for module, _, node in _definitions("purelib"):
        docstring = ast.get_docstring(node) or ""
        if len(docstring) >= _SHORTEST_CHARACTERS:
            text = docstring.encode("utf-8", "replace").decode("utf-8")
            yield f"{module}.{node.name}", text


@cache
def _scattered(root: Path, pattern: str) -> list[Path]:
    """Return files in an order in which the first ones are a sample of all."""
    paths = sorted(root.glob(pattern))
    random.Random(0).shuffle(paths)
    return paths


def _definitions(place: str) -> Iterator[tuple[str, str, _Definition]]:
    """Yield functions and classes with their modules and these modules' sources.

    Args:
        place: of the modules; a name of `sysconfig`.
    """
    root = Path(sysconfig.get_path(place))
    for path in _scattered(root, "**/*.py"):
        inside = path.relative_to(root)
        if "site-packages" in inside.parts:
            continue
        module = ".".join(inside.with_suffix("").parts)
        try:
            source = path.read_text("utf-8")
            tree = ast.parse(source)
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
        yield from _definitions_in(tree, module, source)


def _definitions_in(node: ast.AST, module: str, source: str) -> Iterator[Any]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Definition):
            yield module, source, child
        if isinstance(child, ast.ClassDef):
            yield from _definitions_in(child, f"{module}.{child.name}", source)


def build_catalog(name: str, folder: Path, pool: EncoderPool, seconds: float) -> list[Partition]:
    """Build a catalog that the pool encodes in some seconds, or a smaller one if this machine has
    no more texts; none without any."""
    rows = _CATALOGS[name]()
    first = list(islice(rows, _SAMPLED_TEXTS))
    if not first:
        return []
    distinct = pa.array({text for _, text in first}, pa.large_string())
    count_tokens, _ = token_counter(pool.space, pool.speed)
    of_sample = pool.speed.seconds(len(distinct), count_tokens(distinct).sum())
    wanted = 1 + int(len(first) * seconds / of_sample)

    texts = defaultdict[str, list[str]](list)
    for key, text in islice(chain(first, rows), wanted):
        texts[key].append(text)
    clear_catalog(folder, "prediction")
    for key in sorted(texts):
        ids = pa.array(map(str, range(len(texts[key]))), pa.string())
        write_partition(folder, key, "v1", [(ids, pa.array(texts[key], pa.string()))])
    return list(open_source(folder))


def measure_catalog(
    name: str, pool: EncoderPool, arguments: argparse.Namespace, folder: Path
) -> Document:
    """Embed another catalog, and then plan and embed this one a few times."""
    names = list(_CATALOGS)
    other = names[names.index(name) - 1]
    pool.measure_speed(anew=True)
    pool.calibration.write(**{f"io {store_kind(open_store(folder / 'output'))}": []})
    before = build_catalog(other, folder / "other", pool, _OTHER_SHARE * arguments.seconds)
    partitions = build_catalog(name, folder / "catalog", pool, arguments.seconds)
    embed(pool, before, open_store(folder / "output-other"), learns=True)

    runs = []
    for number in range(arguments.repeats if partitions else 0):
        store = open_store(folder / f"output-{number}")
        planned = plan(partitions, store, pool)
        report = embed(pool, partitions, store, learns=True)
        runs.append(_compared(planned.as_dict(), report.as_dict()))
    return {"catalog": name, "partitions": len(partitions), "runs": runs}


def _compared(planned: Document, report: Document) -> Document:
    """Return what a plan says of a run, and what the run took."""
    compared = {}
    for name in _COMPARED:
        compared[name] = {"planned": planned[name], "measured": report[name]}
    return compared | {"texts": planned["texts"]}


def lines(document: Document) -> Iterator[str]:
    """Yield the table."""
    yield (
        f"{'catalog':12}{'texts':>8}{'partitions':>12}{'wall s':>8}{'spread':>8}  "
        "errors of each plan: wall, encoding, tokens"
    )
    for case in document["catalogs"]:
        if not case["runs"]:
            yield f"{case['catalog']:12}  this machine has no such texts"
            continue
        walls = _measured(case, "wall_seconds")
        errors = []
        for name in ("wall_seconds", "encode_seconds", "tokens"):
            errors.append(" ".join(f"{error:+6.1%}" for error in errors_of(case, name)))
        yield (
            f"{case['catalog']:12}{case['runs'][0]['texts']:8,}{case['partitions']:12,}"
            f"{fmean(walls):8.1f}{spread_of(case):8.1%}  {' | '.join(errors)}"
        )


def targets(document: Document) -> Iterator[Target]:
    """Yield the aims: 10 % for the first plan of a catalog, and 3 % or the spread of its runs for
    the one after its own run; the planned SuperBatches are those of the runs."""
    for case in document["catalogs"]:
        name = case["catalog"]
        first = later = wrong = None
        aim = _LATER_ERROR
        if case["runs"]:
            errors = errors_of(case, "wall_seconds")
            first = abs(errors[0])
            later = abs(errors[1])
            aim = max(aim, spread_of(case))
            wrong = max(map(abs, errors_of(case, "superbatches")))
        note = "no such texts"
        yield at_most(f"error of the first plan: {name}", _FIRST_ERROR, first, note)
        yield at_most(f"error of the plan after its own run: {name}", round(aim, 4), later, note)
        yield at_most(f"error of the planned SuperBatches: {name}", 0, wrong, note)


def errors_of(case: Document, name: str) -> list[float]:
    """Return how far each plan was from its run, as a share of what was measured."""
    errors = []
    for run in case["runs"]:
        errors.append(run[name]["planned"] / run[name]["measured"] - 1)
    return errors


def spread_of(case: Document) -> float:
    """Return the range of the wall times over their mean."""
    walls = _measured(case, "wall_seconds")
    return (max(walls) - min(walls)) / fmean(walls)


def _measured(case: Document, name: str) -> list[float]:
    return [run[name]["measured"] for run in case["runs"]]


def main() -> None:
    options = Options(__doc__)
    options.add_argument("--model", choices=SHAPES, default="minilm", help="(minilm)")
    options.add_size("--seconds", 25.0, 0.2, "of each run, about")
    options.add_size("--repeats", 3, 2)
    options.add_names("--catalogs", _CATALOGS)
    arguments = options.parse_args()
    libraries = ("openvino", "torch", "sentence-transformers")
    document = start_document("prediction", arguments, libraries)
    document["catalogs"] = []
    with temporary_folder() as folder, EncoderPool(spec_of(arguments.model, folder)) as pool:
        for name in arguments.catalogs:
            say(name)
            document["catalogs"].append(measure_catalog(name, pool, arguments, folder / name))
    print_document(document, lines, targets)


if __name__ == "__main__":
    main()
