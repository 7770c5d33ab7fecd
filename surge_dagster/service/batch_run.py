"""One batch as an `EmbeddingRun` over its file, whose rows are the texts of its lines.

Some lines each are a partition. A partition with a text that cannot be encoded is refused, and its
lines get an error; the others are published in a scratch output. A batch goes on where it was when
a service ended. At the end the results are written from that output, so each line is answered once.

Workers of its own encode a batch, at the niceness of bulk work: a batch goes on in its space after
a switch to another one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, Field, ValidationError

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.errors import Cancelled, TransientError
from surge_dagster.engine.files.formats import file_name, open_published
from surge_dagster.engine.files.rows import matrix_of
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.report import Failure
from surge_dagster.engine.sources.partition import Partition, RowBatch
from surge_dagster.engine.store.local_store import LocalStore
from surge_dagster.service.embeddings import (
    EmbeddingRequest,
    embedding_json,
    empty_list,
    truncation_headers,
)
from surge_dagster.service.errors import Refusal, invalid, too_long
from surge_dagster.service.lane import TextTokens
from surge_dagster.service.spaces import converted

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


def read_raw_lines(
    path: Path, first: int = 1, offset: int = 0, lines: int | None = None
) -> Iterator[tuple[int, bytes]]:
    """Yield the number and content of each line that is not blank.

    Args:
        first, offset: number of the first line, and the byte at which it begins.
        lines: None: all that follow.
    """
    with path.open("rb") as file:
        file.seek(offset)
        for number, raw in enumerate(islice(file, lines), first):
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


@dataclass(frozen=True, slots=True)
class BatchFile:
    """A file of lines, in partitions of so many each."""

    path: Path
    lines_per_partition: int

    def partitions(self) -> Iterator[Partition]:
        offset = 0
        with self.path.open("rb") as file:
            for index, raw in enumerate(file):
                if index % self.lines_per_partition == 0:
                    read = partial(self._read_rows, index + 1, offset)
                    version = f"{self.lines_per_partition} lines"  # a client's file never changes
                    yield Partition(self.key_of(index + 1), version, read, partial(str, version))
                offset += len(raw)

    def key_of(self, number: int) -> str:
        """Return the key of the partition that has the line with this number."""
        return f"{(number - 1) // self.lines_per_partition:09}"

    def _read_rows(self, first: int, offset: int) -> Iterator[RowBatch]:
        row = 0
        for number, raw in read_raw_lines(self.path, first, offset, self.lines_per_partition):
            texts = parse_line(raw).body.input
            ids = pa.array(range(row, row + len(texts)), pa.int64())
            place = f"line {number}, text {{}}".format
            yield RowBatch(ids, pa.array(texts, pa.large_string()), place=place)
            row += len(texts)


def encode(
    file: BatchFile, scratch: Path, pool: EncoderPool, is_over: Callable[[], bool]
) -> dict[str, str]:
    """Encode all lines of a file, and return why partitions were refused, by key.

    Args:
        scratch: folder of the output that the vectors go to.
        is_over: whether to end early; what is encoded is kept there.

    Raises:
        Cancelled: `is_over()` was true.
        SurgeError: it is to be tried again.
    """
    reasons = dict[str, str]()
    store = LocalStore(scratch)
    partitions = file.partitions()
    run = EmbeddingRun(partitions, store, pool, include_text=False, task=pool.space.task)
    with closing(run.events()) as events:
        for event in events:
            if isinstance(event, Failure):
                if event.transient:
                    raise TransientError(event.reason)
                reasons[event.key] = event.reason
            if is_over():
                raise Cancelled
    return reasons


def results(
    file: BatchFile, reasons: Mapping[str, str], scratch: Path, pool: EncoderPool, space: Space
) -> Iterator[tuple[str, str]]:
    """Yield the file of each line, `output` or `error`, and its result in JSON.

    Args:
        reasons: why partitions were refused, by key.
    """
    tokenize = TextTokens(pool.space, pool.start())
    store = LocalStore(scratch)
    lines = read_raw_lines(file.path)
    for key, lines_of_partition in groupby(lines, lambda numbered: file.key_of(numbered[0])):
        rows = _read_rows(store, pool.space, key)
        for number, raw in lines_of_partition:
            line = parse_line(raw)
            try:
                if key in reasons:
                    raise _near_unusable_text(reasons[key])
                vectors, truncated = zip(*islice(rows, len(line.body.input)), strict=True)
                if any(truncated) and not line.body.truncate:
                    raise too_long(np.array(truncated), space.max_length)
            except Refusal as error:
                yield "error", _result(number, line, error.status, error.body(), {})
                continue

            lengths = tokenize(line.body.input).tokens
            tokens = int(np.minimum(lengths, space.max_length).sum())
            headers = truncation_headers(np.array(truncated))
            frame = _result(number, line, 200, empty_list(space.name, tokens), headers)
            found = converted(space, np.stack(vectors), line.body.dimensions)
            yield "output", "".join(embedding_json(frame, found, line.body.encoding_format))


def _near_unusable_text(reason: str) -> Refusal:
    message = (
        "A text of this line or of one near it cannot be encoded. Leave it out, and send the lines "
        f"of the error file again. {reason}"
    )
    return Refusal(400, "unusable_text", message, "input")


def _read_rows(store: LocalStore, space: Space, key: str) -> Iterator[tuple[np.ndarray, bool]]:
    """Yield the vectors of a partition, each with whether its text was truncated."""
    with open_published(store, space, file_name(space.name, key)) as file:
        for batch in file.read(columns=["truncated", "embedding"]):
            vectors = matrix_of(batch).astype(np.float32, copy=False)
            yield from zip(vectors, batch["truncated"].to_pylist(), strict=True)


def _result(number: int, line: Line, status: int, body: BaseModel, headers: dict[str, str]) -> str:
    id = f"batch_req_{number}"
    response = {
        "status_code": status,
        "request_id": id,
        "headers": headers,
        "body": body.model_dump(),
    }
    result = {"id": id, "custom_id": line.custom_id, "response": response, "error": None}
    return json.dumps(result, separators=(",", ":"))
