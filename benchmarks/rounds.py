"""Rounds: every side takes its turn on the same texts, and what counts is the ratio of two of them within a round.

The reference is fp32 sentence-transformers: all ratios are to it unless they name another peer, and all vectors are
compared with its vectors.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from benchmarks.fidelity import compare

REFERENCE = "sentence-transformers"


@dataclass(slots=True)
class Row:
    """One side: what is known of it before the rounds, and what the rounds add."""

    name: str
    kind: str
    facts: dict[str, Any]
    work: Callable[[list[str]], np.ndarray | float]
    rates: list[float] = field(default_factory=list)
    vectors: np.ndarray | None = None
    missing: str | None = None

    def take_turn(self, texts: list[str], keep: bool) -> None:
        """Encode once; a run gives its own seconds, everything else is timed here."""
        begun = time.perf_counter()
        result = self.work(texts)
        seconds = result if isinstance(result, float) else time.perf_counter() - begun
        self.rates.append(len(texts) / seconds)
        if keep and isinstance(result, np.ndarray):
            self.vectors = result


def take_rounds(rows: list[Row], texts: list[str], rounds: int) -> None:
    """Run all rounds; a peer that fails in one is left out from there on, with its error as the reason."""
    for index in range(rounds):
        say(f"  round {index + 1} of {rounds}")
        first = index % len(rows)
        for row in rows[first:] + rows[:first]:  # nobody always follows the same side
            if row.missing is not None:
                continue
            try:
                row.take_turn(texts, keep=index == rounds - 1)
            except Exception as error:
                if row.kind != "peer" or row.name == REFERENCE:
                    raise
                row.missing = first_line(error)


def row_documents(rows: list[Row], texts: list[str], idle: list[float]) -> list[dict[str, Any]]:
    """A JSON-ready document for each row: medians over the rounds, ratios within them, fidelity of the vectors."""
    present = [row for row in rows if row.missing is None]
    reference = next(row for row in present if row.name == REFERENCE)
    assert reference.vectors is not None
    documents = []
    for row in rows:
        document = {"side": row.name, "kind": row.kind, **row.facts}
        if row.missing is not None:
            documents.append(document | {"missing": row.missing})
            continue
        ratios = [ours / theirs for ours, theirs in zip(row.rates, reference.rates, strict=True)]
        document |= {
            "texts_per_second": statistics.median(row.rates),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "ratio_to": {
                peer.name: statistics.median(a / b for a, b in zip(row.rates, peer.rates, strict=True))
                for peer in present
                if peer.kind == "peer" and peer is not row
            },
        }
        if "cold_texts_per_second" in document:
            document["cold_ratio"] = document["cold_texts_per_second"] / reference.rates[0]
            document["cold_share"] = document["cold_texts_per_second"] / document["texts_per_second"]
        if row.vectors is not None:
            document |= asdict(compare(row.vectors, reference.vectors, texts))
        if row.kind == "run":
            document["worker_idle_ratio"] = statistics.median(idle)
        documents.append(document)
    return documents


def first_line(error: BaseException) -> str:
    """One line of an error: what it says first, or its name."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def say(text: str) -> None:
    """Progress, on standard error: the last line of standard output is the document."""
    print(text, file=sys.stderr, flush=True)
