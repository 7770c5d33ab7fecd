"""What sources cost: grouping a table in no order, and feeding runs from a sorted one, a disk and a
bucket.

    python -m benchmarks.sources --rows 10000000      # the size of the aims; the default is a fifth

- shuffled: listing a table whose rows have no order for the first time, which groups them.
- sorted: a run over a table in order, with an encoder that computes nothing.
- folders: runs over folders of small files, on a disk and in a bucket that answers each request
  after a latency. The encoder sleeps for as long as a CPU would encode, because one that computes
  takes its cores from what is measured. It idles from the beginning of the run until the first
  texts are read, and whenever no further ones are ready.

Each part runs in its own process, so that its peak of memory is its own; so does the server of the
bucket.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import multiprocessing
import os
import resource
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import (
    Document,
    Options,
    Target,
    at_most,
    in_own_process,
    print_document,
    say,
    start_document,
    temporary_folder,
)
from benchmarks.paced_runs import embed, paced_pool
from benchmarks.synthetic import draw_texts
from surge_dagster import EncoderPool, open_source, open_store
from surge_dagster.engine.run.report import Event, SuperBatchReport
from surge_dagster.engine.sources.partition import Source
from surge_dagster.engine.store.object_client import StorageOptions

if TYPE_CHECKING:
    from aiohttp import web

_LATENCY_SECONDS = 0.02
_TEXTS_PER_SECOND = 1_200.0  # short texts on two cores with bf16
_FOLDER_TEXTS = 100
_DIMENSION = 8
_WRITTEN_ROWS = 250_000
# With an id of 12 bytes and a key, about 100 and 60 a row.
_SHUFFLED_TEXT_BYTES = 80
_SORTED_TEXT_BYTES = 40
_SORTED_ROWS_PER_KEY = 50_000


def write_table(path: Path, rows: int, keys: int, text_bytes: int, *, is_sorted: bool) -> None:
    """Write a Parquet table of ids, random words and keys."""
    random = np.random.default_rng(0)
    schema = pa.schema([("id", pa.string()), ("text", pa.string()), ("category", pa.string())])
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for start in range(0, rows, _WRITTEN_ROWS):
            count = min(_WRITTEN_ROWS, rows - start)
            letters = random.integers(91, 123, count * text_bytes, dtype=np.uint8)
            letters[letters < 97] = ord(" ")
            numbers = np.arange(start, start + count)
            places = numbers * keys // rows
            if not is_sorted:
                places = random.integers(0, keys, count)
            width = pa.binary(text_bytes)
            words = pa.Array.from_buffers(width, count, [None, pa.py_buffer(letters)])
            columns = [
                pa.array(map("id-{:09d}".format, numbers.tolist()), pa.string()),
                words.cast(pa.string()),
                pa.array(map("category {:05d}".format, places.tolist()), pa.string()),
            ]
            writer.write_batch(pa.record_batch(columns, schema=schema))


def measure_shuffled(arguments: argparse.Namespace, folder: Path) -> Document:
    path = folder / "shuffled.parquet"
    write_table(path, arguments.rows, arguments.keys, _SHUFFLED_TEXT_BYTES, is_sorted=False)
    return in_own_process(group, path)


def group(table: Path) -> Document:
    """List a table for the first time."""
    source = open_source(table, partition_by=["category"])
    begun = time.perf_counter()
    rows = sum(partition.rows or 0 for partition in source)
    seconds = time.perf_counter() - begun
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"rows": rows, "seconds": seconds, "peak_bytes": peak}


def measure_sorted(arguments: argparse.Namespace, folder: Path) -> Document:
    path = folder / "sorted.parquet"
    keys = max(1, arguments.rows // _SORTED_ROWS_PER_KEY)
    write_table(path, arguments.rows, keys, _SORTED_TEXT_BYTES, is_sorted=True)
    return in_own_process(feed, path)


def feed(table: Path) -> Document:
    """Run over a sorted table with an encoder that computes nothing; the vectors are written."""
    source = open_source(table, partition_by=["category"])
    rows = sum(partition.rows or 0 for partition in source)
    with paced_pool(dimension=_DIMENSION) as pool:
        output = open_store(table.with_name("out"))
        report = embed(pool, source, output, include_text=False)
    return {"rows": rows, "seconds": report.wall_seconds}


def measure_folders(arguments: argparse.Namespace, folder: Path) -> Document:
    catalog = folder / "catalog"
    for number in range(arguments.partitions):
        path = catalog / f"category=c{number:05d}" / "0.parquet"
        path.parent.mkdir(parents=True)
        texts = draw_texts(0, number, np.arange(_FOLDER_TEXTS, dtype=np.uint64))
        ids = [f"{number}-{row}" for row in range(_FOLDER_TEXTS)]
        pq.write_table(pa.table({"id": ids, "text": texts}), path)
    return in_own_process(feed_from_folders, catalog)


def feed_from_folders(catalog: Path) -> Document:
    """Run over a folder, then over the same as a bucket; vectors go to the local disk."""
    with paced_pool(_TEXTS_PER_SECOND) as pool, bucket_of(catalog) as endpoint:
        options = StorageOptions(endpoint=endpoint, access_key_id="a", secret_access_key="b")
        bucket = open_source("s3://bench", storage_options=options)
        return {
            "disk": _feed(pool, open_source(catalog), catalog.with_name("from-disk")),
            "bucket": _feed(pool, bucket, catalog.with_name("from-bucket")),
        }


def _feed(pool: EncoderPool, source: Source, output: Path) -> Document:
    ends: list[float] = []

    def note(event: Event) -> None:
        if isinstance(event, SuperBatchReport) and event.encode_span is not None:
            ends.append(event.encode_span.ended)

    report = embed(pool, source, open_store(output), seen=note)
    return {
        "partitions": report.partitions_written,
        "seconds": max(ends),
        "idle_share": max(0.0, 1 - report.costs.encode_seconds / max(ends)),
    }


@contextlib.contextmanager
def bucket_of(folder: Path) -> Iterator[str]:
    """Serve a folder as the bucket `bench` from another process, and yield the endpoint.

    moto is not used, because it takes milliseconds of a core for each request, and the cores are
    those of what is measured.
    """
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    server = context.Process(target=_serve, args=(folder, theirs), daemon=True)
    server.start()
    yield ours.recv()
    server.kill()
    server.join()


def _serve(folder: Path, pipe: Connection) -> None:
    asyncio.run(Bucket(folder).serve(pipe))


class Bucket:
    """The part of S3's API that a source uses: each request is answered after the latency, all at
    the same time."""

    def __init__(self, folder: Path) -> None:
        self._objects: dict[str, bytes] = {}
        self._etags: dict[str, str] = {}
        for path in sorted(folder.rglob("*.parquet")):
            key = str(path.relative_to(folder))
            self._objects[key] = path.read_bytes()
            self._etags[key] = f'"{hashlib.md5(self._objects[key]).hexdigest()}"'

    async def serve(self, pipe: Connection) -> None:
        """Send the endpoint, and answer until the process is killed."""
        from aiohttp import web  # would count as memory of what is measured

        app = web.Application()
        app.add_routes(
            [web.get("/bench/{key:.+}", self._read), web.get("/bench{_:/?}", self._list)]
        )
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        pipe.send(f"http://127.0.0.1:{runner.addresses[0][1]}")
        await asyncio.Event().wait()

    async def _read(self, request: web.Request) -> web.Response:
        from aiohttp import web

        await asyncio.sleep(_LATENCY_SECONDS)
        key = request.match_info["key"]
        content = self._objects[key]
        headers = {
            "ETag": self._etags[key],
            "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT",
        }
        if "Range" not in request.headers:
            return web.Response(headers=headers, body=content)
        start, stop, _ = request.http_range.indices(len(content))
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        return web.Response(status=206, headers=headers, body=content[start:stop])

    async def _list(self, request: web.Request) -> web.Response:
        from aiohttp import web

        await asyncio.sleep(_LATENCY_SECONDS)
        entries = ""
        for key, content in self._objects.items():
            if key.startswith(request.query.get("prefix", "")):
                entries += (
                    f"<Contents><Key>{key}</Key>"
                    "<LastModified>2024-01-01T00:00:00.000Z</LastModified>"
                    f"<ETag>{self._etags[key]}</ETag><Size>{len(content)}</Size></Contents>"
                )
        body = f"<ListBucketResult><IsTruncated>false</IsTruncated>{entries}</ListBucketResult>"
        return web.Response(text=body, content_type="application/xml")


def lines(document: Document) -> Iterator[str]:
    """Yield the tables."""
    for name in ("shuffled", "sorted"):
        table = document[name]
        yield f"{name}: {table['rows']:,} rows in {table['seconds']:.2f} s"
    yield f"peak memory of grouping: {document['shuffled']['peak_bytes'] / 1e6:,.0f} MB"
    for place, measured in document["folders"].items():
        seconds = f"{measured['partitions']:,} partitions in {measured['seconds']:.1f} s"
        yield f"from a {place}: {seconds}, encoder idle {measured['idle_share']:.1%}"


def targets(document: Document) -> Iterator[Target]:
    """Yield the aims."""
    shuffled = document["shuffled"]
    grouped = shuffled["rows"] / shuffled["seconds"]
    yield Target("rows/s grouped", 1_200_000, grouped)
    yield at_most("bytes of memory while grouping", 600_000_000, shuffled["peak_bytes"])
    fed = document["sorted"]["rows"] / document["sorted"]["seconds"]
    yield Target("texts/s into a null encoder", 1_200_000, fed)
    for place, measured in document["folders"].items():
        name = f"idle share of a CPU's encoder that reads from a {place}"
        yield at_most(name, 0.02, measured["idle_share"])


def main() -> None:
    options = Options(__doc__)
    options.add_size("--rows", 2_000_000, 3_000, "of each table; the aims are for 10,000,000")
    options.add_size("--keys", 4_000, 20, "of the shuffled table")
    options.add_size("--partitions", 250, 4, "folders of small files")
    arguments = options.parse_args()
    document = start_document("sources", arguments, ("pyarrow", "numpy"))
    for name, measure in (
        ("shuffled", measure_shuffled),
        ("sorted", measure_sorted),
        ("folders", measure_folders),
    ):
        say(name)
        with temporary_folder() as folder:
            os.environ["SURGE_CACHE_DIR"] = str(folder / "cache")
            document[name] = measure(arguments, folder)
    print_document(document, lines, targets)


if __name__ == "__main__":
    main()
