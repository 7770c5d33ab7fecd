"""The encoder service on a GPU, over HTTP."""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.gpu.bench import Bench
from benchmarks.harness import serving
from benchmarks.paced_runs import embed
from benchmarks.synthetic import build_synthetic_catalog
from surge_dagster import open_source, open_store

if TYPE_CHECKING:
    from benchmarks.serve_client import Client

_BULK_TEXTS = 1_024  # of a request
_BULK_CALLS = 8
# A service that hangs, or refuses all documents, must not take the time of later stages.
_MOST_SECONDS = 90.0


def http(bench: Bench) -> None:
    """MiniLM: milliseconds of queries of one and 64 texts of 57 tokens, documents per second, and
    the processor time that the service's own process takes for a text: tokens, JSON, the lanes."""
    # Packages of the client and of the service may be missing, and nothing else here needs them.
    from benchmarks.serve import with_client

    for module in ("commands.serve", "service.server"):
        import_module(f"surge_dagster.{module}")
    if not bench.has_time(60, "http"):
        return
    output = _small_output(bench)
    bench.close_encoders()
    command = [sys.executable, "-m", "surge_dagster", "serve", str(output)]
    command += ["--yes", "--devices", str(bench.device), "--precision", bench.precision, "--port"]
    texts = bench.texts(bench.size(57, 11), bench.size(8_192, 128)).to_pylist()
    with serving(command, "/readyz") as (url, server):
        with_client(url, partial(measure, bench, server), texts)


def _small_output(bench: Bench) -> Path:
    folder = bench.folder / "served"
    build_synthetic_catalog(folder / "catalog", texts=100, partitions=4)
    source = open_source(folder / "catalog")
    embed(bench.encoders("minilm", "auto", 1), source, open_store(folder / "output"))
    return folder / "output"


async def measure(
    bench: Bench, server: psutil.Process, client: Client, most_seconds: float = _MOST_SECONDS
) -> None:
    """Report queries, and then documents.

    Raises:
        TimeoutError: the service took more seconds than that.
    """
    async with asyncio.timeout(most_seconds):
        await _measure_queries(bench, server, client)
        await _measure_documents(bench, server, client)


async def _measure_queries(bench: Bench, server: psutil.Process, client: Client) -> None:
    seconds = bench.size(4, 1)
    for texts in (1, bench.size(64, 2)):
        await client.closed(seconds / 4, 1, texts)
        begun = _cpu_seconds(server)
        answers = await client.closed(seconds, 1, texts)
        requests = sum(answers["statuses"].values())
        cpu_us = 1e6 * (_cpu_seconds(server) - begun) / requests / texts
        facts: dict[str, Any] = {"texts": texts, "statuses": str(answers["statuses"])}
        times = {quantile: answers[quantile] for quantile in ("p50_ms", "p99_ms")}
        bench.say("http", **facts, **times, server_cpu_us_per_text=cpu_us)
        if 200 not in answers["statuses"]:
            bench.missed.append(f"http: queries of {texts} texts are refused")


async def _measure_documents(bench: Bench, server: psutil.Process, client: Client) -> None:
    seconds = bench.size(4, 1)
    size = bench.size(_BULK_TEXTS, 4)
    async with client.bulk(size, bench.size(_BULK_CALLS, 2)) as bulk:
        await asyncio.sleep(seconds / 4)
        bulk.restart()
        begun = _cpu_seconds(server)
        await asyncio.sleep(seconds)
        rate = bulk.rate()
        cpu_us = 1e6 * (_cpu_seconds(server) - begun) / max(1, bulk.texts)
        bench.say("http", documents_per_s=rate, server_cpu_us_per_text=cpu_us)
        answers = await client.closed(seconds, 1)
        times = {quantile: answers[quantile] for quantile in ("p50_ms", "p99_ms")}
        bench.say("http", texts=1, beside_bulk=True, **times)


def _cpu_seconds(server: psutil.Process) -> float:
    """Return what the process itself has used; its workers are processes of their own."""
    return sum(server.cpu_times()[:2])
