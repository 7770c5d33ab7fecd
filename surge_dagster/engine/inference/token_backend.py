"""TokenBackend, the base of backends that tokenize texts and run forward passes in limited memory,
and PaddedBackend, whose passes have texts of nearly equal length.

The memory of a pass is not known beforehand: it depends on the model, the kernels and other users
of the device. A pass that runs out of memory halves the token budget for the rest of the worker's
life and is run again in halves, down to a single text. A single text that does not fit is tried
once more when no other pass is under way; if it still does not fit, the error says so.

Texts of equal token length share a padded pass, cut at a token budget: no padding, and each pass
has the size where the device is just full. The rest of a length group is filled with slightly
shorter texts as long as their padding costs less than another pass. Equal portions get equal
batches. Largest passes come first, so that streams end together.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence, Sized
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import numpy as np

from surge_dagster.engine.encoder.metrics import Costs
from surge_dagster.engine.encoder.worker.backends import Progress, Rows, is_out_of_memory
from surge_dagster.engine.encoder.worker.tokenization import TextTokenizer, Tokens
from surge_dagster.engine.errors import EncoderError

log = logging.getLogger(__name__)


class Batch(Protocol):
    """Rows of a portion that share a forward pass."""

    @property
    def rows(self) -> Sized: ...
    @property
    def tokens(self) -> int:
        """What counts towards the budget."""
        ...

    @property
    def padded_tokens(self) -> int: ...

    def halves(self) -> list[Self]: ...


RunPass = Callable[[Any], None]  # puts the vectors of a batch where they belong


@dataclass(slots=True)
class ComputedPasses:
    """The passes of a portion; changed only under the backend's lock."""

    run_pass: RunPass
    progress: Progress
    waiting: deque[Batch]
    alone: list[Batch] = field(default_factory=list)
    padded_tokens: int = 0
    error: BaseException | None = None


class TokenBackend(ABC):
    """A `Backend` that tokenizes texts and computes them in passes of a bounded number of tokens.

    Args:
        token_budget: maximum tokens of one pass, padding included; running out of memory lowers it.
        streams: concurrent passes, each in a thread of its own.
        free_memory: called after memory ran out, before the pass is run again.

    Attributes:
        budget_candidates: token budgets to measure at a first start, ascending.
        machine: the kind of GPU, on which the best budget depends; not set on the CPU.
    """

    name: str
    detail: str
    machine: str
    budget_candidates: tuple[int, ...]

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        token_budget: int,
        streams: int = 1,
        free_memory: Callable[[], None] | None = None,
    ) -> None:
        self.token_budget = token_budget
        self.streams = streams
        self._tokenizer = tokenizer
        self.tokens_digest = tokenizer.digest
        self.truncation_side = tokenizer.truncation_side
        self._free_memory = free_memory
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(streams - 1, "surge-passes") if streams > 1 else None

    def prepare(self, texts: list[str]) -> Tokens:
        return self._tokenizer.encode(texts)

    def prepare_ids(self, data: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> Tokens:
        return self._tokenizer.read_ids(data, starts, stops)

    @abstractmethod
    def forward(self, prepared: Tokens, rows: Rows, progress: Progress) -> Costs:
        """Raises EncoderError when a single text does not fit into memory."""

    def _compute(
        self, batches: Sequence[Batch], run_pass: RunPass, progress: Progress
    ) -> ComputedPasses:
        work = ComputedPasses(run_pass, progress, deque(batches))
        streams = max(1, min(self.streams, len(batches)))
        others = []
        if self._threads is not None:
            others = [self._threads.submit(self._drain, work) for _ in range(streams - 1)]
        self._drain(work)
        for other in others:
            other.result()
        if work.error is not None:
            raise work.error
        for batch in work.alone:
            self._run_alone(work, batch)
        return work

    def _drain(self, work: ComputedPasses) -> None:
        """Runs passes until none is left, or one fails for a reason other than memory."""
        while True:
            with self._lock:
                if work.error is not None or not work.waiting:
                    return
                batch = work.waiting.popleft()
                if batch.tokens > self.token_budget and len(batch.rows) > 1:
                    work.waiting.extendleft(batch.halves()[::-1])
                    continue
            try:
                self._run_pass(work, batch)
                continue
            except BaseException as error:
                if not is_out_of_memory(error):
                    with self._lock:
                        work.error = work.error or error
                    return
            # Outside of the handler: the exception references the arrays of the failed pass.
            self._shrink(work, batch)

    def _run_pass(self, work: ComputedPasses, batch: Batch) -> None:
        work.run_pass(batch)
        with self._lock:
            work.padded_tokens += batch.padded_tokens
        work.progress()

    def _shrink(self, work: ComputedPasses, batch: Batch) -> None:
        """Lower the budget after a pass that did not fit, and queue its rows again."""
        if self._free_memory is not None:
            self._free_memory()
        with self._lock:
            if len(batch.rows) > 1:
                work.waiting.extendleft(batch.halves()[::-1])
                budget = batch.tokens // 2
            else:
                work.alone.append(batch)
                budget = batch.tokens
            # Concurrent passes report the same shortage; it counts once.
            if budget < self.token_budget:
                log.warning(
                    "out of memory: the token budget is %d from now on, it was %d",
                    budget,
                    self.token_budget,
                )
                self.token_budget = budget

    def _run_alone(self, work: ComputedPasses, batch: Batch) -> None:
        try:
            self._run_pass(work, batch)
        except BaseException as error:
            if not is_out_of_memory(error):
                raise
            raise EncoderError(
                f"a text of {batch.tokens} tokens does not fit into the device's memory, although "
                f"its pass had 1 row and ran alone ({error}); use a smaller max_length, a smaller "
                "model, or a device with more memory"
            ) from error


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Rows that share a forward pass.

    Attributes:
        length: tokens that each row is padded to.
        exact: whether every row has this length without padding.
    """

    rows: np.ndarray
    length: int
    exact: bool

    @property
    def tokens(self) -> int:
        return len(self.rows) * self.length

    @property
    def padded_tokens(self) -> int:
        return self.tokens

    def halves(self) -> list[TokenBatch]:
        half = len(self.rows) // 2
        return [replace(self, rows=self.rows[:half]), replace(self, rows=self.rows[half:])]


def longest_first(lengths: np.ndarray) -> np.ndarray:
    """Row numbers by descending length."""
    # A stable sort keeps rows of equal length in order, so the plan depends only on the lengths.
    return np.argsort(-lengths, kind="stable")


def plan_batches(lengths: np.ndarray, token_budget: int, pass_tokens: int = 0) -> list[TokenBatch]:
    """Cut rows of these token lengths into batches; a text over the budget has its own.

    `pass_tokens` is the fixed cost of a pass, in tokens; 0 allows no padding.
    """
    if len(lengths) == 0:
        return []
    order = longest_first(lengths)
    # An empty text has no tokens with some tokenizers: such a row is computed as one token of
    # padding.
    ordered = np.maximum(lengths[order], 1)
    borders = [*(np.flatnonzero(np.diff(ordered)) + 1).tolist(), len(order)]
    batches: list[TokenBatch] = []
    start = group = 0
    while start < len(order):
        length = int(ordered[start])
        end = min(len(order), start + max(1, token_budget // length))
        stop = start
        padding = 0
        while stop < end:
            take = min(borders[group], end) - stop
            padding += take * (length - int(ordered[stop]))
            # Shorter rows are added only while their padding is cheaper than the pass that they
            # save.
            if padding > pass_tokens:
                break
            stop += take
            if stop == borders[group]:
                group += 1
        exact = int(lengths[order[stop - 1]]) == length
        batches.append(TokenBatch(order[start:stop], length, exact))
        start = stop
    batches.sort(key=lambda batch: (-batch.tokens, -batch.length))
    return batches


class PaddedBackend(TokenBackend):
    """A `TokenBackend` whose passes are `plan_batches`' of texts of nearly equal length.

    Attributes:
        pass_tokens: fixed cost of a pass, in tokens.
    """

    pass_tokens: int

    def forward(self, prepared: Tokens, rows: Rows, progress: Progress) -> Costs:
        started = time.perf_counter()
        rows.truncated[rows.places] = prepared.truncated
        with self._passes(prepared, rows) as run_pass:
            batches = plan_batches(prepared.lengths, self.token_budget, self.pass_tokens)
            work = self._compute(batches, run_pass, progress)
        return Costs(
            tokens=len(prepared.ids),
            padded_tokens=work.padded_tokens,
            forward_seconds=time.perf_counter() - started,
        )

    @abstractmethod
    def _passes(self, tokens: Tokens, rows: Rows) -> AbstractContextManager[RunPass]:
        """Set up the passes of a portion; at its end every one of its rows has its vector."""
