"""Load: clients that ask a service without pause, and judge every answer."""

from __future__ import annotations

import base64
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException

import numpy as np

from surge_dagster.engine.encoder.worker.backends.hash_backend import hash_vectors
from surge_dagster.engine.model.spec import EncodingSpec

SPEC = EncodingSpec("hash://16", document_prompt="keep: ", query_prompt="find: ")
PATHS = {"query": "/v1/embeddings", "document": "/documents/v1/embeddings"}
CLIENTS = 3  # of each side
_LONGEST_SECONDS = 30.0  # for an answer
_MOST_WAIT_SECONDS = 0.05  # before another request, after one was refused


@dataclass(frozen=True, slots=True)
class Answer:
    """One with vectors: when it was asked for and received, in monotonic seconds, and the space that it names."""

    sent_at: float
    received_at: float
    space: str


class Load:
    """Threads that send requests for `current`, one after the other, each over a connection that it keeps.

    Args:
        spaces: that may answer: `SPEC` with these models, by the name of the space.
        may_break: whether connections may be refused or end, because the service is killed.

    Attributes:
        answers: with vectors, by the side that was asked, in the order in which they came to each client.
        refused: answers that tell a client to come back, by status.
        broken: connections that were refused, or ended before an answer.
        wrong: what became of all other requests.
    """

    def __init__(self, address: str, spaces: Mapping[str, int], *, may_break: bool = False) -> None:
        self._address, self._spaces, self._may_break = address, spaces, may_break
        self.answers: dict[str, list[Answer]] = {side: [] for side in PATHS}
        self.refused = Counter[int]()
        self.broken = 0
        self.wrong = list[str]()
        self._ended = threading.Event()
        self._clients = [
            threading.Thread(target=self._ask, args=(side, random.Random(number)))
            for side in PATHS
            for number in range(CLIENTS)
        ]

    def __enter__(self) -> Load:
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for client in self._clients:
            client.join()

    def _ask(self, side: str, rng: random.Random) -> None:
        connection = HTTPConnection(self._address, timeout=_LONGEST_SECONDS)
        while not self._ended.is_set():
            texts = [f"{rng.random()} " * rng.randint(1, 5) for _ in range(rng.randint(1, 4))]
            body = {"model": "current", "input": texts, "encoding_format": "base64"}
            sent_at = time.monotonic()
            try:
                connection.request("POST", PATHS[side], json.dumps(body), {"content-type": "application/json"})
                answer = connection.getresponse()
                self._judge(side, texts, sent_at, answer.status, answer.headers, answer.read())
            except (OSError, HTTPException) as error:
                connection.close()
                if not self._may_break or not isinstance(error, ConnectionError | HTTPException):
                    self.wrong.append(f"{side}: {error!r} after {time.monotonic() - sent_at:.1f} s")
                self.broken += 1
                self._ended.wait(_MOST_WAIT_SECONDS)
        connection.close()

    def _judge(
        self, side: str, texts: list[str], sent_at: float, status: int, headers: Mapping[str, str], body: bytes
    ) -> None:
        if status in (429, 503) and "retry-after-ms" in headers:
            self.refused[status] += 1
            self._ended.wait(min(_MOST_WAIT_SECONDS, float(headers["retry-after-ms"]) / 1000))
            return
        if status != 200:
            self.wrong.append(f"{side}: {status} {body[:500]!r}")
            return
        document, space = json.loads(body), headers["surge-space"]
        found = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in document["data"]]
        prompt = SPEC.query_prompt if side == "query" else SPEC.document_prompt
        expected = hash_vectors([f"{prompt}{text}" for text in texts], self._spaces.get(space, 1))
        if document["model"] != space or not np.array_equal(np.array(found), expected):
            self.wrong.append(f"{side}: vectors of {len(found[0])} dimensions of {texts[:1]} are not those of {space}")
            return
        self.answers[side].append(Answer(sent_at, time.monotonic(), space))
