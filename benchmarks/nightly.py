"""What a night costs that changes little: an incremental run compared with the full run.

    python -m benchmarks.nightly [--partitions 500] [--rows 400] [--model hash://384] [--quick]

A full run embeds a catalog of short texts. Then one percent of the rows of each partition changes
(texts are edited, rows are inserted, deleted and moved), and a second run follows. A tenth of the
catalog is embedded as it is, and with 13 % of its texts being copies of others in their partition.
These runs alternate, each time in new outputs.

An aim is compared with the median of the ratios of the rounds, so that a machine whose speed
changes does not decide.
"""

from __future__ import annotations

import argparse
import random
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import (
    Document,
    Options,
    Target,
    at_most,
    in_turns,
    median_ratio,
    print_document,
    start_document,
    temporary_folder,
)
from benchmarks.paced_runs import drawn_texts, embed
from surge_dagster import EncoderPool, EncodingSpec, open_source, open_store
from surge_dagster.engine.run.change_feed import ChangeFeed

_CHANGED_SHARE = 0.01
_COPIED_SHARE = 0.13
_EDITS = ("edit", "insert", "delete", "move")

Rows = list[tuple[str, str]]
Catalog = dict[str, Rows]


def measure(arguments: argparse.Namespace, folder: Path) -> dict[str, list[Document]]:
    """Return the reports of each kind of run, a report per round."""
    chance = random.Random(0)
    catalog, spare = draw_catalog(arguments.partitions, arguments.rows)
    part = dict(list(catalog.items())[: max(2, arguments.partitions // 10)])
    copied = {key: with_copies(rows, chance) for key, rows in part.items()}
    write(folder / "distinct", part)
    write(folder / "copies", copied)
    write(folder / "before", catalog)
    for rows in catalog.values():
        change(rows, spare, chance)
    write(folder / "after", catalog)

    with EncoderPool(EncodingSpec(arguments.model)) as pool:

        def embed_anew(name: str) -> Document:
            shutil.rmtree(folder / "out", ignore_errors=True)
            return embed_catalog(pool, folder / name, folder / "out")

        def full_and_incremental() -> Document:
            full = embed_anew("before")
            return {
                "full": full,
                "incremental": embed_catalog(pool, folder / "after", folder / "out"),
            }

        sides = {
            "both": full_and_incremental,
            "distinct": partial(embed_anew, "distinct"),
            "copies": partial(embed_anew, "copies"),
        }
        runs = in_turns(sides, arguments.rounds)
    for pair in runs.pop("both"):
        for name, report in pair.items():
            runs.setdefault(name, []).append(report)
    return runs


def embed_catalog(pool: EncoderPool, catalog: Path, output: Path) -> Document:
    """Run as the command and Dagster do, and return the report."""
    changes = ChangeFeed(always=False)
    report = embed(pool, open_source(catalog), open_store(output), learns=True, change_feed=changes)
    sizes = [path.stat().st_size for path in output.rglob("*") if path.is_file()]
    return report.as_dict() | {"output_bytes": sum(sizes)}


def draw_catalog(partitions: int, rows: int) -> tuple[Catalog, list[str]]:
    """Return partitions of short texts, and texts that no partition has."""
    count = partitions * rows
    texts = drawn_texts(count + count // 10).to_pylist()
    catalog: Catalog = {}
    for number in range(partitions):
        own = texts[number * rows : (number + 1) * rows]
        catalog[f"part-{number}"] = [(f"{number}-{row}", text) for row, text in enumerate(own)]
    return catalog, texts[count:]


def change(rows: Rows, spare: list[str], chance: random.Random) -> None:
    """Change some rows in place, by each kind of edit in turn."""
    for number in range(max(1, round(_CHANGED_SHARE * len(rows)))):
        place = chance.randrange(len(rows))
        edit = _EDITS[number % len(_EDITS)]
        if edit == "edit":
            rows[place] = (rows[place][0], spare.pop())
        elif edit == "insert":
            rows.insert(place, (f"new-{len(spare)}", spare.pop()))
        elif edit == "delete":
            del rows[place]
        else:
            rows.insert(chance.randrange(len(rows)), rows.pop(place))


def with_copies(rows: Rows, chance: random.Random) -> Rows:
    """Return the rows with some texts replaced by others of them, as descriptions within a category
    often are."""
    copies = set(chance.sample(range(len(rows)), round(_COPIED_SHARE * len(rows))))
    originals = [text for place, (_, text) in enumerate(rows) if place not in copies]
    copied = list(rows)
    for place in copies:
        copied[place] = (rows[place][0], chance.choice(originals))
    return copied


def write(folder: Path, catalog: Catalog) -> None:
    for key, rows in catalog.items():
        path = folder / f"partition={key}" / "part-0.parquet"
        path.parent.mkdir(parents=True)
        ids, texts = zip(*rows, strict=True)
        pq.write_table(pa.table({"id": ids, "text": texts}), path)


def lines(document: Document) -> Iterator[str]:
    """Yield a line for each run."""
    yield f"{'run':14}{'encoded':>10}{'reused':>10}{'copies':>9}{'encoder s':>11}{'wall s':>9}"
    for name, reports in document["runs"].items():
        for report in reports:
            yield (
                f"{name:14}{report['texts_encoded']:>10,}{report['rows_reused']:>10,}"
                f"{report['texts_deduplicated']:>9,}"
                f"{report['encode_seconds']:>11.2f}{report['wall_seconds']:>9.2f}"
            )


def targets(document: Document) -> Iterator[Target]:
    """Yield the aims."""
    runs = document["runs"]

    def ratio(metric: str, run: str, other_run: str) -> float:
        ours = [report[metric] for report in runs[run]]
        theirs = [report[metric] for report in runs[other_run]]
        return median_ratio(ours, theirs)

    encoder = ratio("encode_seconds", "incremental", "full")
    yield at_most("encoder seconds of the incremental run, of the full run's", 0.013, encoder)
    wall = ratio("wall_seconds", "incremental", "full")
    yield at_most("wall seconds of the incremental run, of the full run's", 1 / 30, wall)
    disk = ratio("output_bytes", "incremental", "full")
    yield at_most("bytes on disk after it, of those after the full run", 1.02, disk)
    saved = 1 - ratio("encode_seconds", "copies", "distinct")
    yield Target("encoder seconds saved if 13 % of the texts are copies", 0.12, saved)


def main() -> None:
    options = Options(__doc__)
    options.add_size("--partitions", 500, 3, "of the catalog")
    options.add_size("--rows", 400, 100, "of each partition")
    options.add_size("--rounds", 3, 1, "of runs")
    options.add_argument("--model", default=EncodingSpec().model, help="(%(default)s)")
    arguments = options.parse_args()
    document = start_document("nightly", arguments, ("pyarrow", "torch", "openvino"))
    with temporary_folder() as folder:
        document["runs"] = measure(arguments, folder)
    print_document(document, lines, targets)


if __name__ == "__main__":
    main()
