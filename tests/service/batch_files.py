"""Files of batches, and what is read from their answers, for tests of batches."""

from __future__ import annotations

import io
import json
from base64 import b64decode
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from surge_dagster.engine.errors import Cancelled
from surge_dagster.service.batch_lines import Batch, BatchRequest
from surge_dagster.service.batches import Batches
from surge_dagster.service.errors import TooLong
from surge_dagster.service.lane import Encoded
from tests.service.fake_spaces import LONGEST, FakeLane, FakeSpaces

QUERIES, DOCUMENTS = "/v1/embeddings", "/documents/v1/embeddings"


@dataclass
class Lane(FakeLane):
    """Refuses what is too long, and fails its next requests, each in its own way."""

    waiting_tokens: int = 0
    failures: list[Exception] = field(default_factory=list)
    late_failures: list[Exception] = field(default_factory=list)

    def accept(self, texts: Sequence[str], *, truncate: bool = False, **_: Any) -> Future[Encoded]:
        if self.failures:
            raise self.failures.pop(0)
        rows = [row for row, text in enumerate(texts) if len(text.split()) > LONGEST]
        if rows and not truncate:
            raise TooLong(rows, LONGEST)
        self.fails_later = self.late_failures.pop(0) if self.late_failures else None
        return super().accept(texts, truncate=truncate)


class Spaces(FakeSpaces):
    """One space with such lanes."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = Lane(self.only.queries.space, self.only.queries.promise)
        self.documents = Lane(self.only.space)
        self.only.queries, self.only.documents = self.queries, self.documents


def line(custom_id: str, text: str | list[str] = "a text", url: str = QUERIES, **body: Any) -> str:
    body = {"model": "current", "input": text} | body
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def uploaded(batches: Batches, lines: Sequence[str | bytes]) -> str:
    content = b"\n".join(each.encode() if isinstance(each, str) else each for each in lines)
    return batches.files.upload("in.jsonl", "batch", io.BytesIO(content)).id


def made(batches: Batches, lines: Sequence[str | bytes], task: Any = "document") -> Batch:
    request = BatchRequest(
        input_file_id=uploaded(batches, lines), endpoint=QUERIES, completion_window="24h"
    )
    return batches.create(request, task)


def run(batches: Batches, batch: Batch) -> Batch:
    with suppress(Cancelled):  # it has ended before
        batches.run(batch.id)
    return batches.records.get(batch.id)


def results(batches: Batches, batch: Batch) -> tuple[list[Any], list[Any]]:
    """The lines of the output and of the error file."""
    found = []
    for id in (batch.output_file_id, batch.error_file_id):
        lines = batches.files.content(id).read_text().splitlines() if id else []
        assert not id or batches.files.get(id).bytes == batches.files.content(id).stat().st_size > 0
        found.append([json.loads(each) for each in lines])
    return found[0], found[1]


def ids(lines: Sequence[Any]) -> list[str]:
    return [each["custom_id"] for each in lines]


def vector(answer: Any, row: int = 0) -> list[float]:
    return numbers(answer["response"]["body"]["data"][row]["embedding"])


def numbers(found: str | list[float]) -> list[float]:
    return np.frombuffer(b64decode(found), "<f4").tolist() if isinstance(found, str) else found
