"""Queries during bulk work: latency over load, promises kept, and what each lane leaves to the
other.

    python -m benchmarks.serve [--seconds 20] [--requests 20000] [--model MODEL]
        [--infinity COMMAND] [--chart FILE] [--quick]

Starts `surge-dagster serve` over its own output, and in turn a plain sentence-transformers server
and that of infinity-emb, which needs its own environment: `COMMAND` is the path of `infinity_emb`
there. The client is an open loop: requests leave at Poisson times whatever has been answered, and a
latency counts from the time at which its request was meant to leave.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import aiohttp
import psutil

from benchmarks.encode.inputs import short_workload
from benchmarks.harness import (
    Document,
    Options,
    Result,
    Target,
    at_most,
    print_document,
    say,
    serving,
    start_document,
    temporary_folder,
)
from benchmarks.paced_runs import embed
from benchmarks.serve_client import Client
from benchmarks.synthetic import build_synthetic_catalog
from surge_dagster import EncoderPool, EncodingSpec, open_source, open_store

_LOOPS = 16
_LOADS = (0.1, 0.3, 0.5, 0.7, 0.9)  # of the capacity
_USUAL = 0.3
_CHECKED = {"half": 0.5, "overload": 4.0}


def measure(arguments: argparse.Namespace) -> Document:
    """Measure the service, a run that a batch is compared with, and the peers."""
    spec = EncodingSpec(arguments.model)
    document: Document = {"peers": {}}
    with temporary_folder() as folder:
        embed_catalog(folder / "first", spec, texts=100)
        output = str(folder / "first" / "output")
        command = [sys.executable, "-m", "surge_dagster", "serve", output]
        command += ["--batches", f"{folder}/batches", "--port"]
        with serving(command, "/readyz") as (url, server):
            service = with_client(url, lambda client: measure_service(client, server, arguments))
            say("  a batch")
            count = max(200, round(arguments.seconds * service["bulk_alone"]))
            texts = short_workload(count, 4).texts
            document["batch_texts_per_second"] = with_client(
                url, lambda client: client.batch(texts)
            )
        document["service"] = service
        document["run_texts_per_second"] = embed_catalog(folder / "second", spec, texts=count)

    for name, (command, ready_path) in peer_commands(arguments).items():
        say(f"  {name}")
        environment = os.environ | {"DO_NOT_TRACK": "1"}  # infinity-emb would send usage elsewhere
        with serving(command, ready_path, env=environment) as (url, _):
            peer = with_client(url, lambda client: measure_peer(client, arguments))
            document["peers"][name] = peer
    return document


def with_client(
    url: str, work: Callable[[Client], Awaitable[Result]], texts: list[str] | None = None
) -> Result:
    """Return what a client of this service measures, with short texts if none are given."""

    async def run() -> Result:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(600)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            return await work(Client(session, url, texts or short_workload(2_000, 0).texts))

    return asyncio.run(run())


def embed_catalog(folder: Path, spec: EncodingSpec, texts: int) -> float:
    """Embed a catalog, and return the texts per second."""
    build_synthetic_catalog(
        folder / "catalog", texts=texts, partitions=max(4, texts // 600), seed=3
    )
    partitions = list(open_source(str(folder / "catalog")))
    with EncoderPool(spec) as pool:
        pool.start()
        report = embed(pool, partitions, open_store(folder / "output"))
    return texts / report.wall_seconds


def peer_commands(arguments: argparse.Namespace) -> dict[str, tuple[list[str], str]]:
    """Return the commands of the peers, and the paths that are answered when they are ready."""
    if arguments.quick:
        return {}
    plain = [sys.executable, "-m", "benchmarks.serve_peer", arguments.model]
    peers = {"sentence-transformers": (plain, "/readyz")}
    if arguments.infinity:
        model = EncodingSpec(arguments.model).resolve().model_path
        words = "v2 --served-model-name current --url-prefix /v1 --host 127.0.0.1 --engine torch"
        options = [*words.split(), "--device", "cpu", "--model-id", model, "--port"]
        peers["infinity-emb"] = ([arguments.infinity, *options], "/health")
    return peers


async def measure_service(
    client: Client, server: psutil.Process, arguments: argparse.Namespace
) -> Document:
    """Measure capacity, CPU, loads without and with bulk work, and promises."""
    seconds = arguments.seconds
    capacity = await capacity_of(client, seconds)
    start_bytes = server.memory_info().rss
    document: Document = {"capacity": capacity}
    document["cpu_ms_of_a_request"] = await cpu_ms_of_a_request(client, server, seconds)
    document["loads"] = await measure_loads(client, capacity, seconds)

    async with client.bulk() as bulk:
        await asyncio.sleep(seconds)
        document["bulk_alone"] = bulk.rate()
        document["loads_during_bulk"] = []
        for load in _LOADS:
            bulk.restart()
            answers = await client.poisson(load * capacity, seconds)
            measured = {"load": load, **answers.as_dict(), "bulk": bulk.rate()}
            document["loads_during_bulk"].append(measured)

        for name, load in _CHECKED.items():
            requests = arguments.requests / 2
            say(f"  {requests:,.0f} requests at {load:g} times the capacity")
            rate = load * capacity
            bulk.restart()
            answers = await client.poisson(rate, requests / rate, seed=1)
            document[name] = answers.as_dict() | {"bulk": bulk.rate()}
            document[name]["late"] = answers.late_for(await client.promised_seconds())

    document["promised_ms"] = 1e3 * await client.promised_seconds()
    document["grown_mb"] = (server.memory_info().rss - start_bytes) / 1e6
    return document


async def capacity_of(client: Client, seconds: float) -> float:
    """Return the queries per second that are answered to a closed loop, after a warm-up."""
    await client.closed(seconds / 4, _LOOPS)
    capacity = (await client.closed(seconds, _LOOPS))["answered_per_second"]
    say(f"  capacity: {capacity:.0f} queries/s")
    return capacity


async def cpu_ms_of_a_request(client: Client, server: psutil.Process, seconds: float) -> float:
    """Return the CPU that queries take one at a time in the server's own process."""
    begun = sum(server.cpu_times()[:2])
    answers = await client.closed(seconds / 2, 1)
    spent = sum(server.cpu_times()[:2]) - begun
    return 1e3 * spent / sum(answers["statuses"].values())


async def measure_loads(client: Client, capacity: float, seconds: float) -> list[Document]:
    """Return the latencies at each load."""
    loads = []
    for load in _LOADS:
        answers = await client.poisson(load * capacity, seconds)
        loads.append({"load": load, **answers.as_dict()})
    return loads


async def measure_peer(client: Client, arguments: argparse.Namespace) -> Document:
    """Measure capacity, loads and overload of another server."""
    capacity = await capacity_of(client, arguments.seconds)
    loads = await measure_loads(client, capacity, arguments.seconds)
    overload = await client.poisson(_CHECKED["overload"] * capacity, arguments.seconds)
    return {"capacity": capacity, "loads": loads, "overload": overload.as_dict()}


def lines(document: Document) -> Iterator[str]:
    """Yield the tables."""
    service = document["service"]
    yield f"capacity {service['capacity']:.0f} queries/s, promise {service['promised_ms']:.1f} ms"
    columns = f"{'p50 ms':>10}{'p99 ms':>10}"
    yield f"{'load':>10}{columns}{'during bulk:':>16}{columns}{'bulk texts/s':>14}"
    yield f"{'none':>10}{'':56}{service['bulk_alone']:>14.0f}"
    for plain, during in zip(service["loads"], service["loads_during_bulk"], strict=True):
        yield (
            f"{plain['load']:>10.0%}{plain['p50_ms']:>10.1f}{plain['p99_ms']:>10.1f}{'':16}"
            f"{during['p50_ms']:>10.1f}{during['p99_ms']:>10.1f}{during['bulk']:>14.0f}"
        )
    for name in _CHECKED:
        yield f"{name}, during bulk: {service[name]}"
    batch = document["batch_texts_per_second"]
    yield f"texts/s of a run: {document['run_texts_per_second']:.0f}, of a batch: {batch:.0f}"
    for name, peer in document["peers"].items():
        loads = ", ".join(f"{each['load']:.0%} {each['p99_ms']:.1f}" for each in peer["loads"])
        yield f"{name}: {peer['capacity']:.0f} queries/s, p99 in ms at {loads}"
        yield f"{name}, overload: {peer['overload']}"


def targets(document: Document) -> Iterator[Target]:
    """Yield the aims."""
    service = document["service"]
    place = _LOADS.index(_USUAL)
    during = service["loads_during_bulk"][place]
    longest = 2 * service["loads"][place]["p99_ms"] + 5
    yield at_most("p99 in ms of queries at 30 % during bulk", longest, during["p99_ms"])

    for name in _CHECKED:
        late = service[name]["late"] / max(1, service[name]["statuses"].get(200, 0))
        yield at_most(f"late answers of accepted requests at {name}, of all", 0.001, late)

    overload = service["overload"]
    bulk = service["bulk_alone"]
    share = during["bulk"] / bulk / (1 - _USUAL)
    yield Target("bulk during queries at 30 %, of (1 - load) of its own rate", 0.9, share)
    yield Target("bulk under overload, of its own rate", 0.1, overload["bulk"] / bulk)
    goodput = overload["answered_per_second"] / service["capacity"]
    yield Target("answered at four times the capacity, of the capacity", 0.9, goodput)
    yield at_most("growth of memory in MB", 50, service["grown_mb"])
    yield at_most("CPU of a request in ms without its pass", 0.3, service["cpu_ms_of_a_request"])
    of_run = document["batch_texts_per_second"] / document["run_texts_per_second"]
    yield Target("texts/s of a batch, of a run's", 0.85, of_run)


def draw(service: Document, path: Path) -> None:
    """Draw the latency over the load, without and with bulk work, below the promise."""
    import matplotlib as mpl  # of an extra, and nothing else here needs it
    from matplotlib.figure import Figure

    from benchmarks.evaluation.charts import OURS, STYLE, THEIRS

    with mpl.rc_context(STYLE):
        figure = Figure((6.0, 3.4))
        axes = figure.subplots()
        sides = (
            ("alone", THEIRS, service["loads"]),
            ("during bulk work", OURS, service["loads_during_bulk"]),
        )
        for name, color, loads in sides:
            shares = [100 * each["load"] for each in loads]
            for quantile, style in (("p50", "o--"), ("p99", "o-")):
                values = [each[f"{quantile}_ms"] for each in loads]
                axes.plot(shares, values, style, color=color, label=f"{quantile}, {name}")
        axes.axhline(service["promised_ms"], color="black", linewidth=0.8, label="promise")
        axes.set(xlabel="queries, % of the capacity", ylabel="ms", yscale="log")
        axes.legend(fontsize=7)
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    options = Options(__doc__)
    options.add_size("--seconds", 20.0, 1.0, "of each load")
    options.add_size("--requests", 20_000, 200, "that the promise is checked with")
    options.add_argument("--model", help="(MiniLM; with --quick a hash)")
    options.add_argument("--infinity", metavar="COMMAND", help="path of infinity_emb, a peer")
    options.add_argument("--chart", type=Path, metavar="FILE", help="SVG of latency over load")
    arguments = options.parse_args()
    if arguments.model is None:
        arguments.model = "hash://16" if arguments.quick else EncodingSpec().model
    libraries = ("openvino", "torch", "sentence-transformers", "uvicorn")
    document = start_document("serve", arguments, libraries) | measure(arguments)
    if arguments.chart:
        draw(document["service"], arguments.chart)
    print_document(document, lines, targets)


if __name__ == "__main__":
    main()
