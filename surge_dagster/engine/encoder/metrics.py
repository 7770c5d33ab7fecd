"""What work on texts costs: one record for portions, encode calls, SuperBatches and runs.

A new metric is a field here and a value where it is measured; sums, reports and documents follow
from the record.
"""

from __future__ import annotations

from dataclasses import asdict, astuple, dataclass
from operator import add
from typing import Any


@dataclass(frozen=True, slots=True)
class Costs:
    """Amounts that add up; each stage fills in what it measures.

    Attributes:
        tokens: after truncation.
        padded_tokens: computed tokens, padding included.
        tokenize_seconds, forward_seconds: summed over workers.
        encode_seconds: of a call, from its first portion, or the end of the call before, to the
            last answer.
        replays: portions that were encoded again because their worker was lost.
        texts_computed: rows that encode calls were given, those included whose old vectors were
            compared.
        texts_deduplicated: those with new vectors that got that of an equal text of the same
            SuperBatch.
        rows_reused: texts that kept the vector of the file that is replaced.
        read_seconds: of the reader, without its waits for memory.
        serialize_seconds, upload_seconds: summed over the publishing threads.
        publish_seconds: both together by the clock; `overlap_ratio` compares it with the encoding.
        host_seconds: processor time of the run's process during `encode_seconds`.
    """

    tokens: int = 0
    padded_tokens: int = 0
    tokenize_seconds: float = 0.0
    forward_seconds: float = 0.0
    encode_seconds: float = 0.0
    replays: int = 0
    texts_computed: int = 0
    texts_encoded: int = 0
    texts_deduplicated: int = 0
    rows_reused: int = 0
    read_seconds: float = 0.0
    serialize_seconds: float = 0.0
    upload_seconds: float = 0.0
    publish_seconds: float = 0.0
    host_seconds: float = 0.0

    def plus(self, other: Costs) -> Costs:
        return Costs(*map(add, astuple(self), astuple(other)))

    def undisturbed_seconds(self, core_share: float) -> float:
        """Return what the encode calls would have taken without the work of the run's process on
        their cores: at least half of the time.

        Args:
            core_share: see `EncoderPool`.
        """
        return max(self.encode_seconds / 2, self.encode_seconds - core_share * self.host_seconds)

    def as_dict(self) -> dict[str, Any]:
        """All amounts, and the ratios that follow from them."""
        ratios = {"padding_ratio": self.padding_ratio, "overlap_ratio": self.overlap_ratio}
        return asdict(self) | ratios

    @property
    def texts_per_second(self) -> float | None:
        """Texts that encode calls computed, over their seconds; None if there were none."""
        if not self.texts_computed or self.encode_seconds <= 0:
            return None
        return self.texts_computed / self.encode_seconds

    @property
    def padding_ratio(self) -> float:
        """Share of the tokens given to the model that were padding."""
        if not self.padded_tokens:
            return 0.0
        return 1.0 - self.tokens / self.padded_tokens

    @property
    def overlap_ratio(self) -> float:
        return overlap_ratio(self.publish_seconds, self.encode_seconds)

    def worker_idle_ratio(self, workers: int, seconds: float) -> float:
        """Return the share of these seconds in which the workers' devices had no forward pass."""
        if seconds <= 0:
            return 0.0
        return max(0.0, 1.0 - self.forward_seconds / (workers * seconds))


def overlap_ratio(io_seconds: float, encode_seconds: float) -> float:
    """Return the paper's rho: the share of serialization and upload that encoding can hide."""
    if io_seconds <= 0:
        return 1.0
    return 1.0 - max(0.0, io_seconds - encode_seconds) / io_seconds


NO_COSTS = Costs()
