"""The token budget: the saturation point is found despite noise and little memory, once, and
cached.

Passes take simulated seconds, so the right answers are known.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest

from surge_dagster.engine.encoder.calibration import Calibration
from surge_dagster.engine.encoder.metrics import Costs
from surge_dagster.engine.encoder.worker.backends import (
    BackendSettings,
    HashBackend,
    Progress,
    Rows,
)
from surge_dagster.engine.encoder.worker.loading import set_token_budget
from surge_dagster.engine.encoder.worker.tokenization import Tokens
from surge_dagster.engine.inference.packing import pack_texts
from surge_dagster.engine.model.spec import EncodingSpec, Space
from tests.engine.encoder.small_device import DIMENSION, Device, SmallDeviceBackend

_SETTINGS = BackendSettings(device="cpu", precision="fp32", threads=1)
_CANDIDATES = (512, 1_024, 2_048)
_DEFAULT = 1_000
_CALIBRATION = Calibration("calibration/tests.json")


class TimedBackend(SmallDeviceBackend):
    """A device on which a pass costs as much as `pass_price` tokens, plus its own tokens."""

    budget_candidates: tuple[int, ...] = _CANDIDATES

    def __init__(
        self, *, pass_price: int, token_seconds: float = 1e-5, limit: int = 100_000
    ) -> None:
        super().__init__(Device(limit), token_budget=_DEFAULT)
        self.pass_price = pass_price
        self.token_seconds = token_seconds
        self.slow_call: int | None = None
        self.calls = 0

    def forward(self, prepared: Tokens, rows: Rows, progress: Progress) -> Costs:
        before = len(self.device.passes)
        costs = super().forward(prepared, rows, progress)
        tokens = sum(self.pass_price + tokens for tokens in self.device.passes[before:])
        seconds = tokens * self.token_seconds
        if self.calls == self.slow_call:
            seconds *= 10
        self.calls += 1
        return replace(costs, forward_seconds=seconds)


@pytest.fixture
def space(own_cache: Path) -> Space:
    return EncodingSpec(f"hash://{DIMENSION}").resolve()


def _budget(backend: TimedBackend, space: Space) -> int:
    set_token_budget(space, backend, _SETTINGS, _CALIBRATION)
    return backend.token_budget


# The rate is 1 / (1 + price / budget); the first budget within 3 % of that of 2,048 is the answer.
@pytest.mark.parametrize(("pass_price", "expected"), [(0, 512), (40, 1_024), (2_000, 2_048)])
def test_smallest_budget_near_the_best_rate_is_chosen(
    space: Space, pass_price: int, expected: int
) -> None:
    assert _budget(TimedBackend(pass_price=pass_price), space) == expected


@pytest.mark.parametrize("slow_call", range(7))
def test_one_slow_measurement_does_not_change_the_answer(space: Space, slow_call: int) -> None:
    backend = TimedBackend(pass_price=40)
    backend.slow_call = slow_call
    assert _budget(backend, space) == 1_024


def test_budgets_beyond_memory_are_never_chosen(space: Space) -> None:
    backend = TimedBackend(pass_price=2_000, limit=1_000)
    assert _budget(backend, space) <= 1_000
    assert max(backend.device.passes) <= 1_000


def test_slow_model_keeps_the_default_after_a_short_measurement(space: Space) -> None:
    backend = TimedBackend(pass_price=2_000, token_seconds=1e-3)
    assert _budget(backend, space) == _DEFAULT
    assert sum(backend.device.passes) <= _CANDIDATES[0]


def test_packed_passes_are_measured_at_the_size_that_their_budget_allows(space: Space) -> None:
    class PackedDevice(TimedBackend):
        budget_candidates: tuple[int, ...] = (65_536, 131_072, 262_144)
        passes: ClassVar[list[tuple[int, int]]] = []

        def forward(self, prepared: Tokens, rows: Rows, progress: Progress) -> Costs:
            packs = pack_texts(prepared.lengths, self.token_budget, cells=True)
            self.passes.extend((self.token_budget, pack.tokens) for pack in packs)
            tokens = len(prepared.ids)
            return Costs(tokens=tokens, padded_tokens=tokens, forward_seconds=0.001)

    backend = PackedDevice(pass_price=0)
    backend.token_budget = 65_536
    _budget(backend, space)
    measured = backend.passes[-14:]
    assert [budget for budget, _ in measured].count(65_536) == 2 * 4
    assert all(0.99 * budget <= tokens <= budget for budget, tokens in measured)


def test_budget_is_cached_and_the_next_start_measures_nothing(space: Space) -> None:
    assert _budget(TimedBackend(pass_price=100), space) == 2_048
    second = TimedBackend(pass_price=0)
    assert _budget(second, space) == 2_048
    assert second.calls == 0


def test_workers_that_start_together_measure_once(space: Space) -> None:
    backends = [TimedBackend(pass_price=100) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        budgets = list(threads.map(partial(_budget, space=space), backends))
    assert budgets == [2_048] * 4
    assert sum(backend.calls > 0 for backend in backends) == 1


def test_requested_budget_is_not_changed(space: Space) -> None:
    backend = TimedBackend(pass_price=100)
    set_token_budget(space, backend, replace(_SETTINGS, token_budget=77), _CALIBRATION)
    assert backend.token_budget == _DEFAULT
    assert backend.calls == 0


def test_backends_without_passes_are_not_measured(space: Space, own_cache: Path) -> None:
    set_token_budget(space, HashBackend(space, _SETTINGS), _SETTINGS, _CALIBRATION)
    assert not (own_cache / "calibration").exists()
