"""What a night costs that changes little: an incremental run beside the full run, and tables that
follow the vectors.

    python -m benchmarks.nightly [--scenarios runs,tables] [--partitions 500] [--rows 400] [--model hash://384]

- runs: a full run embeds a catalog of short texts. Then one percent of the rows of each partition
  changes (texts are edited, rows are inserted, deleted and moved), and a second run follows. A
  tenth of the catalog is embedded as it is and with 13 % of its texts being copies of others in
  their partition. These runs alternate, each time in new outputs.
- tables: a first load of a table reads the files with their checksums and writes every row. Beside
  it stands the same client with the same rows in memory: `create_table` of LanceDB, and `COPY` of
  psycopg with pgvector's types. The index of the vectors is not part of either; the primary key is
  part of the load. The disk is flushed before each. Then one percent of the rows of each partition
  is edited, inserted and deleted, embedded, and handed over.

An aim is compared with the median of the ratios of its pairs, so that a machine that becomes slower
or faster meanwhile does not decide. Prints a table and, as the last line of standard output, one
JSON document.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import (
    Document,
    Scenarios,
    Target,
    at_most,
    command_line,
    names_of,
    print_scenarios,
    say,
    seconds_of,
    start_document,
)
from benchmarks.synthetic import draw_texts
from surge_dagster.consumers.comparison import compare
from surge_dagster.consumers.lance import LanceTable
from surge_dagster.consumers.postgres import PgVectorTable
from surge_dagster.consumers.target import Target as Table
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.feed.change_files import ChangeFeed
from surge_dagster.engine.feed.changes import changes
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.plan.calibrating import learning
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.report import RunReport
from surge_dagster.engine.store import open_store
from surge_dagster.engine.tables.opening import open_source

_CHANGED_SHARE, _COPIED_SHARE = 0.01, 0.13
_EDITS = ("edit", "insert", "delete", "move")

Rows = list[tuple[str, str]]
Catalog = dict[str, Rows]


def measure(arguments: argparse.Namespace) -> Document:
    """Run the requested scenarios and give the document."""
    libraries = ("pyarrow", "torch", "openvino", "lancedb", "pgvector", "psycopg")
    document = start_document("nightly", arguments, libraries)
    measures = {"runs": measure_runs, "tables": measure_tables}
    for scenario in arguments.scenarios:
        say(scenario)
        with tempfile.TemporaryDirectory(prefix="surge-bench-") as folder:
            document[scenario] = measures[scenario](arguments, Path(folder))
    return document


def measure_runs(arguments: argparse.Namespace, folder: Path) -> list[Document]:
    """Pairs of runs: a run of each kind by name, in new outputs."""
    chance = random.Random(arguments.seed)
    catalog, spare = _draw_catalog(arguments)
    part = dict(list(catalog.items())[: max(2, arguments.partitions // 10)])
    _write(folder / "distinct", part)
    _write(folder / "copies", {key: _with_copies(rows, chance) for key, rows in part.items()})
    _write(folder / "before", catalog)
    for rows in catalog.values():
        _change(rows, max(1, round(_CHANGED_SHARE * len(rows))), spare, chance)
    _write(folder / "after", catalog)
    pairs = []
    with EncoderPool(EncodingSpec(arguments.model)) as pool:
        for number in range(arguments.pairs):
            say(f"pair {number + 1}")
            runs = [("full", "before", "out"), ("incremental", "after", "out")]
            equal = [("distinct", "distinct", "out-distinct"), ("copies", "copies", "out-copies")]
            runs += reversed(equal) if number % 2 else equal
            pairs.append(
                {name: _measure_run(pool, folder / of, folder / to, name) for name, of, to in runs}
            )
            for output in folder.glob("out*"):
                shutil.rmtree(output)
    return pairs


def _measure_run(pool: EncoderPool, catalog: Path, output: Path, name: str) -> Document:
    say(f"  {name}")
    report = _embed(pool, catalog, output)
    output_bytes = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    return report.as_dict() | {"partitions_failed": [], "output_bytes": output_bytes}


def _embed(pool: EncoderPool, catalog: Path, output: Path, *, changes: bool = False) -> RunReport:
    store = open_store(output)
    run = EmbeddingRun(open_source(catalog), store, pool, observer=ChangeFeed(always=changes))
    for _ in learning(run, pool, store):  # as the command and Dagster run it
        pass
    if run.failed:
        raise SystemExit(f"partitions failed: {run.report.partitions_failed[0].reason}")
    return run.report


def _draw_catalog(arguments: argparse.Namespace) -> tuple[Catalog, list[str]]:
    """Partitions of short texts, and texts that none of them has."""
    rows, count = arguments.rows, arguments.partitions * arguments.rows
    texts = draw_texts(
        arguments.seed, 1, np.arange(count + count // 10, dtype=np.uint64)
    ).to_pylist()
    catalog = {
        f"part-{number}": [(f"{number}-{row}", texts[number * rows + row]) for row in range(rows)]
        for number in range(arguments.partitions)
    }
    return catalog, texts[count:]


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
    """The rows, in which some of the texts are those of other ones, as descriptions within a
    category often are."""
    copies = set(chance.sample(range(len(rows)), round(_COPIED_SHARE * len(rows))))
    originals = [text for row, (_, text) in enumerate(rows) if row not in copies]
    return [
        (row_id, chance.choice(originals) if row in copies else text)
        for row, (row_id, text) in enumerate(rows)
    ]


def _write(folder: Path, catalog: Catalog) -> None:
    for key, rows in catalog.items():
        path = folder / f"partition={key}" / "part-0.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(
            pa.table({"id": [row[0] for row in rows], "text": [row[1] for row in rows]}), path
        )


def run_lines(pairs: list[Document]) -> Iterator[str]:
    yield f"{'run':14}{'encoded':>10}{'reused':>10}{'copies':>9}{'encoder s':>11}{'wall s':>9}{'calls':>7}"
    for pair in pairs:
        for name, run in pair.items():
            yield (
                f"{name:14}{run['texts_encoded']:>10,}{run['rows_reused']:>10,}{run['texts_deduplicated']:>9,}"
                f"{run['encode_seconds']:>11.2f}{run['wall_seconds']:>9.2f}{run['superbatches']:>7}"
            )


def run_targets(pairs: list[Document]) -> list[Target]:

    def ratio(metric: str, run: str, other_run: str) -> float:
        return median(pair[run][metric] / pair[other_run][metric] for pair in pairs)

    encoder, wall = (ratio(f"{name}_seconds", "incremental", "full") for name in ("encode", "wall"))
    saved = 1 - ratio("encode_seconds", "copies", "distinct")
    return [
        at_most("encoder seconds of the incremental run, of the full run's", 0.013, encoder),
        at_most("wall seconds of the incremental run, of the full run's", 1 / 30, wall),
        at_most(
            "bytes on disk after it, of those after the full run",
            1.02,
            ratio("output_bytes", "incremental", "full"),
        ),
        Target("encoder seconds saved where 13 % of the texts are copies", 0.12, saved),
    ]


@dataclass(frozen=True, slots=True)
class Client:
    """A database: a table that follows an output, and its client's own bulk load into a new table,
    both by number."""

    table: Callable[[int], Table]
    bulk: Callable[[int, list[pa.RecordBatch]], None]


def measure_tables(arguments: argparse.Namespace, folder: Path) -> Document:
    """Load tables, beside their clients alone; then change the output and hand over."""
    folder.chmod(0o755)  # the server of Postgres runs as another user where this one is root
    catalog, spare = _draw_catalog(arguments)
    source, output = folder / "source", folder / "output"
    with (
        EncoderPool(EncodingSpec(f"hash://{arguments.dimension}")) as pool,
        _clients(folder) as clients,
    ):
        _write(source, catalog)
        _embed(pool, source, output, changes=True)
        loads = {
            name: _load(client, output, name, arguments.table_pairs)
            for name, client in clients.items()
        }
        for key, rows in catalog.items():  # two rows are edited, one is inserted and one deleted
            rows[7], rows[-1] = (rows[7][0], spare.pop()), (rows[-1][0], spare.pop())
            rows[:] = [*rows[1:], (f"{key}-new", spare.pop())]
        _write(source, catalog)
        _embed(pool, source, output, changes=True)
        changed = 4 * len(catalog)
        return {
            name: loads[name] | _hand_over(client, output, name, changed)
            for name, client in clients.items()
        }


@contextlib.contextmanager
def _clients(folder: Path) -> Iterator[dict[str, Client]]:
    """The clients whose libraries are installed, and a server of Postgres."""
    lance = folder / "lance"
    clients = {
        "lancedb": Client(
            lambda number: LanceTable(str(lance), f"table_{number}"),
            partial(_add_to_lancedb, lance),
        )
    }
    with contextlib.ExitStack() as stack:
        try:
            from pgserver.postgres_server import get_server
        except ImportError:
            say("  pgvector: not measured, since pgserver is not installed")
        else:
            dsn = stack.enter_context(
                get_server(folder / "postgres", cleanup_mode="delete")
            ).get_uri()
            clients["pgvector"] = Client(
                lambda number: PgVectorTable(dsn, f"table_{number}", index="none"),
                partial(_copy_to_postgres, dsn),
            )
        yield clients


def _load(client: Client, output: Path, name: str, pairs: int) -> Document:
    """First loads and bulk loads of the same rows, by turns."""
    store = open_store(output)
    added = (
        batch
        for partition in changes(store, since={})
        for batch in partition
        if batch["op"][0].as_py() == "add"
    )
    batches = [batch.select(batch.schema.names[1:]) for batch in added]
    rows = sum(map(len, batches))
    client.bulk(pairs, batches[:1])  # imports the client
    seconds: list[dict[str, float]] = []
    for number in range(pairs):
        feed = partial(changes, store, f"{name}-{number}")
        sides = {
            "bulk": partial(client.bulk, number, batches),
            "load": partial(client.table(number).apply, feed),
        }
        turns = {}
        for side in reversed(sides) if number % 2 else sides:
            os.sync()
            turns[side] = seconds_of(sides[side])
        seconds.append(turns)
        say(f"  {name}: {turns}")
    return {
        "rows": rows,
        "bulk_rows_per_second": round(rows / median(pair["bulk"] for pair in seconds)),
        "load_rows_per_second": round(rows / median(pair["load"] for pair in seconds)),
        "share_of_bulk": round(median(pair["bulk"] / pair["load"] for pair in seconds), 3),
        "pairs": seconds,
    }


def _hand_over(client: Client, output: Path, name: str, changed: int) -> Document:
    """What follows a change in the first of the tables."""
    table, begun = client.table(0), time.perf_counter()
    done = table.apply(partial(changes, open_store(output), f"{name}-0"))
    return {
        "changes_seconds": round(time.perf_counter() - begun, 2),
        "changed_rows": changed,
        "sent_per_changed_row": round((done.rows_sent + done.rows_deleted) / changed, 3),
        "commits": done.commits,
        "wrong": len(compare(done.feed, table).wrong),
    }


def _add_to_lancedb(folder: Path, number: int, batches: list[pa.RecordBatch]) -> None:
    """What LanceDB takes for the rows itself."""
    import lancedb

    reader = pa.RecordBatchReader.from_batches(batches[0].schema, batches)
    lancedb.connect(folder).create_table(f"bulk_{number}", data=reader)


def _copy_to_postgres(dsn: str, number: int, batches: list[pa.RecordBatch]) -> None:
    """What COPY takes for the rows itself."""
    import psycopg
    from pgvector.psycopg import register_vector

    dimension = batches[0].schema.field("embedding").type.list_size
    columns = f"partition text, id text, text text, embedding vector({dimension})"
    with psycopg.connect(dsn) as connection:
        connection.execute("CREATE EXTENSION IF NOT EXISTS vector")
        register_vector(connection)
        connection.execute(f"CREATE TABLE bulk_{number} ({columns})".encode())
        with connection.cursor().copy(
            f"COPY bulk_{number} FROM STDIN WITH (FORMAT BINARY)".encode()
        ) as copy:
            copy.set_types(["text", "text", "text", "vector"])
            for batch in batches:
                matrix = (
                    batch.column("embedding").flatten().to_numpy().reshape(len(batch), dimension)
                )
                for row in zip(
                    *(batch.column(name).to_pylist() for name in batch.schema.names[:3]),
                    matrix,
                    strict=True,
                ):
                    copy.write_row(row)


def table_lines(clients: Document) -> Iterator[str]:
    yield f"{'first load, rows/s':20}{'client alone':>14}{'table':>10}{'share':>8}{'hand-over s':>13}{'commits':>9}"
    for name, measured in clients.items():
        yield (
            f"{name:20}{measured['bulk_rows_per_second']:>14,}{measured['load_rows_per_second']:>10,}"
            f"{measured['share_of_bulk']:>8.2f}{measured['changes_seconds']:>13.2f}{measured['commits']:>9}"
        )


def table_targets(clients: Document) -> Iterator[Target]:
    for name, measured in clients.items():
        yield Target(f"{name}: first load, share of bulk speed", 0.7, measured["share_of_bulk"])
        yield at_most(f"{name}: rows sent per changed row", 1.1, measured["sent_per_changed_row"])
        yield at_most(f"{name}: partitions of the table that are wrong", 0, measured["wrong"])


SCENARIOS: Scenarios = {"runs": (run_lines, run_targets), "tables": (table_lines, table_targets)}


def main() -> None:
    parser = command_line(__doc__)
    add = parser.add_argument
    add(
        "--scenarios",
        type=names_of(SCENARIOS),
        default=list(SCENARIOS),
        help=f"of {','.join(SCENARIOS)}",
    )
    add("--partitions", type=int, default=500, help="of the catalog (500)")
    add("--rows", type=int, default=400, help="of each partition (400)")
    add("--pairs", type=int, default=3, help="of runs (3)")
    add("--table-pairs", type=int, default=5, help="of a first load and a bulk load (5)")
    add("--model", default=EncodingSpec().model, help="of the runs (%(default)s)")
    add("--dimension", type=int, default=384, help="of the vectors in tables (384)")
    add("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print_scenarios(measure(arguments), SCENARIOS)


if __name__ == "__main__":
    main()
