"""The client of the service's benchmark: queries in an open or a closed loop, bulk work, and
batches."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np

from benchmarks.harness import Document

_QUERIES = "/v1/embeddings"
_DOCUMENTS = "/documents/v1/embeddings"
_BULK_TEXTS = 256
_BULK_CALLS = 3
_POLL_SECONDS = 0.05


class Answers:
    """Statuses of requests, and the seconds of those that were answered with vectors.

    Attributes:
        seconds: in which the requests were sent.
    """

    def __init__(self, seconds: float) -> None:
        self.begun = time.monotonic()
        self.seconds = seconds
        self.statuses: Counter[int] = Counter()
        self.latencies: list[float] = []

    def add(self, status: int, seconds: float) -> None:
        self.statuses[status] += 1
        if status == 200:
            self.latencies.append(seconds)

    def late_for(self, promised_seconds: float) -> int:
        return int(np.sum(np.array(self.latencies) > promised_seconds))

    def as_dict(self) -> Document:
        p50, p99 = (1e3 * np.percentile(self.latencies or [0.0], [50, 99])).tolist()
        return {
            "p50_ms": p50,
            "p99_ms": p99,
            "statuses": dict(self.statuses),
            "answered_per_second": self.statuses[200] / self.seconds,
        }


class Bulk:
    """Texts of bulk work that were answered, counted anew by `restart`."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.begun = time.monotonic()
        self.texts = 0

    def rate(self) -> float:
        return self.texts / (time.monotonic() - self.begun)


class Client:
    """Of one service."""

    def __init__(self, session: aiohttp.ClientSession, url: str, texts: list[str]) -> None:
        self._session = session
        self._url = url
        self._texts = texts

    async def poisson(self, rate: float, seconds: float, seed: int = 0) -> Answers:
        """Send single queries at times drawn for this rate per second."""
        count = max(1, round(rate * seconds))
        pauses = np.random.default_rng(seed).exponential(1 / rate, count)
        answers = Answers(seconds)

        async def query(number: int, due: float) -> None:
            status = await self._embed(_QUERIES, self._texts[number % len(self._texts)])
            answers.add(status, time.monotonic() - due)

        async with asyncio.TaskGroup() as tasks:
            for number, due in enumerate((answers.begun + np.cumsum(pauses)).tolist()):
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                tasks.create_task(query(number, due))
            answers.seconds = time.monotonic() - answers.begun
        return answers

    async def closed(self, seconds: float, at_once: int, texts: int = 1) -> Document:
        """Send queries so that a fixed number is always waiting for its answer.

        Args:
            texts: of a query.
        """
        answers = Answers(seconds)

        async def query_again(first: int) -> None:
            number = first
            while time.monotonic() < answers.begun + seconds:
                first_text = number * texts % (len(self._texts) - texts + 1)
                query = self._texts[first_text : first_text + texts]
                sent = time.monotonic()
                status = await self._embed(_QUERIES, query[0] if texts == 1 else query)
                answers.add(status, time.monotonic() - sent)
                number += at_once

        async with asyncio.TaskGroup() as tasks:
            for first in range(at_once):
                tasks.create_task(query_again(first))
        return answers.as_dict()

    @contextlib.asynccontextmanager
    async def bulk(self, texts: int = _BULK_TEXTS, calls: int = _BULK_CALLS) -> AsyncIterator[Bulk]:
        """Encode documents without a pause until the end.

        Args:
            texts: of a request.
            calls: requests at a time.
        """
        done = Bulk()

        async def encode() -> None:
            while True:
                if await self._embed(_DOCUMENTS, self._texts[:texts]) == 200:
                    done.texts += texts
                else:
                    await asyncio.sleep(_POLL_SECONDS)

        encoding = [asyncio.create_task(encode()) for _ in range(calls)]
        try:
            while not done.texts:  # its worker loads the model first
                await asyncio.sleep(_POLL_SECONDS)
            done.restart()
            yield done
        finally:
            for task in encoding:
                task.cancel()
            await asyncio.gather(*encoding, return_exceptions=True)

    async def batch(self, texts: list[str]) -> float:
        """Return the lines per second of a batch, from when it is made until it is completed."""
        lines = []
        for number, text in enumerate(texts):
            request = {"custom_id": str(number), "method": "POST", "url": _DOCUMENTS}
            lines.append(json.dumps(request | {"body": {"model": "current", "input": text}}))
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", "\n".join(lines).encode(), filename="batch.jsonl")
        file = await self._json("POST", "/v1/files", data=form)

        settings = {"endpoint": _DOCUMENTS, "completion_window": "24h"}
        begun = time.monotonic()
        batch = await self._json(
            "POST", "/v1/batches", json=settings | {"input_file_id": file["id"]}
        )
        while batch["status"] in ("validating", "in_progress", "finalizing"):
            await asyncio.sleep(_POLL_SECONDS)
            batch = await self._json("GET", f"/v1/batches/{batch['id']}")
        if batch["request_counts"]["completed"] != len(texts):
            raise RuntimeError(f"The batch did not complete: {batch}")
        return len(texts) / (time.monotonic() - begun)

    async def promised_seconds(self) -> float:
        model = await self._json("GET", "/v1/models/current")
        return model["promise"]["promised_seconds"]

    async def _embed(self, path: str, texts: str | list[str]) -> int:
        """Return the status of a request."""
        body = {"model": "current", "input": texts, "encoding_format": "base64"}
        async with self._session.post(self._url + path, json=body) as answer:
            await answer.read()
            return answer.status

    async def _json(self, method: str, path: str, **options: Any) -> Document:
        async with self._session.request(method, self._url + path, **options) as answer:
            return await answer.json()
