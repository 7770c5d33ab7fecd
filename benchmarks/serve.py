"""Queries beside bulk work: latency over load, promises kept, and what each lane leaves to the
other.

    python -m benchmarks.serve [--seconds 20] [--requests 20000] [--model MODEL] [--peers NAMES] [--infinity COMMAND]
        [--chart FILE] [--quick]

Starts `surge-dagster serve` over an output of its own, and in turn a plain sentence-transformers
server and that of infinity-emb, which needs an environment of its own: its `COMMAND` is the path of
`infinity_emb` there. The client is an open loop: requests leave at Poisson times whatever has been
answered, and a latency counts from the time at which its request was meant to leave. Prints tables
and, as the last line of standard output, one JSON document.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import aiohttp
import psutil

from benchmarks.encode.inputs import short_workload
from benchmarks.harness import (
    Document,
    Target,
    add_quick,
    at_most,
    command_line,
    names_of,
    print_document,
    say,
    start_document,
)
from benchmarks.serve_client import BULK_TEXTS, Client
from benchmarks.synthetic import build_synthetic_catalog
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.store import open_store
from surge_dagster.engine.tables.opening import open_source

PEERS = ("sentence-transformers", "infinity-emb")
_LOOPS = 16
_LOADS = (0.1, 0.3, 0.5, 0.7, 0.9)  # of the capacity
_USUAL, _HALF, _OVERLOAD = 0.3, 0.5, 4.0


async def measure_service(
    client: Client, server: psutil.Process, arguments: argparse.Namespace
) -> Document:
    seconds = arguments.seconds
    await client.closed(seconds / 4, _LOOPS)  # warms up
    capacity = (await client.closed(seconds, _LOOPS)).as_dict()["answered_per_second"]
    say(f"  capacity: {capacity:.0f} queries/s")
    before, cpu = server.memory_info().rss, sum(server.cpu_times()[:2])
    one = (await client.closed(seconds / 2, 1)).as_dict()
    asked = sum(one["statuses"].values())
    document: Document = {"capacity": capacity, "one_at_a_time": one}
    document["cpu_ms_of_a_request"] = 1e3 * (sum(server.cpu_times()[:2]) - cpu) / asked
    document["loads"] = [
        {"load": load, **(await client.poisson(load * capacity, seconds)).as_dict()}
        for load in _LOADS
    ]
    async with client.bulk() as done:
        await asyncio.sleep(seconds)
        document["bulk_alone"] = len(done) * BULK_TEXTS / seconds
        document["loads_beside_bulk"] = []
        for load in _LOADS:
            done.clear()
            answers = (await client.poisson(load * capacity, seconds)).as_dict()
            answers["bulk"] = len(done) * BULK_TEXTS / seconds
            document["loads_beside_bulk"].append({"load": load, **answers})
        for name, load in (("half", _HALF), ("overload", _OVERLOAD)):
            say(f"  {arguments.requests // 2:,} requests at {load:g} times the capacity")
            done.clear()
            answers = await client.poisson(
                load * capacity, arguments.requests / 2 / (load * capacity), seed=1
            )
            document[name] = answers.as_dict() | {"bulk": len(done) * BULK_TEXTS / answers.seconds}
            promised = await client.promised_seconds()
            document[name]["late_for_the_client"] = sum(
                float(latency) > promised for latency in answers.latencies
            )
    document["broken_promises"] = await client.broken_promises()
    document["promised_ms"] = 1e3 * await client.promised_seconds()
    return document | {"grown_mb": (server.memory_info().rss - before) / 1e6}


def measure_runs(folder: Path, spec: EncodingSpec, texts: int) -> float:
    """Texts per second of a run, with which a batch is compared."""
    build_synthetic_catalog(
        folder / "catalog", texts=texts, partitions=max(4, texts // 600), sigma=1.72, seed=3
    )
    partitions = list(open_source(str(folder / "catalog")))

    with EncoderPool(spec) as pool:
        pool.start()
        run = EmbeddingRun(partitions, open_store(folder / "output"), pool)
        list(run.events())
    return texts / run.report.wall_seconds


async def measure_batch(client: Client, texts: list[str]) -> Document:
    """Texts per second of a batch with a document in each line."""
    return {"texts_per_second": await client.batch(texts)}


async def measure_peer(client: Client, arguments: argparse.Namespace) -> Document:
    await client.closed(arguments.seconds / 4, _LOOPS)
    capacity = (await client.closed(arguments.seconds, _LOOPS)).as_dict()["answered_per_second"]
    loads = [
        {"load": load, **(await client.poisson(load * capacity, arguments.seconds)).as_dict()}
        for load in _LOADS
    ]
    overload = await client.poisson(_OVERLOAD * capacity, arguments.seconds)
    return {"capacity": capacity, "loads": loads, "overload": overload.as_dict()}


def measure(arguments: argparse.Namespace) -> Document:
    document = start_document(
        "serve", arguments, ("openvino", "torch", "sentence-transformers", "uvicorn")
    )
    texts = short_workload(2_000, 0).texts

    async def with_client(url: str, work: object, *more: object) -> Document:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(600)
        ) as session:
            return await work(Client(session, url, texts), *more)  # pyright: ignore[reportCallIssue]

    with tempfile.TemporaryDirectory(prefix="surge-bench-") as folder:
        output = _output(Path(folder), EncodingSpec(arguments.model))
        command = [sys.executable, "-m", "surge_dagster", "serve", output]
        with _serving([*command, "--batches", f"{folder}/batches", "--port"], "/readyz") as (
            url,
            process,
        ):
            document["service"] = asyncio.run(
                with_client(url, measure_service, psutil.Process(process.pid), arguments)
            )
            say("  a batch")
            count = max(200, round(arguments.seconds * document["service"]["bulk_alone"]))
            document["batch"] = asyncio.run(
                with_client(url, measure_batch, short_workload(count, 4).texts)
            )
        document["run_texts_per_second"] = measure_runs(
            Path(folder) / "run", EncodingSpec(arguments.model), count
        )
        for peer in arguments.peers:
            command, ready = (
                [sys.executable, "-m", "benchmarks.serve_peer", arguments.model],
                "/readyz",
            )
            if peer == "infinity-emb":
                if not arguments.infinity:
                    continue
                model = EncodingSpec(arguments.model).resolve().model_path
                options = [
                    "--model-id",
                    model,
                    "--served-model-name",
                    "current",
                    "--url-prefix",
                    "/v1",
                    "--host",
                    "127.0.0.1",
                ]
                command = [
                    arguments.infinity,
                    "v2",
                    *options,
                    "--engine",
                    "torch",
                    "--device",
                    "cpu",
                    "--port",
                ]
                ready = "/health"
            say(f"  {peer}")
            with _serving(command, ready) as (url, _):
                document[peer] = asyncio.run(with_client(url, measure_peer, arguments))
    return document


def _output(folder: Path, spec: EncodingSpec) -> str:
    """An output with one space."""
    build_synthetic_catalog(folder / "catalog", texts=100, partitions=4, sigma=1.0, seed=1)
    with EncoderPool(spec, devices="cpu") as pool:
        list(
            EmbeddingRun(open_source(str(folder / "catalog")), open_store(folder / "output"), pool)
        )
    return str(folder / "output")


@contextlib.contextmanager
def _serving(command: list[str], ready: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """The server of a command whose last word is its port, once it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    env = {**os.environ, "DO_NOT_TRACK": "1"}  # infinity-emb would send usage elsewhere
    with subprocess.Popen([*command, str(port)], stdout=sys.stderr, env=env) as process:
        try:
            asyncio.run(_wait_until_ready(url + ready, process))
            yield url, process
        finally:
            process.terminate()


async def _wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    async with aiohttp.ClientSession() as session:
        while process.poll() is None:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return
            await asyncio.sleep(0.1)
    raise SystemExit(f"the server has ended with {process.returncode} before it was ready")


def serve_lines(document: Document) -> Iterable[str]:
    service = document["service"]
    yield f"capacity {service['capacity']:.0f} queries/s, promise {service['promised_ms']:.1f} ms"
    columns = f"{'p50 ms':>10}{'p99 ms':>10}"
    yield f"{'load':>10}{columns}{'beside bulk:':>16}{columns}{'bulk texts/s':>14}"
    yield f"{'none':>10}{'':46}{service['bulk_alone']:>14.0f}"
    for alone, beside in zip(service["loads"], service["loads_beside_bulk"], strict=True):
        yield (
            f"{alone['load']:>10.0%}{alone['p50_ms']:>10.1f}{alone['p99_ms']:>10.1f}{'':16}"
            f"{beside['p50_ms']:>10.1f}{beside['p99_ms']:>10.1f}{beside['bulk']:>14.0f}"
        )
    for name in ("half", "overload"):
        yield f"{name}, beside bulk: {service[name]}"
    yield f"texts/s of a run: {document['run_texts_per_second']:.0f}, of a batch: {document['batch']}"
    for peer in PEERS:
        if peer in document:
            loads = ", ".join(
                f"{each['load']:.0%} {each['p99_ms']:.1f}" for each in document[peer]["loads"]
            )
            overload = document[peer]["overload"]
            yield f"{peer}: {document[peer]['capacity']:.0f} queries/s, p99 in ms at {loads}; overload: {overload}"


def serve_targets(document: Document) -> Iterator[Target]:
    service = document["service"]
    place = _LOADS.index(_USUAL)
    alone, beside = service["loads"][place], service["loads_beside_bulk"][place]
    yield at_most(
        "p99 in ms of queries at 30 % beside bulk", 2 * alone["p99_ms"] + 5, beside["p99_ms"]
    )
    for name in ("half", "overload"):
        accepted = service[name]["statuses"].get(200, 0)
        late = service[name]["late_for_the_client"] / max(1, accepted)
        yield at_most(f"late answers of accepted requests at {name}, of all", 0.001, late)
    share = beside["bulk"] / service["bulk_alone"]
    yield Target(
        "bulk beside queries at 30 %, of (1 - load) of its rate alone", 0.9, share / (1 - _USUAL)
    )
    yield Target(
        "bulk under overload, of its rate alone",
        0.1,
        service["overload"]["bulk"] / service["bulk_alone"],
    )
    goodput = service["overload"]["answered_per_second"] / service["capacity"]
    yield Target("answered at four times the capacity, of the capacity", 0.9, goodput)
    yield at_most("growth of memory in MB", 50, service["grown_mb"])
    yield at_most("CPU of a request in ms, beside its pass", 0.3, service["cpu_ms_of_a_request"])
    of_run = document["batch"]["texts_per_second"] / document["run_texts_per_second"]
    yield Target("texts/s of a batch, of a run's", 0.85, of_run)


def draw(service: Document, path: Path) -> None:
    """Latency over load, with and without bulk work beside it, below the promise."""
    import matplotlib as mpl  # of an extra, and nothing else here needs it
    from matplotlib.figure import Figure

    from benchmarks.evaluation.charts import OURS, STYLE, THEIRS

    with mpl.rc_context(STYLE):
        figure = Figure((6.0, 3.4))
        axes = figure.subplots()
        for name, color, loads in (
            ("alone", THEIRS, service["loads"]),
            ("beside bulk work", OURS, service["loads_beside_bulk"]),
        ):
            shares = [100 * each["load"] for each in loads]
            for quantile, line in (("p50", "o--"), ("p99", "o-")):
                values = [each[f"{quantile}_ms"] for each in loads]
                axes.plot(shares, values, line, color=color, label=f"{quantile}, {name}")
        axes.axhline(service["promised_ms"], color="black", linewidth=0.8, label="promise")
        axes.set(xlabel="queries, % of the capacity", ylabel="ms", yscale="log")
        axes.legend(fontsize=7)
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = command_line(__doc__)
    add, quick = parser.add_argument, add_quick(parser)
    add("--seconds", type=float, default=1.0 if quick else 20.0, help="of each load (20)")
    add(
        "--requests",
        type=int,
        default=200 if quick else 20_000,
        help="for which the promise is checked (20,000)",
    )
    add("--model", default="hash://16" if quick else EncodingSpec().model)
    add(
        "--peers",
        type=names_of(PEERS),
        default=[] if quick else list(PEERS),
        help=f"of {','.join(PEERS)}",
    )
    add(
        "--infinity",
        metavar="COMMAND",
        help="path of infinity_emb; without it that peer is left out",
    )
    add("--chart", type=Path, metavar="FILE", help="SVG of the latencies over the load")
    arguments = parser.parse_args()
    document = measure(arguments)
    if arguments.chart:
        draw(document["service"], arguments.chart)
    print_document(document, serve_lines(document), serve_targets(document))


if __name__ == "__main__":
    main()
