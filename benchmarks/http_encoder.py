"""Runs with an encoder behind HTTP, next to 64 concurrent calls of the openai client.

    python -m benchmarks.http_encoder [--texts 3000] [--rounds 3] [--servers serve,hash]
        [--infinity COMMAND] [--quick]

Servers are `surge-dagster serve` with MiniLM and with a stand-in that makes vectors of hashes, and
infinity-emb, which needs its own environment: `COMMAND` is the path of `infinity_emb` there. A run
reads the texts, sends them, and publishes files; the client only sends them. All sides send texts
of the same lengths to the same server in turns. The CPU time of a text, that of the server
included, shows the same on a machine that others use.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

import openai
import psutil

from benchmarks.encode.inputs import short_workload
from benchmarks.harness import (
    Document,
    Options,
    Target,
    in_own_process,
    in_turns,
    median_ratio,
    print_document,
    say,
    seconds_of,
    serving,
    start_document,
    temporary_folder,
)
from benchmarks.paced_runs import drawn_partitions, embed
from surge_dagster import EncoderPool, EncodingSpec, open_store
from surge_dagster.engine.endpoint.endpoint import Endpoint
from surge_dagster.engine.output.spaces import claim_space

_CALLS = 64
_TEXTS_OF_A_CALL = (1, 32, 256)
_MOST_CALLS = 400
_PARTITIONS = 10
_SERVERS = {"serve": EncodingSpec().model, "hash": "hash://384"}


@dataclass(frozen=True, slots=True)
class Rate:
    """What a side took.

    Attributes:
        cpu_ms: of a text, of the side and of the server.
    """

    texts_per_second: float
    cpu_ms: float


def measure(arguments: argparse.Namespace) -> Document:
    """Measure each server."""
    sizes = (arguments.texts, arguments.rounds)
    servers: dict[str, Document] = {}
    with temporary_folder() as folder:
        for name in arguments.servers:
            say(name)
            with served(folder / name, _SERVERS[name]) as (url, pid):
                # A run samples the memory of its children, which a server usually is not.
                servers[name] = in_own_process(measure_server, url, "current", pid, *sizes)
    if arguments.infinity:
        say("infinity")
        with infinity(arguments.infinity) as (url, pid):
            servers["infinity"] = in_own_process(measure_server, url, "minilm", pid, *sizes)
    return {"servers": servers}


@contextmanager
def served(folder: Path, model: str) -> Iterator[tuple[str, int]]:
    """Yield the base URL and the process of `surge-dagster serve` with a model."""
    claim_space(open_store(folder), EncodingSpec(model).resolve())
    command = [sys.executable, "-m", "surge_dagster", "serve", str(folder), "--port"]
    with serving(command, "/readyz") as (url, server):
        yield f"{url}/documents/v1", server.pid


@contextmanager
def infinity(command: str) -> Iterator[tuple[str, int]]:
    """Yield the base URL and the process of infinity-emb with MiniLM."""
    model = EncodingSpec().resolve().model_path
    words = "v2 --served-model-name minilm --url-prefix /v1 --host 127.0.0.1 --engine torch"
    options = [*words.split(), "--device", "cpu", "--model-id", model, "--port"]
    environment = os.environ | {"DO_NOT_TRACK": "1"}  # it would send usage elsewhere
    with serving([command, *options], "/health", env=environment) as (url, server):
        yield f"{url}/v1", server.pid


def measure_server(url: str, model: str, server: int, texts: int, rounds: int) -> Document:
    """Return the rates of each side, by rounds."""
    with EncoderPool(EncodingSpec(model, endpoint=Endpoint(url=url))) as pool:
        pool.start()
        processes = [psutil.Process(), psutil.Process(server)]
        sides: dict[str, Callable[[], Rate]] = {}
        run(pool, texts)  # workers of a server start with the first texts
        sides["run"] = partial(rate_of, partial(run, pool, texts), processes, texts)
        for of_call in _TEXTS_OF_A_CALL:
            drawn = short_workload(min(texts, _MOST_CALLS * of_call)).texts
            send = partial(call, url, model, drawn, of_call)
            sides[f"openai {of_call}"] = partial(rate_of, send, processes, len(drawn))
        rates = in_turns(sides, rounds)
    document = {name: [asdict(rate) for rate in of_side] for name, of_side in rates.items()}
    say(f"  {document}")
    return document


def rate_of(side: Callable[[], object], processes: Sequence[psutil.Process], texts: int) -> Rate:
    """Measure a side."""
    begun = cpu_seconds(processes)
    seconds = seconds_of(side)
    return Rate(texts / seconds, 1e3 * (cpu_seconds(processes) - begun) / texts)


def cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    """Return the CPU time of processes and their children."""
    seconds = 0.0
    for process in processes:
        for each in (process, *process.children(recursive=True)):
            seconds += sum(each.cpu_times()[:2])
    return seconds


def run(pool: EncoderPool, texts: int) -> None:
    """Embed partitions of equal size."""
    with temporary_folder() as folder:
        embed(pool, drawn_partitions([texts // _PARTITIONS] * _PARTITIONS), open_store(folder))


def call(url: str, model: str, texts: list[str], of_call: int) -> None:
    """Send texts by concurrent calls of the openai client."""
    asyncio.run(_send(url, model, texts, of_call))


async def _send(url: str, model: str, texts: list[str], of_call: int) -> None:
    calls = asyncio.Semaphore(_CALLS)
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=100) as client:

        async def send(start: int) -> None:
            async with calls:
                part = texts[start : start + of_call]
                await client.embeddings.create(model=model, input=part)

        async with asyncio.TaskGroup() as group:
            for start in range(0, len(texts), of_call):
                group.create_task(send(start))


def lines(document: Document) -> Iterator[str]:
    """Yield the table, of medians."""
    yield f"{'server':10}{'side':12}{'texts/s':>10}{'CPU ms of a text':>18}"
    for server, sides in document["servers"].items():
        for side, rates in sides.items():
            cpu_ms = middle(rates, "cpu_ms")
            yield f"{server:10}{side:12}{middle(rates, 'texts_per_second'):>10,.0f}{cpu_ms:>18.2f}"


def middle(rates: Iterable[Mapping[str, float]], value: str) -> float:
    """Return the median of a value over the rounds."""
    return median(rate[value] for rate in rates)


def targets(document: Document) -> Iterator[Target]:
    """Yield the aims: a run compared with the fastest way to call the server."""
    for server, sides in document["servers"].items():
        speeds = {
            side: [rate["texts_per_second"] for rate in rates] for side, rates in sides.items()
        }
        ours = speeds.pop("run")
        best = max(speeds, key=lambda side: median(speeds[side]))
        ratio = median_ratio(ours, speeds[best])
        yield Target(f"{server}: texts/s of a run, of those of {best}", 1.0, ratio)


def main() -> None:
    options = Options(__doc__)
    options.add_size("--texts", 3_000, 300, "of each side")
    options.add_size("--rounds", 5, 1)
    options.add_names("--servers", _SERVERS, quick=["hash"])
    options.add_argument("--infinity", metavar="COMMAND", help="path of infinity_emb, a server")
    arguments = options.parse_args()
    libraries = ("openai", "httpx", "uvicorn", "openvino", "torch")
    document = start_document("http_encoder", arguments, libraries) | measure(arguments)
    print_document(document, lines, targets)


if __name__ == "__main__":
    main()
