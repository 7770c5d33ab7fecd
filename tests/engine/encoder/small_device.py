"""A backend whose device has little memory: real tokenization, real loop, and passes that are
refused when too large.

Vectors are a function of the token ids alone, so that a test can say what should have come out.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from surge_dagster.engine.encoder.metrics import Costs
from surge_dagster.engine.encoder.worker.backends import Rows
from surge_dagster.engine.encoder.worker.tokenization import TextTokenizer, TokenizerFacts, Tokens
from surge_dagster.engine.inference.token_backend import PaddedBackend, RunPass, TokenBatch
from surge_dagster.engine.model.spec import EncodingSpec

DIMENSION = 4
_WORDS = {"[UNK]": 0, "one": 1, "two": 2, "three": 3}


def word_tokenizer() -> TextTokenizer:
    """One token per word, no special tokens: an empty text has none at all."""
    document = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": _WORDS, "unk_token": "[UNK]"},
    }
    return TextTokenizer(
        TokenizerFacts(json.dumps(document)), EncodingSpec("hash://4", max_length=512).resolve()
    )


def expected_vectors(texts: list[str]) -> np.ndarray:
    """What the device computes for `texts`."""
    ids = [[_WORDS.get(word, 0) for word in text.split()] for text in texts]
    return np.array([_vector(np.array(row, np.int64)) for row in ids], np.float32)


def _vector(ids: np.ndarray) -> list[float]:
    return [len(ids), ids.sum(), (ids * np.arange(len(ids))).sum(), (ids * ids).sum()]


@dataclass(slots=True)
class Device:
    """What the device holds at most, in tokens, over all concurrent passes, and the passes that it
    got and refused."""

    limit: int
    used: int = 0
    passes: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    refuse_once: int = 0
    error: BaseException | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextlib.contextmanager
    def memory(self, tokens: int) -> Iterator[None]:
        """Holds room for `tokens` tokens, or refuses them."""
        with self.lock:
            if self.error is not None:
                raise self.error
            if self.used + tokens > self.limit or tokens == self.refuse_once:
                self.refuse_once = 0
                self.refused.append(tokens)
                raise MemoryError(f"{tokens} tokens")
            self.used += tokens
            self.passes.append(tokens)
        try:
            yield
        finally:
            with self.lock:
                self.used -= tokens


class SmallDeviceBackend(PaddedBackend):
    name = "small"
    detail = "a simulated device"
    machine = "simulated"
    budget_candidates: tuple[int, ...] = (64, 256)
    pass_tokens = 8

    def __init__(self, device: Device, *, token_budget: int, streams: int = 1) -> None:
        self.device = device
        super().__init__(word_tokenizer(), token_budget=token_budget, streams=streams)

    @contextlib.contextmanager
    def _passes(self, tokens: Tokens, rows: Rows) -> Iterator[RunPass]:
        def run_pass(batch: TokenBatch) -> None:
            with self.device.memory(batch.tokens):
                ids, mask = tokens.gather(batch.rows, batch.length)
                for row, own, kept in zip(batch.rows, ids, mask, strict=True):
                    rows.matrix[rows.places[row]] = _vector(own[kept > 0])

        yield run_pass


def encode(backend: SmallDeviceBackend, texts: list[str]) -> tuple[np.ndarray, Costs]:
    """The vectors of one portion; rows that were left out are nan."""
    matrix = np.full((len(texts), DIMENSION), np.nan, np.float32)
    flags = np.zeros(len(texts), np.uint8)
    return matrix, backend.forward(backend.prepare(texts), Rows.of_all(matrix, flags), lambda: None)
