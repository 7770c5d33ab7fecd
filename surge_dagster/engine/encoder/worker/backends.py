"""Backend, the interface between a worker and the library that computes its vectors, and
HashBackend, which has none.

Work has two steps that overlap: while `forward` computes portion i on the device, another thread
runs `prepare` (tokenization) for portion i + 1. Vectors are written straight to their rows, which
are in shared memory.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from surge_dagster.engine.encoder.metrics import Costs
from surge_dagster.engine.model.spec import Space

Progress = Callable[[], None]
# First text of a portion, the one after the last, their tokens, and why they have no vector or "".
Report = Callable[[int, int, int, str], None]


# Of the hash backend.
_ROWS_PER_STEP = 512
_BYTES_PER_TOKEN = 4
# Messages of libraries without an error type for it: torch on the CPU and on CUDA, cuBLAS,
# OpenVINO, C++.
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "cublas_status_alloc_failed",
    "failed to allocate",
    "bad_alloc",
)


@dataclass(frozen=True, slots=True)
class BackendSettings:
    """The settings of a worker.

    Attributes:
        device: "cpu", or "cuda:N" as this process numbers them.
        token_budget: tokens of one forward pass, None for the backend's own choice.
    """

    device: str
    precision: str
    threads: int
    token_budget: int | None = None


def _ignore(start: int, stop: int, tokens: int, reason: str) -> None:
    """Take a report that nobody needs."""


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows that the results of a portion's texts go to; rows between them belong to others.

    Attributes:
        matrix: vectors of many rows, [rows, dimension].
        truncated: uint8 [rows], whether a text was longer than the model reads.
        places: the row of each text, int64 [texts].
        refused: why a text has no vector, by its place in `places`; the backend adds it, reports
            it, and does not encode the text again.
        report: a backend whose texts cost money calls it as soon as some of them are answered: they
            are not encoded again if the worker is lost before its portion ends.
    """

    matrix: np.ndarray
    truncated: np.ndarray
    places: np.ndarray
    refused: dict[int, str] = field(default_factory=dict)
    report: Report = _ignore

    @classmethod
    def of_all(cls, matrix: np.ndarray, truncated: np.ndarray) -> Rows:
        return cls(matrix, truncated, np.arange(len(matrix)))


class Backend(Protocol):
    """Computes vectors; `name` and `detail` go into reports and cache keys.

    If it has a `truncation_side`, its `prepare_ids` takes texts as token ids, made by a
    `TextTokenizer` elsewhere: the bytes `data[starts[i]:stops[i]]` are the int32 ids of one. If it
    has `portion_texts`, a portion has at most so many texts.
    """

    name: str
    detail: str

    def prepare(self, texts: list[str]) -> Any:
        """Runs concurrently with a `forward`."""

    def forward(self, prepared: Any, rows: Rows, progress: Progress) -> Costs:
        """Write a vector and a truncation flag for every text; report progress."""
        ...


@dataclass(frozen=True, slots=True)
class LaunchedPortion:
    """A portion whose work was handed to a device.

    Attributes:
        is_done: whether `finish` returns without waiting for the device.
        finish: waits for the vectors, writes them to their rows and returns their costs; called
            once.
        wait: waits so many seconds for the vectors; None if only `finish` can wait, and a portion
            that comes meanwhile is launched after it.
    """

    is_done: Callable[[], bool]
    finish: Callable[[], Costs]
    wait: Callable[[float], object] | None = None


@runtime_checkable
class QueuingBackend(Protocol):
    """A `Backend` that queues its work, so that a portion is launched before the last one ends."""

    def launch(self, prepared: Any, rows: Rows, progress: Progress) -> LaunchedPortion:
        """Queue the work of `forward` without waiting for it."""
        ...


@runtime_checkable
class BudgetedBackend(Backend, Protocol):
    """A `Backend` whose passes have at most `token_budget` tokens.

    Attributes:
        budget_candidates: token budgets to measure at a first start, ascending.
        streams: concurrent passes.
    """

    token_budget: int
    budget_candidates: tuple[int, ...]
    streams: int


def encode_texts(backend: Backend, texts: list[str], space: Space) -> tuple[np.ndarray, Costs]:
    """Return the vectors, [texts, dimension], outside of the arena, and their costs."""
    matrix = np.empty((len(texts), space.dimension), space.dtype)
    rows = Rows.of_all(matrix, np.empty(len(texts), np.uint8))
    return matrix, backend.forward(backend.prepare(texts), rows, lambda: None)


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(
        words in str(error).lower() for words in _OUT_OF_MEMORY
    )


def hash_vectors(texts: Iterable[str], dimension: int) -> np.ndarray:
    """Return float32 [texts, dimension]; the texts include the prompt."""
    return _vectors([text.encode() for text in texts], dimension)


def _vectors(encoded: list[bytes], dimension: int) -> np.ndarray:
    drawn = b"".join([hashlib.shake_128(text).digest(2 * dimension) for text in encoded])
    values = np.frombuffer(drawn, "<i2").reshape(-1, dimension).astype(np.float32)
    values += 0.5
    values /= np.sqrt(np.einsum("ij,ij->i", values, values))[:, None]
    return values


def hash_tokens(sizes: np.ndarray) -> np.ndarray:
    """Return the tokens of texts of these bytes, prompt included, before they are cut."""
    return 1 + sizes // _BYTES_PER_TOKEN


class HashBackend:
    """Vectors from a hash of the text, without a model, at over 100,000 texts per second.

    It replaces a model where only the path of the texts matters. SHAKE-128 of the text gives a
    16-bit value per dimension, none of them zero once a half is added; they are scaled to length 1.
    """

    name = "hash"
    detail = "shake128"

    def __init__(self, space: Space, settings: BackendSettings) -> None:
        self._prompt = space.prompt.encode()
        self._max_length = space.max_length

    def prepare(self, texts: list[str]) -> list[bytes]:
        return [self._prompt + text.encode() for text in texts]

    def forward(self, prepared: list[bytes], rows: Rows, progress: Progress) -> Costs:
        started = time.perf_counter()
        for start in range(0, len(prepared), _ROWS_PER_STEP):
            piece = prepared[start : start + _ROWS_PER_STEP]
            rows.matrix[rows.places[start : start + len(piece)]] = _vectors(
                piece, rows.matrix.shape[1]
            )
            progress()
        tokens = hash_tokens(np.fromiter(map(len, prepared), np.int64, len(prepared)))
        rows.truncated[rows.places] = tokens > self._max_length
        kept = int(np.minimum(tokens, self._max_length).sum())
        return Costs(tokens=kept, padded_tokens=kept, forward_seconds=time.perf_counter() - started)
