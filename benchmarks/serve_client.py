"""The client of the service's benchmark: queries in an open or a closed loop, bulk work, and
batches."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import aiohttp
import numpy as np

from benchmarks.harness import Document

_QUERIES, _DOCUMENTS = "/v1/embeddings", "/documents/v1/embeddings"
BULK_TEXTS, _BULK_CALLS = 256, 3


@dataclass(slots=True)
class Answers:
    """Statuses and seconds of requests; the seconds are of those that were answered with vectors."""

    seconds: float
    statuses: Counter[int] = field(default_factory=Counter)
    latencies: list[float] = field(default_factory=list)

    def as_dict(self) -> Document:
        p50, p99, longest = (
            np.percentile(self.latencies, [50, 99, 100]) * 1e3 if self.latencies else [0.0] * 3
        )
        done = {"p50_ms": float(p50), "p99_ms": float(p99), "longest_ms": float(longest)}
        return done | {
            "statuses": dict(self.statuses),
            "answered_per_second": self.statuses[200] / self.seconds,
        }


class Client:
    """Of one service."""

    def __init__(self, session: aiohttp.ClientSession, url: str, texts: list[str]) -> None:
        self._session, self._url, self._texts = session, url, texts

    async def ask(self, path: str, texts: str | list[str]) -> int:
        body = {"model": "current", "input": texts, "encoding_format": "base64"}
        async with self._session.post(self._url + path, json=body) as answer:
            await answer.read()
            return answer.status

    async def poisson(self, rate: float, seconds: float, seed: int = 0) -> Answers:
        """Single queries at times drawn for so many per second."""
        rng, loop = np.random.default_rng(seed), asyncio.get_running_loop()
        times = np.cumsum(rng.exponential(1 / rate, max(1, round(rate * seconds))))
        answers, begun = Answers(seconds), loop.time()

        async def query(number: int, due: float) -> None:
            status = await self.ask(_QUERIES, self._texts[number % len(self._texts)])
            answers.statuses[status] += 1
            if status == 200:
                answers.latencies.append(float(loop.time() - due))

        async with asyncio.TaskGroup() as tasks:
            for number, due in enumerate(begun + times):
                await asyncio.sleep(max(0.0, due - loop.time()))
                tasks.create_task(query(number, due))
            answers.seconds = loop.time() - begun
        return answers

    async def closed(self, seconds: float, at_once: int) -> Answers:
        """As many queries as are answered when so many are always under way."""
        loop = asyncio.get_running_loop()
        answers, begun = Answers(seconds), loop.time()

        async def ask_again(first: int) -> None:
            number = first
            while loop.time() < begun + seconds:
                sent = loop.time()
                status = await self.ask(_QUERIES, self._texts[number % len(self._texts)])
                answers.statuses[status] += 1
                answers.latencies.append(loop.time() - sent)
                number += at_once

        async with asyncio.TaskGroup() as tasks:
            for first in range(at_once):
                tasks.create_task(ask_again(first))
        return answers

    @contextlib.asynccontextmanager
    async def bulk(self) -> AsyncIterator[list[float]]:
        """Documents without a pause, meanwhile; gets the time at which each call was answered."""
        done: list[float] = []

        async def encode() -> None:
            while True:
                if await self.ask(_DOCUMENTS, self._texts[:BULK_TEXTS]) == 200:
                    done.append(time.monotonic())
                else:
                    await asyncio.sleep(0.05)

        encoding = [asyncio.create_task(encode()) for _ in range(_BULK_CALLS)]
        try:
            while not done:  # its worker loads the model first
                await asyncio.sleep(0.05)
            done.clear()
            yield done
        finally:
            for task in encoding:
                task.cancel()
            await asyncio.gather(*encoding, return_exceptions=True)

    async def batch(self, texts: list[str]) -> float:
        """Lines per second of a batch of documents, from when it is made until it is completed."""
        requests = (
            {
                "custom_id": str(number),
                "method": "POST",
                "url": _DOCUMENTS,
                "body": {"model": "current", "input": text},
            }
            for number, text in enumerate(texts)
        )
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field(
            "file", "\n".join(map(json.dumps, requests)).encode(), filename="batch.jsonl"
        )
        async with self._session.post(f"{self._url}/v1/files", data=form) as answer:
            file = await answer.json()
        asked = {"input_file_id": file["id"], "endpoint": _DOCUMENTS, "completion_window": "24h"}
        begun = time.monotonic()
        async with self._session.post(f"{self._url}/v1/batches", json=asked) as answer:
            batch = await answer.json()
        while batch["status"] in ("validating", "in_progress", "finalizing"):
            await asyncio.sleep(0.1)
            async with self._session.get(f"{self._url}/v1/batches/{batch['id']}") as answer:
                batch = await answer.json()
        if batch["request_counts"] != {"total": len(texts), "completed": len(texts), "failed": 0}:
            raise SystemExit(f"the batch has ended so: {batch}")
        return len(texts) / (time.monotonic() - begun)

    async def broken_promises(self) -> float:
        async with self._session.get(self._url + "/metrics") as answer:
            lines = (await answer.text()).splitlines()
        return sum(
            float(line.split()[-1])
            for line in lines
            if line.startswith("surge_promise_broken_total")
        )

    async def promised_seconds(self) -> float:
        async with self._session.get(self._url + "/v1/models/current") as answer:
            return (await answer.json())["promise"]["promised_seconds"]
