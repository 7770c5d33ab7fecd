"""Load: clients that ask a service without pause, and judge every answer."""

from __future__ import annotations

import base64
import json
import random
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException

import numpy as np

from surge_dagster.engine.encoder.worker.backends import hash_vectors
from surge_dagster.engine.model.spec import EncodingSpec
from tests.waiting import until

SPEC = EncodingSpec("hash://16", document_prompt="keep: ", query_prompt="find: ")
_PATHS = {"query": "/v1/embeddings", "document": "/documents/v1/embeddings"}
_PROMPTS = {"query": SPEC.query_prompt, "document": SPEC.document_prompt}
_CLIENTS = 3  # of each side
_LONGEST_SECONDS = 30.0  # for an answer
_REST_SECONDS = 0.02  # of a client that was not answered


@dataclass(frozen=True, slots=True)
class Answer:
    """Vectors: when they were asked for, in monotonic seconds, and the space that is named."""

    sent_at: float
    space: str


class Load:
    """Threads that ask for vectors of the current space, each over a connection that it keeps.

    Args:
        spaces: dimensions of those that may answer, which are `SPEC` with another model, by name.

    Attributes:
        answers: with the right vectors, by the side that was asked.
        wrong: what became of others, except of those that were told when to come back.
    """

    def __init__(self, address: str, spaces: Mapping[str, int]) -> None:
        self._address = address
        self._spaces = spaces
        self.answers: dict[str, list[Answer]] = {side: [] for side in _PATHS}
        self.wrong = list[str]()
        self._ended = threading.Event()
        self._clients = list[threading.Thread]()
        for side in _PATHS:
            for number in range(_CLIENTS):
                client = threading.Thread(target=self._ask, args=(side, random.Random(number)))
                self._clients.append(client)

    def __enter__(self) -> Load:
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for client in self._clients:
            client.join()

    def until_answered(self, *sides: str) -> None:
        """Until a request of each side (default: both) is answered that was sent after now."""
        now = time.monotonic()
        for side in sides or _PATHS:
            until(lambda side=side: self.wrong or self._is_answered(side, now))

    def _is_answered(self, side: str, since: float) -> bool:
        return any(answer.sent_at > since for answer in self.answers[side][-_CLIENTS:])

    def has_answer_of(self, space: str) -> bool:
        """Whether the newest answer to a query is of this space."""
        answers = self.answers["query"]
        return bool(answers) and answers[-1].space == space

    def _ask(self, side: str, rng: random.Random) -> None:
        connection = HTTPConnection(self._address, timeout=_LONGEST_SECONDS)
        while not self._ended.is_set():
            texts = [f"{rng.random()} " * rng.randint(1, 5) for _ in range(rng.randint(1, 4))]
            body = {"model": "current", "input": texts, "encoding_format": "base64"}
            sent_at = time.monotonic()
            try:
                connection.request(
                    "POST", _PATHS[side], json.dumps(body), {"content-type": "application/json"}
                )
                answer = connection.getresponse()
                content = answer.read()
            except (OSError, HTTPException) as error:
                connection.close()
                self.wrong.append(f"{side}: {error!r} after {time.monotonic() - sent_at:.1f} s")
                continue
            if answer.status in (429, 503) and "retry-after-ms" in answer.headers:
                self._ended.wait(_REST_SECONDS)
                continue
            space = answer.headers["surge-space"]
            if answer.status == 200 and self._is_right(side, texts, space or "", content):
                self.answers[side].append(Answer(sent_at, space or ""))
            else:
                self.wrong.append(f"{side}: {answer.status} {texts} {content[:500]!r}")
        connection.close()

    def _is_right(self, side: str, texts: list[str], space: str, content: bytes) -> bool:
        document = json.loads(content)
        vectors = [
            np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in document["data"]
        ]
        expected = hash_vectors([f"{_PROMPTS[side]}{text}" for text in texts], self._spaces[space])
        return document["model"] == space and np.array_equal(vectors, expected)
