"""An encoder pool whose calls have fixed costs, whatever time they take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surge_dagster.engine.encoder.calibration import Calibration
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.encoder.speed import Call, Speed, SpeedRecord
from tests.engine.runs import Wrapped

C_IPC = 0.25
C_TEXT = 0.01


class PricedCall(Wrapped):
    """An encode call that says it took what the fixed costs say."""

    @property
    def metrics(self) -> Any:
        found = self.inner.metrics
        seconds = C_IPC + C_TEXT * found.costs.texts_computed
        return replace(found, costs=replace(found.costs, encode_seconds=seconds))

    def result(self, timeout_seconds: float | None = None) -> Any:
        return None if self.inner.result(timeout_seconds) is None else self.metrics


class PricedPool(Wrapped):
    """A pool whose encode calls have fixed costs; it has a calibration of its own."""

    def __init__(self, pool: EncoderPool) -> None:
        super().__init__(pool)
        self.core_share = 0.0
        self.calibration = Calibration("calibration/priced.json")
        self._speeds = SpeedRecord(self.calibration, "cpu", workers=1)
        self.measure_speed()

    def submit(self, *arguments: Any) -> PricedCall:
        return PricedCall(self.inner.submit(*arguments))

    def measure_speed(self, *, anew: bool = False) -> Speed:
        def encode(texts: list[str]) -> tuple[float, float]:
            return sum(len(text) // 4 for text in texts), C_IPC + C_TEXT * len(texts)

        self.speed = self._speeds.measure(encode, anew=anew)
        return self.speed

    def learn(self, calls: Sequence[Call]) -> None:
        self.speed = self._speeds.learn(calls)


def catalog(sizes: list[int]) -> dict[str, list[tuple[str, str]]]:
    return {
        f"p{number}": [(str(row), f"text {number} {row}") for row in range(size)]
        for number, size in enumerate(sizes)
    }


@pytest.fixture
def priced_pool(hash_pool: EncoderPool, own_cache: Path) -> Any:
    return PricedPool(hash_pool)
