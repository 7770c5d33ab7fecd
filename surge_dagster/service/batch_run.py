"""One batch on its way through the lanes.

Lines go to a lane in groups, and the answers of a group are appended to the output and the error file. These are
flushed, and after them the batch's record, which has the sizes of all files. What a crash leaves beyond these sizes is
overwritten when the work goes on, and at the end cut off, so that each line is answered once.

Documents go to the bulk lane, and queries too where the model encodes both alike. Other queries share the lane of those
that clients wait for: they go there line by line, while nothing else waits.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from typing import IO

import numpy as np

from surge_dagster.engine.model.prompts import Task
from surge_dagster.engine.support.waiting import TURN_SECONDS
from surge_dagster.service import refusals
from surge_dagster.service.answers import embeddings_body
from surge_dagster.service.batch_lines import (
    Batch,
    BatchError,
    Line,
    RequestCounts,
    answered,
    check_lines,
    parse_line,
    read_lines,
    unanswered,
)
from surge_dagster.service.errors import surge_error_response
from surge_dagster.service.files import FileStore
from surge_dagster.service.lane import Encoded, Lane
from surge_dagster.service.spaces import ServedSpace, ServedSpaces

_DOWN = (refusals.LaneClosed, refusals.LaneDown)
_REFUSED = (refusals.RequestTooLarge, refusals.TooLong, refusals.UnusableText)
_GROUP_TEXTS, _GROUP_BYTES = 512, 256 << 10
_GROUPS = 8  # in the lane, so that it has texts while answers are written
_LOOK_SECONDS, _RETRY_SECONDS = 0.01, 1.0


class BatchEnd(Exception):
    """The batch ends early with this status; with none it is left as it is, because the service stops."""

    def __init__(self, status: str, errors: Sequence[BatchError] = ()) -> None:
        super().__init__(status)
        self.status, self.errors = status, errors


@dataclass(frozen=True, slots=True)
class _Sent:
    """Lines in one request to a lane."""

    lines: Sequence[Line]
    served: ServedSpace
    encoded: Future[Encoded]


class BatchRun:
    """Answers those lines of a batch that have no answer yet.

    Args:
        check: raises `BatchEnd` when the batch is to end.
        change: keeps changes of the batch's record.
    """

    def __init__(
        self,
        batch: Batch,
        spaces: ServedSpaces,
        files: FileStore,
        check: Callable[[], None],
        change: Callable[..., Batch],
    ) -> None:
        self.batch, self._spaces, self._files, self._check, self._change = batch, spaces, files, check, change

    def validate(self) -> None:
        """Check all lines before the first is encoded.

        Raises:
            BatchEnd: "failed", and which lines are wrong.
        """
        served = self.served() if self.batch.model else None
        with self._files.content(self.batch.input_file_id).open("rb") as source:
            lines = (line for line in read_lines(source) if self._check() is None)
            total, problems = check_lines(lines, served, self.batch.progress.task)
        if problems:
            raise BatchEnd("failed", problems)
        counts = RequestCounts(total=total)
        self.batch = self._change(status="in_progress", in_progress_at=int(time.time()), request_counts=counts)

    def encode(self) -> None:
        """Answer them as the endpoint does.

        Raises:
            BatchEnd: see `check`; "failed" where the space is no longer served.
        """
        with ExitStack() as stack:
            groups, output, errors = self._files_of(stack)
            waiting = deque[_Sent]()
            stack.callback(lambda: [sent.encoded.cancel() for sent in waiting])
            while True:
                waiting.extend(self._send(lines) for lines in islice(groups, _GROUPS - len(waiting)))
                if not waiting:
                    return
                completed = 0
                for is_success, answer in self._answers(waiting[0]):
                    (output if is_success else errors).write(answer)
                    completed += is_success
                self._keep(waiting.popleft().lines, completed, output, errors)

    def refuse(self, error: BatchError) -> None:
        """Answer them with this error."""
        with ExitStack() as stack:
            groups, output, errors = self._files_of(stack)
            for lines in groups:
                errors.writelines(unanswered(self.batch.id, line, error) for line in lines)
                self._keep(lines, 0, output, errors)

    def served(self) -> ServedSpace:
        """The space of the batch, as soon as it is loaded.

        Raises:
            BatchEnd: it is not served any more.
        """
        while True:
            self._check()
            try:
                return self._spaces.find(self.batch.model or "")
            except refusals.SpaceLoading as error:
                self._wait(min(error.retry_after_seconds, _RETRY_SECONDS))
            except refusals.UnknownSpace as error:
                if self._spaces.is_ready:  # else it is not known yet which spaces there are
                    raise BatchEnd("failed", [BatchError(code="model_not_found", message=str(error))]) from None
                self._wait(_RETRY_SECONDS)

    def _files_of(self, stack: ExitStack) -> tuple[Iterator[list[Line]], IO[bytes], IO[bytes]]:
        """The lines that are left, and the output and error file at the sizes that the batch's record has."""
        progress = self.batch.progress
        source = stack.enter_context(self._files.content(self.batch.input_file_id).open("rb"))
        source.seek(progress.input_bytes)
        results = list[IO[bytes]]()
        for id, size in ((progress.output_id, progress.output_bytes), (progress.error_id, progress.error_bytes)):
            file = stack.enter_context(self._files.make(id).open("r+b"))
            file.seek(size)
            results.append(file)
        return self._groups(source), results[0], results[1]

    def _groups(self, source: IO[bytes]) -> Iterator[list[Line]]:
        """Lines of one kind, read as they are needed."""
        group, texts, start = list[Line](), 0, source.tell()
        for numbered in read_lines(source, self.batch.progress.line):
            line = parse_line(*numbered)
            is_full = texts >= _GROUP_TEXTS or line.end - start > _GROUP_BYTES
            if group and (is_full or self._kind(line) != self._kind(group[0])):
                yield group
                group, texts, start = [], 0, group[-1].end
            group.append(line)
            texts += len(line.request.texts)
        if group:
            yield group

    def _kind(self, line: Line) -> tuple[Task, bool]:
        """Whether texts are documents or queries, and whether they are cut."""
        return line.task or self.batch.progress.task, bool(line.request.truncate)

    def _keep(self, lines: Sequence[Line], completed: int, output: IO[bytes], errors: IO[bytes]) -> None:
        """Make the answers of a group last."""
        for file in (output, errors):
            file.flush()
            os.fsync(file.fileno())
        counts, last = self.batch.request_counts, lines[-1]
        failed = counts.failed + len(lines) - completed
        sizes = {"input_bytes": last.end, "output_bytes": output.tell(), "error_bytes": errors.tell()}
        self.batch = self._change(
            progress=self.batch.progress.model_copy(update={"line": last.number, **sizes}),
            request_counts=counts.model_copy(update={"completed": counts.completed + completed, "failed": failed}),
        )

    def _send(self, lines: Sequence[Line]) -> _Sent:
        """Puts lines of one kind into the queue of their lane; waits as long as it takes none."""
        texts = [text for line in lines for text in line.request.texts]
        task, truncate = self._kind(lines[0])
        while True:
            served, encoded = self.served(), Future[Encoded]()
            is_urgent = task == "query" and served.queries.space.side == "query"
            lane = served.queries if is_urgent else served.documents
            try:
                if is_urgent and len(lines) > 1:
                    raise refusals.RequestTooLarge("these lines are sent one by one")
                if is_urgent:
                    self._wait(math.inf, lane)
                encoded = lane.accept(texts, truncate=truncate)
            except _REFUSED as error:
                encoded.set_exception(error)
            except refusals.Overloaded as error:
                self._wait(error.retry_after_seconds, lane, lane.waiting_tokens)
                continue
            except _DOWN:
                self._wait(_RETRY_SECONDS)
                continue
            return _Sent(lines, served, encoded)

    def _answers(self, sent: _Sent) -> Iterator[tuple[bool, bytes]]:
        """Whether a line was encoded, and what is written of it; where a lane refuses several, each is sent alone."""
        try:
            while not wait([sent.encoded], TURN_SECONDS).done:
                self._check()
            encoded = sent.encoded.result()
        except _DOWN:
            self._wait(_RETRY_SECONDS)
            again = [self._send(sent.lines)]
        except _REFUSED as error:
            if len(sent.lines) == 1:
                response = surge_error_response(error)
                yield False, answered(self.batch.id, sent.lines[0], response.status_code, bytes(response.body))
                return
            again = [self._send([line]) for line in sent.lines]
        else:
            yield from ((True, answer) for answer in self._written(sent, encoded))
            return
        for one in again:
            yield from self._answers(one)

    def _written(self, sent: _Sent, encoded: Encoded) -> Iterator[bytes]:
        sizes = {line.request.dimensions for line in sent.lines}
        vectors = {size: sent.served.converted(encoded.vectors, size) for size in sizes}
        start, name = 0, sent.served.space.name
        for line, tokens in zip(sent.lines, _shares(sent.lines, encoded.tokens), strict=True):
            stop = start + len(line.request.texts)
            rows = vectors[line.request.dimensions][start:stop]
            body = embeddings_body(rows, line.request.encoding_format, name, tokens)
            cut = ",".join(map(str, np.flatnonzero(encoded.truncated[start:stop])))
            yield answered(self.batch.id, line, 200, body, cut)
            start = stop

    def _wait(self, seconds: float, lane: Lane | None = None, tokens: int = 1) -> None:
        """Wait so long, or until fewer than so many tokens wait in a lane, or it is down."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and (lane is None or (lane.waiting_tokens >= tokens and lane.is_alive)):
            self._check()
            time.sleep(_LOOK_SECONDS)


def _shares(lines: Sequence[Line], tokens: int) -> list[int]:
    """Tokens of each line, by the length of its texts, since a lane counts those of a request together."""
    sizes = [sum(1 + len(text) for text in line.request.texts) for line in lines]
    return np.diff(np.rint(np.cumsum(sizes) * (tokens / sum(sizes))), prepend=0).astype(int).tolist()
