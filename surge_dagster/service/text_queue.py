"""The texts that wait before a lane, in requests, and which of them the next pass takes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Encoded:
    """The answer to a request.

    Attributes:
        vectors: float32 [texts, dimension of the lane's space].
        tokens: of each text that the model read, as `TokenCounter` counts them; int64 [texts].
        truncated: whether a text was longer than the model reads, bool [texts].
    """

    vectors: np.ndarray
    tokens: np.ndarray
    truncated: np.ndarray


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """A request that is not answered yet.

    Attributes:
        ends: size of the texts before each row, in tokens as they count towards a pass; int64
            [texts + 1].
        encoded: its vectors and truncation are filled by passes.
        next_row: the first that no pass has taken.
        missing: rows without a vector.
    """

    texts: pa.LargeStringArray
    ends: np.ndarray
    truncate: bool
    encoded: Encoded
    answer: Future[Encoded] = field(default_factory=Future)
    next_row: int = 0
    missing: int = field(init=False)

    def __post_init__(self) -> None:
        self.missing = len(self.texts)

    @property
    def size(self) -> int:
        return int(self.ends[-1])


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a request that a pass encodes."""

    request: Request
    start: int
    stop: int

    @property
    def size(self) -> int:
        return int(self.request.ends[self.stop] - self.request.ends[self.start])


class TextQueue:
    """The requests of which texts wait, first come, first served; `tokens` is the size of these
    texts."""

    def __init__(self) -> None:
        self._requests = deque[Request]()
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def append(self, request: Request) -> None:
        self._requests.append(request)
        self.tokens += request.size

    def remove(self, request: Request) -> None:
        """Takes out the texts of a request that wait; harmless where none does."""
        if request.next_row < len(request.texts):
            self._requests.remove(request)
            self._take(request, len(request.texts))

    def take(self, most_tokens: int) -> list[Part]:
        """The texts of the next pass, from the head of the queue: at least one of the first
        request."""
        parts, room = list[Part](), most_tokens
        while self._requests and room > 0:
            request = self._requests[0]
            start, ends = request.next_row, request.ends
            stop = int(np.searchsorted(ends, ends[start] + room, side="right")) - 1
            if stop <= start and parts:
                break
            parts.append(Part(request, start, max(stop, start + 1)))
            room -= parts[-1].size
            self._take(request, parts[-1].stop)
            if request.next_row < len(request.texts):
                break
            self._requests.popleft()
        return parts

    def _take(self, request: Request, stop: int) -> None:
        self.tokens -= int(request.ends[stop] - request.ends[request.next_row])
        request.next_row = stop
