"""The input file of a batch: its lines, and the partition that an `EmbeddingRun` reads from it.

A row of the partition is one text of a line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import pyarrow as pa
from pydantic import BaseModel, Field, ValidationError

from surge_dagster.engine.sources.partition import Partition, RowBatch
from surge_dagster.service.errors import Refusal, invalid
from surge_dagster.service.requests import EmbeddingRequest

Endpoint = Literal["/v1/embeddings", "/documents/v1/embeddings"]
_LARGEST_LINE_BYTES = 8 << 20  # as of the body of a request
_MOST_PROBLEMS = 100


class BatchError(BaseModel, frozen=True):
    """Why a batch has failed, and the line that is wrong, if there is one."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class Line(BaseModel, strict=True):
    """A request of a batch."""

    custom_id: Annotated[str, Field(min_length=1, max_length=512)]
    method: Literal["POST"]
    url: Endpoint
    body: EmbeddingRequest


def read_raw_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the number and content of each line that is not blank."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if raw.strip():
                yield number, raw


def parse_line(raw: bytes) -> Line:
    """Return a line; raises `Refusal` if it is wrong."""
    if len(raw) > _LARGEST_LINE_BYTES:
        message = f"The line has more than {_LARGEST_LINE_BYTES:,} bytes. Divide its texts."
        raise Refusal(400, "request_too_large", message)
    try:
        return Line.model_validate_json(raw)
    except ValidationError as error:
        raise invalid(error.errors(include_url=False, include_context=False), "line") from None


def check_lines(path: Path, check: Callable[[Line], None]) -> tuple[int, list[BatchError]]:
    """Return how many lines a file has, and what is wrong with them; after some problems no more
    are read.

    Args:
        check: raises `Refusal` for a line that cannot be answered.
    """
    problems = list[BatchError]()
    numbers = dict[str, int]()  # by custom_id
    total = 0
    for number, raw in read_raw_lines(path):
        total += 1
        try:
            line = parse_line(raw)
            check(line)
            first_number = numbers.setdefault(line.custom_id, number)
            if first_number != number:
                message = (
                    f"The custom_id {line.custom_id!r:.100} is that of line {first_number}, too. "
                    "Give each line its own."
                )
                raise Refusal(400, "duplicate_custom_id", message, "custom_id")
        except Refusal as error:
            problems.append(
                BatchError(code=error.code, message=str(error), param=error.param, line=number)
            )
            if len(problems) == _MOST_PROBLEMS:
                break
    return total, problems


def partition_of(path: Path) -> Partition:
    version = path.name  # a file of a client never changes
    return Partition("batch", version, partial(_read_rows, path), lambda: version)


def _read_rows(path: Path) -> Iterator[RowBatch]:
    row = 0
    for _, raw in read_raw_lines(path):
        texts = parse_line(raw).body.input
        ids = pa.array(range(row, row + len(texts)), pa.int64())
        yield RowBatch(ids, pa.array(texts, pa.large_string()))
        row += len(texts)
