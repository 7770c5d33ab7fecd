"""What sources cost: grouping a table in no order, and feeding runs from a sorted one, a disk and a
bucket.

    python -m benchmarks.sources --rows 10000000      # the size of the aims; the default is a fifth of it

- shuffled: listing a table whose rows stand in no order for the first time, which groups them, then
  reading it.
- sorted: a run over a table in order, with an encoder that computes nothing.
- folders: runs over folders of small files, on a disk and in a bucket that answers each request
  after a latency. The encoder sleeps for as long as a CPU would encode, because one that computes
  takes its cores from what is measured. It idles from the beginning of the run until the first
  texts are read, and whenever no further ones are ready.

Each part runs in a process of its own, so that its peak of memory is its own; so does the server of
the bucket. Prints a table and, as the last line of standard output, one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import multiprocessing
import os
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import (
    Document,
    Target,
    at_most,
    command_line,
    in_own_process,
    print_document,
    say,
    start_document,
)
from benchmarks.paced_runs import paced_pool
from benchmarks.synthetic import draw_texts
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.report import SuperBatchReport
from surge_dagster.engine.sources.partition import Source
from surge_dagster.engine.store import open_store
from surge_dagster.engine.store.object_client import StorageOptions
from surge_dagster.engine.tables.opening import open_source

AIM_ROWS_PER_SECOND = 1_200_000
AIM_PEAK_BYTES = 600_000_000
AIM_TEXTS_PER_SECOND = 1_000_000
AIM_IDLE_SHARE = 0.02
LATENCY_SECONDS = 0.02
TEXTS_PER_SECOND = 1_200.0  # short texts on two cores with bf16
TEXTS = 100  # of a folder
_DIMENSION = 8
_ROWS = 2_000_000
_KEYS = 4_000
_PARTITIONS = 250
_FOLDERS = "folders"
_WRITTEN_ROWS = 250_000
# with an id of 12 bytes and a key, about 100 and 60 a row
_TEXT_BYTES = {"shuffled": 80, "sorted": 40}
_SORTED_ROWS_PER_KEY = 50_000


def write_table(path: Path, rows: int, keys: int, text_bytes: int, *, is_sorted: bool) -> None:
    """Write a Parquet table of ids, random words and keys."""
    random = np.random.default_rng(0)
    offsets = np.arange(_WRITTEN_ROWS + 1, dtype=np.int32) * text_bytes
    schema = pa.schema([("id", pa.string()), ("text", pa.string()), ("category", pa.string())])
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for start in range(0, rows, _WRITTEN_ROWS):
            count = min(_WRITTEN_ROWS, rows - start)
            letters = random.integers(91, 123, count * text_bytes, dtype=np.uint8)
            letters[letters < 97] = ord(" ")
            buffers = [None, pa.py_buffer(offsets[: count + 1]), pa.py_buffer(letters)]
            numbers = np.arange(start, start + count)
            places = numbers * keys // rows if is_sorted else random.integers(0, keys, count)
            columns = [
                pa.array([f"id-{number:09d}" for number in numbers.tolist()]),
                pa.Array.from_buffers(pa.string(), count, buffers),
                pa.array([f"category {place:05d}" for place in places.tolist()]),
            ]
            writer.write_batch(pa.record_batch(columns, schema=schema))


def group(source: Source, folder: Path) -> Document:
    """List a table for the first time, then read every partition."""
    begun = time.perf_counter()
    rows = sum(partition.rows or 0 for partition in source)
    grouped = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    read = sum(len(batch) for partition in source for batch in partition.read())
    if read != rows:
        raise SystemExit(f"{rows:,} rows were grouped and {read:,} came back")
    return {
        "rows": rows,
        "group_seconds": grouped - begun,
        "read_seconds": time.perf_counter() - grouped,
        "peak_bytes": peak,
    }


def feed(source: Source, folder: Path) -> Document:
    """Run over a sorted table with an encoder that computes nothing; the vectors are written."""
    begun = time.perf_counter()
    rows = sum(partition.rows or 0 for partition in source)
    listed = time.perf_counter()
    if sum(len(batch) for partition in source for batch in partition.read()) != rows:
        raise SystemExit("rows are missing")
    read = time.perf_counter()
    with paced_pool(dimension=_DIMENSION) as pool:
        run = EmbeddingRun(source, open_store(folder / "out"), pool, include_text=False)
        for _ in run:
            pass
        seconds = run.report.wall_seconds
    return {
        "rows": rows,
        "list_seconds": listed - begun,
        "read_seconds": read - listed,
        "run_seconds": seconds,
    }


def write_folders(folder: Path, partitions: int) -> None:
    """Write a folder with one Parquet file for each partition."""
    for number in range(partitions):
        path = folder / f"category=c{number:05d}" / "0.parquet"
        path.parent.mkdir(parents=True)
        texts = draw_texts(0, number, np.arange(TEXTS, dtype=np.uint64))
        pq.write_table(
            pa.table({"id": pa.array([f"{number}-{row}" for row in range(TEXTS)]), "text": texts}),
            path,
        )


def feed_from_folders(folder: Path) -> Document:
    """Run over the folder `catalog` below `folder`, then over the same as a bucket; vectors go to
    the local disk."""
    with (
        paced_pool(TEXTS_PER_SECOND) as pool,
        _bucket_of(folder / "catalog") as (endpoint, requests),
    ):
        options = StorageOptions(endpoint=endpoint, access_key_id="a", secret_access_key="b")
        disk = _run(pool, open_source(folder / "catalog"), folder / "from-disk")
        bucket = _run(
            pool, open_source("s3://bench", storage_options=options), folder / "from-bucket"
        )
        return {"disk": disk, "bucket": bucket | {"requests": requests()}}


@contextlib.contextmanager
def _bucket_of(folder: Path) -> Iterator[tuple[str, Callable[[], Document]]]:
    """Serve a folder as the bucket `bench` from another process; gives the endpoint, and the
    requests so far by kind.

    moto is not used, because it takes milliseconds of a core for each request, and the cores are
    those of what is measured.
    """
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(folder, theirs), daemon=True
    )
    server.start()

    def requests() -> Document:
        ours.send("count")
        return ours.recv()

    yield ours.recv(), requests
    ours.send("end")
    server.join()


def _serve(folder: Path, pipe: Connection) -> None:
    """Answer the part of S3's API that a source uses, each request after the latency, as many at a
    time as are sent."""
    from aiohttp import web  # counts for the memory of what is measured

    objects = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*.parquet"))
    }
    etags = {key: f'"{hashlib.md5(content).hexdigest()}"' for key, content in objects.items()}
    counts: Counter[str] = Counter()

    async def read(request: web.Request) -> web.Response:
        counts[request.method] += 1
        await asyncio.sleep(LATENCY_SECONDS)
        key = request.match_info["key"]
        content = objects[key]
        headers = {"ETag": etags[key], "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}
        if "Range" not in request.headers:
            return web.Response(headers=headers, body=content)
        start, stop, _ = request.http_range.indices(len(content))
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        return web.Response(status=206, headers=headers, body=content[start:stop])

    async def listing(request: web.Request) -> web.Response:
        counts["LIST"] += 1
        await asyncio.sleep(LATENCY_SECONDS)
        entries = "".join(
            f"<Contents><Key>{key}</Key><LastModified>2024-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>{etags[key]}</ETag><Size>{len(content)}</Size></Contents>"
            for key, content in objects.items()
            if key.startswith(request.query.get("prefix", ""))
        )
        body = f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
        return web.Response(text=body, content_type="application/xml")

    async def serve() -> None:
        app = web.Application()
        app.add_routes([web.get("/bench/{key:.+}", read), web.get("/bench{_:/?}", listing)])
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        pipe.send(f"http://127.0.0.1:{runner.addresses[0][1]}")
        while await asyncio.to_thread(pipe.recv) == "count":
            pipe.send(dict(counts))
        await runner.cleanup()

    asyncio.run(serve())


def _run(pool: EncoderPool, source: Source, output: Path) -> Document:
    run = EmbeddingRun(source, open_store(output), pool)
    encoded = 0.0
    for event in run.events():
        if isinstance(event, SuperBatchReport) and event.encode_span is not None:
            encoded = max(encoded, event.encode_span.ended)
    if run.failed or not encoded:
        raise SystemExit(f"partitions failed: {run.report.partitions_failed[:3]}")
    report = run.report
    return {
        "partitions": report.partitions_written,
        "texts": report.texts_encoded,
        "seconds": encoded,
        "idle_share": max(0.0, 1 - report.costs.encode_seconds / encoded),
        "duty_cycle": report.duty_cycle,
        "run_seconds": report.wall_seconds,
    }


_TABLES: dict[str, Callable[[Source, Path], Document]] = {"shuffled": group, "sorted": feed}


def measure(arguments: argparse.Namespace) -> Document:
    """Measure every part; writing the sources is not part of any figure."""
    document = start_document("sources", arguments, ("pyarrow", "numpy"))
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for name in _TABLES:
            say(f"writing a {name} table of {arguments.rows:,} rows")
            keys = (
                arguments.keys
                if name == "shuffled"
                else max(1, arguments.rows // _SORTED_ROWS_PER_KEY)
            )
            path = Path(folder) / f"{name}.parquet"
            write_table(path, arguments.rows, keys, _TEXT_BYTES[name], is_sorted=name == "sorted")
            say(f"reading it, {path.stat().st_size / 1e6:,.0f} MB in {keys:,} keys")
            document[name] = _measure(name, folder)
            path.unlink()
        write_folders(Path(folder) / "catalog", arguments.partitions)
        say(f"reading {arguments.partitions:,} folders from a disk and from a bucket")
        document[_FOLDERS] = _measure(_FOLDERS, folder)
    return document


def _measure(part: str, folder: str) -> Document:
    environment = {**os.environ, "SURGE_CACHE_DIR": f"{folder}/cache"}
    return in_own_process("benchmarks.sources", "--part", part, "--folder", folder, env=environment)


def lines(document: Document) -> Iterator[str]:
    shuffled, ordered = document["shuffled"], document["sorted"]
    yield f"{'':44}{'rows':>12}{'seconds':>9}{'rows/s':>12}"
    for name, part, step in (
        ("shuffled table: grouping", shuffled, "group_seconds"),
        ("shuffled table: reading all partitions", shuffled, "read_seconds"),
        ("sorted table: first listing", ordered, "list_seconds"),
        ("sorted table: reading all partitions", ordered, "read_seconds"),
        ("sorted table: run with a null encoder", ordered, "run_seconds"),
    ):
        yield f"{name:44}{part['rows']:>12,}{part[step]:>9.2f}{part['rows'] / part[step]:>12,.0f}"
    yield f"peak memory of the process that groups: {shuffled['peak_bytes'] / 1e6:,.0f} MB"
    yield (
        f"folders of {TEXTS} texts, an encoder of {TEXTS_PER_SECOND:,.0f} texts/s in place of a model; idle until the "
        "last text is encoded"
    )
    for place, measured in document[_FOLDERS].items():
        where = f"bucket, {1_000 * LATENCY_SECONDS:.0f} ms" if place == "bucket" else place
        requests = sum(measured.get("requests", {}).values()) / measured["partitions"]
        sent = f", {requests:.2f} requests per partition" if requests else ""
        yield (
            f"{where:16}{measured['partitions']:>6,} partitions{measured['seconds']:>8.1f} s, idle "
            f"{measured['idle_share']:.1%}, duty with the last publications {measured['duty_cycle']:.3f}{sent}"
        )


def targets(document: Document) -> list[Target]:
    shuffled, ordered = document["shuffled"], document["sorted"]
    return [
        Target("rows/s grouped", AIM_ROWS_PER_SECOND, shuffled["rows"] / shuffled["group_seconds"]),
        at_most("bytes of memory while grouping", AIM_PEAK_BYTES, shuffled["peak_bytes"]),
        Target(
            "texts/s into a null encoder",
            AIM_TEXTS_PER_SECOND,
            ordered["rows"] / ordered["run_seconds"],
        ),
        *(
            at_most(
                f"idle share of a CPU's encoder that reads from a {place}",
                AIM_IDLE_SHARE,
                measured["idle_share"],
            )
            for place, measured in document[_FOLDERS].items()
        ),
    ]


def main() -> None:
    parser = command_line(__doc__)
    add = parser.add_argument
    add(
        "--rows",
        type=int,
        default=_ROWS,
        help=f"of each table ({_ROWS:,}; the aims are for 10,000,000)",
    )
    add("--keys", type=int, default=_KEYS, help=f"of the shuffled table ({_KEYS:,})")
    add(
        "--partitions",
        type=int,
        default=_PARTITIONS,
        help=f"folders of small files ({_PARTITIONS:,})",
    )
    add(
        "--folder",
        help="where the tables, the grouped rows and the vectors are written (the temporary folder)",
    )
    add("--part", choices=(*_TABLES, _FOLDERS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        folder = Path(arguments.folder)
        if arguments.part == _FOLDERS:
            print(json.dumps(feed_from_folders(folder)))
            return
        source = open_source(folder / f"{arguments.part}.parquet", partition_by=["category"])
        print(json.dumps(_TABLES[arguments.part](source, folder)))
        return
    document = measure(arguments)
    print_document(document, lines(document), targets(document))


if __name__ == "__main__":
    main()
