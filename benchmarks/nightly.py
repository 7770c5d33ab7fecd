"""What a refresh costs after few changes: an incremental run beside the full run, and identical texts encoded once.

    python -m benchmarks.nightly [--partitions 500] [--rows 400] [--pairs 3] [--model hash://384]

A full run embeds a catalog of short texts. Then one percent of the rows of each partition changes (texts are edited,
rows are inserted, deleted and moved), and a second run follows. A catalog in which 13 % of the texts are copies of
others in their partition is embedded twice: with and without looking for equal texts. These pairs of runs alternate,
each pair in new outputs, and an aim is compared with the median of its pairs' ratios, so that a machine that becomes
slower or faster meanwhile does not decide. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import Document, Target, at_most, print_document, say, start_document
from surge_dagster.catalogs.synthetic import draw_texts
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.run import superbatch_call
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.report import RunReport
from surge_dagster.engine.store import open_store
from surge_dagster.engine.tables.opening import open_source

AIM_ENCODER_SHARE, AIM_WALL_SHARE, AIM_BYTES, AIM_SAVED = 0.013, 1 / 30, 1.02, 0.12
CHANGED_SHARE, COPIED_SHARE = 0.01, 0.13
_EDITS = ("edit", "insert", "delete", "move")

Rows = list[tuple[str, str]]


def measure(arguments: argparse.Namespace) -> Document:
    """Embed, change, embed again, and give the document."""
    document = start_document("nightly", arguments, ("pyarrow", "torch", "openvino"))
    chance = random.Random(arguments.seed)
    count = arguments.partitions * arguments.rows
    texts = draw_texts(arguments.seed, 1, np.arange(count + count // 10, dtype=np.uint64)).to_pylist()
    spare = texts[count:]
    catalog = {
        f"part-{number}": [(f"{number}-{row}", texts[number * arguments.rows + row]) for row in range(arguments.rows)]
        for number in range(arguments.partitions)
    }
    some = list(catalog.items())[: max(2, arguments.partitions // 10)]
    with tempfile.TemporaryDirectory(prefix="surge-bench-") as name, EncoderPool(EncodingSpec(arguments.model)) as pool:
        pool.start()
        folder = Path(name)
        _write(folder / "copies", {key: _with_copies(rows, chance) for key, rows in some})
        _write(folder / "before", catalog)
        for rows in catalog.values():
            _change(rows, max(1, round(CHANGED_SHARE * len(rows))), spare, chance)
        _write(folder / "after", catalog)
        runs = [_pair(pool, folder, number) for number in range(arguments.pairs)]
    return document | {"pairs": runs}


def _pair(pool: EncoderPool, folder: Path, number: int) -> Document:
    """One run of each kind, by name, in new outputs."""
    say(f"pair {number + 1}")
    runs: Document = {}

    def embed(name: str, catalog: str, output: str) -> None:
        report = _embed(pool, folder / catalog, folder / output, name)
        runs[name] = asdict(report) | {"partitions_failed": [], "output_bytes": _bytes(folder / output)}

    def embed_each() -> None:
        with patch.object(superbatch_call, "_distinct", lambda slot, rows, ledger: (rows, *2 * [np.empty(0, np.intp)])):
            embed("each", "copies", "out-each")

    embed("full", "before", "out")
    embed("incremental", "after", "out")
    if number % 2:
        embed_each()
    embed("once", "copies", "out-once")
    if not number % 2:
        embed_each()
    for output in folder.glob("out*"):
        shutil.rmtree(output)
    return runs


def targets(document: Document) -> list[Target]:
    """The aims beside what was measured."""

    def ratio(metric: str, run: str, beside: str) -> float:
        return median(pair[run][metric] / pair[beside][metric] for pair in document["pairs"])

    return [
        at_most(
            "encoder seconds of the incremental run, of the full run's",
            AIM_ENCODER_SHARE,
            ratio("encode_seconds", "incremental", "full"),
        ),
        at_most(
            "wall seconds of the incremental run, of the full run's",
            AIM_WALL_SHARE,
            ratio("wall_seconds", "incremental", "full"),
        ),
        at_most(
            "bytes on disk after it, of those after the full run",
            AIM_BYTES,
            ratio("output_bytes", "incremental", "full"),
        ),
        Target(
            "encoder seconds saved where 13 % of the texts are copies",
            AIM_SAVED,
            1 - ratio("encode_seconds", "once", "each"),
        ),
    ]


def lines(document: Document) -> Iterator[str]:
    """A table of the runs."""
    yield f"{'run':14}{'encoded':>10}{'reused':>10}{'copies':>9}{'encoder s':>11}{'wall s':>9}{'calls':>7}"
    for pair in document["pairs"]:
        for name, run in pair.items():
            yield (
                f"{name:14}{run['texts_encoded']:>10,}{run['rows_reused']:>10,}{run['texts_deduplicated']:>9,}"
                f"{run['encode_seconds']:>11.2f}{run['wall_seconds']:>9.2f}{run['superbatches']:>7}"
            )


def _embed(pool: EncoderPool, catalog: Path, output: Path, what: str) -> RunReport:
    say(f"  {what}")
    run = EmbeddingRun(open_source(catalog), open_store(output), pool)
    for _ in run:
        pass
    if run.failed:
        raise SystemExit(f"{what} failed: {run.report.partitions_failed[0].reason}")
    return run.report


def _change(rows: Rows, count: int, spare: list[str], chance: random.Random) -> None:
    """Change some rows in place, by each kind of edit in turn."""
    for number in range(count):
        place = chance.randrange(len(rows))
        edit = _EDITS[number % len(_EDITS)]
        if edit == "edit":
            rows[place] = rows[place][0], spare.pop()
        elif edit == "insert":
            rows.insert(place, (f"new-{len(spare)}", spare.pop()))
        elif edit == "delete":
            del rows[place]
        else:
            rows.insert(chance.randrange(len(rows)), rows.pop(place))


def _with_copies(rows: Rows, chance: random.Random) -> Rows:
    """The rows, in which some of the texts are those of other ones, as descriptions within a category often are."""
    copies = set(chance.sample(range(len(rows)), round(COPIED_SHARE * len(rows))))
    originals = [text for row, (_, text) in enumerate(rows) if row not in copies]
    return [(row_id, chance.choice(originals) if row in copies else text) for row, (row_id, text) in enumerate(rows)]


def _write(folder: Path, catalog: dict[str, Rows]) -> None:
    for key, rows in catalog.items():
        path = folder / f"partition={key}" / "part-0.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"id": [row[0] for row in rows], "text": [row[1] for row in rows]}), path)


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.nightly", description="an incremental run beside the full run"
    )
    parser.add_argument("--partitions", type=int, default=500, help="of the catalog (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=400, help="of each partition (default: %(default)s)")
    parser.add_argument("--pairs", type=int, default=3, help="of runs (default: %(default)s)")
    parser.add_argument("--model", default=EncodingSpec().model, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main() -> None:
    document = measure(parse())
    print_document(document, lines(document), targets(document))


if __name__ == "__main__":
    main()
