"""One batch on its way through the lanes.

Lines go to a lane in groups, and the answers of a group are appended to the output and the error
file. These are flushed, and after them the batch's record, which has the sizes of both. What a
crash leaves beyond these sizes is cut off later, so that each line is answered once.

Documents go to the bulk lane, and queries too where the model encodes both alike. Other queries
share the lane of those that clients wait for: they go there line by line, while nothing else waits.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from itertools import islice

from surge_dagster.engine.model.prompts import Task
from surge_dagster.engine.support.waiting import TURN_SECONDS
from surge_dagster.service import errors
from surge_dagster.service.answers import embeddings_body, row_ranges
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
from surge_dagster.service.errors import refusal_response
from surge_dagster.service.files import FileStore
from surge_dagster.service.lane import Encoded
from surge_dagster.service.spaces import ServedSpace, ServedSpaces

_REFUSED = (errors.RequestTooLarge, errors.TooLong, errors.UnusableText)
_GROUP_TEXTS, _GROUP_BYTES = 512, 256 << 10
_GROUPS = 8  # in the lane, so that it has texts while answers are written
_LOOK_SECONDS, _CHECKED_LINES = 0.01, 1000


class BatchFailed(Exception):
    """The batch ends without answers to the lines that are left."""

    def __init__(self, errors: list[BatchError]) -> None:
        super().__init__(errors)
        self.errors = errors


@dataclass(frozen=True, slots=True)
class _Sent:
    """Lines in one request to a lane."""

    lines: Sequence[Line]
    served: ServedSpace
    encoded: Future[Encoded]


@dataclass(slots=True)
class BatchRun:
    """Answers those lines of a batch that have no answer yet.

    What stands in its way for a while, such as a space that is being loaded, is raised as the
    `SurgeError` that it is: another run of the batch goes on behind the last group that was kept.

    Args:
        check: raises what ends the work.
        change: appends to the output and the error file, and keeps changes of the batch's record.
    """

    batch: Batch
    spaces: ServedSpaces
    files: FileStore
    check: Callable[[], None]
    change: Callable[..., Batch]

    def validate(self) -> None:
        """Check all lines before the first is encoded.

        Raises:
            BatchFailed: which lines are wrong.
        """
        with self.files.content(self.batch.input_file_id).open("rb") as source:
            total, problems = check_lines(self._lines(source), self._served(), self.batch.task)
        if problems:
            raise BatchFailed(problems)
        counts = RequestCounts(total=total)
        self.batch = self.change(
            {}, status="in_progress", in_progress_at=int(time.time()), request_counts=counts
        )

    def encode(self) -> None:
        """Answer them as the endpoint does.

        Raises:
            BatchFailed: the space is no longer served.
        """
        has_own_lane = self._served().queries.space.side == "query"
        groups, waiting = self._left(alone="query" if has_own_lane else None), deque[_Sent]()
        try:
            while True:
                waiting.extend(
                    self._send(lines) for lines in islice(groups, _GROUPS - len(waiting))
                )
                if not waiting:
                    return
                self._keep([*self._answers(waiting[0])])
                waiting.popleft()
        finally:
            for sent in waiting:
                sent.encoded.cancel()

    def refuse(self, error: BatchError) -> None:
        """Answer them with this error."""
        for lines in self._left():
            self._keep([("error", unanswered(self.batch.id, line, error)) for line in lines])

    def _served(self) -> ServedSpace:
        try:
            return self.spaces.find(self.batch.model)
        except errors.UnknownSpace as error:
            if not self.spaces.is_ready:  # it is not known yet which spaces there are
                raise
            raise BatchFailed([BatchError(code="model_not_found", message=str(error))]) from None

    def _lines(self, source: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
        """Ends with the work also where very many lines are blank."""
        return read_lines(
            raw
            for number, raw in enumerate(source)
            if number % _CHECKED_LINES or self.check() is None
        )

    def _left(self, alone: Task | None = None) -> Iterator[list[Line]]:
        """Groups of the lines that have no answer; each line of the task `alone` is one."""
        batch, counts = self.batch, self.batch.request_counts
        with self.files.content(batch.input_file_id).open("rb") as source:
            left = islice(self._lines(source), counts.completed + counts.failed, None)
            yield from _groups((parse_line(*numbered, batch.task) for numbered in left), alone)

    def _keep(self, answers: Sequence[tuple[str, bytes]]) -> None:
        """Make the answers of a group last."""
        kinds = Counter(kind for kind, _ in answers)
        results = {kind: b"".join(line for each, line in answers if each == kind) for kind in kinds}
        counts = self.batch.request_counts
        done = {
            "completed": counts.completed + kinds["output"],
            "failed": counts.failed + kinds["error"],
        }
        self.batch = self.change(results, request_counts=counts.model_copy(update=done))

    def _send(self, lines: Sequence[Line]) -> _Sent:
        """Puts lines of one kind into the queue of their lane; waits as long as it takes none."""
        texts = [text for line in lines for text in line.request.texts]
        encoded = Future[Encoded]()
        while True:
            self.check()
            served = self._served()
            is_urgent = lines[0].task == "query" and served.queries.space.side == "query"
            lane = served.queries if is_urgent else served.documents
            try:
                if not (is_urgent and lane.is_alive and lane.waiting_tokens):
                    encoded = lane.accept(texts, truncate=bool(lines[0].request.truncate))
                    return _Sent(lines, served, encoded)
            except errors.Overloaded:
                pass
            except _REFUSED as error:
                encoded.set_exception(error)
                return _Sent(lines, served, encoded)
            time.sleep(_LOOK_SECONDS)

    def _answers(self, sent: _Sent) -> Iterator[tuple[str, bytes]]:
        """What is written of a line, and into which file; where a lane refuses several lines, each
        is sent alone."""
        while not wait([sent.encoded], TURN_SECONDS).done:
            self.check()
        try:
            encoded = sent.encoded.result()
        except _REFUSED as error:
            if len(sent.lines) == 1:
                response = refusal_response(error)
                yield (
                    "error",
                    answered(
                        self.batch.id, sent.lines[0], response.status_code, bytes(response.body)
                    ),
                )
            else:
                for line in sent.lines:
                    yield from self._answers(self._send([line]))
            return
        start, name = 0, sent.served.space.name
        sizes = {line.request.dimensions for line in sent.lines}
        vectors = {size: sent.served.converted(encoded.vectors, size) for size in sizes}
        for line in sent.lines:
            stop = start + len(line.request.texts)
            rows, start = slice(start, stop), stop
            found, tokens = vectors[line.request.dimensions][rows], int(encoded.tokens[rows].sum())
            body = embeddings_body(found, line.request.encoding_format, name, tokens)
            yield (
                "output",
                answered(self.batch.id, line, 200, body, row_ranges(encoded.truncated[rows])),
            )


def _groups(lines: Iterator[Line], alone: Task | None) -> Iterator[list[Line]]:
    """Lines of one kind, read as they are needed."""
    group, texts, size = list[Line](), 0, 0
    for line in lines:
        is_full = texts >= _GROUP_TEXTS or size + line.size > _GROUP_BYTES or line.task == alone
        if group and (is_full or _kind(line) != _kind(group[0])):
            yield group
            group, texts, size = [], 0, 0
        group.append(line)
        texts, size = texts + len(line.request.texts), size + line.size
    if group:
        yield group


def _kind(line: Line) -> tuple[Task, bool]:
    """Whether texts are documents or queries, and whether they are cut."""
    return line.task, bool(line.request.truncate)
