"""The start of a worker: its first pass, and what the parity check compares, on a few vectors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from surge_dagster.engine.encoder.calibration import Calibration
from surge_dagster.engine.encoder.metrics import Costs
from surge_dagster.engine.encoder.worker import parity
from surge_dagster.engine.encoder.worker.backends import (
    BackendSettings,
    HashBackend,
    Progress,
    Rows,
    hash_vectors,
)
from surge_dagster.engine.encoder.worker.loading import load_backend
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.support.cosines import cosines

_SETTINGS = BackendSettings(device="cpu", precision="fp32", threads=1)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_vectors_that_are_not_finite_agree_with_none(wrong: float) -> None:
    good = np.ones((3, 4), np.float32)
    bad = good.copy()
    bad[1, 2] = wrong
    assert cosines(bad, good).tolist() == pytest.approx([1, -1, 1])
    assert cosines(good, bad).tolist() == pytest.approx([1, -1, 1])
    assert parity.lowest_cosine(bad, bad) == -1


def test_rows_of_zeros_agree_with_each_other_alone() -> None:
    zeros = np.zeros((1, 4))
    ones = np.ones((1, 4))
    assert cosines(np.vstack([zeros, zeros, ones]), np.vstack([zeros, ones, zeros])).tolist() == [
        1,
        0,
        0,
    ]


@pytest.mark.parametrize("factor", [1.0, 0.5, 3.0])
def test_vectors_of_another_length_are_refused_though_their_cosine_is_one(
    factor: float, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = EncodingSpec("hash://8").resolve()
    backend = HashBackend(space, _SETTINGS)
    theirs = hash_vectors(parity.PARITY_TEXTS, 8) / factor
    monkeypatch.setattr(parity, "load_reference", lambda *_: None)
    monkeypatch.setattr(parity, "reference_vectors", lambda *_: theirs)
    calibration = Calibration(f"calibration/test-{factor}.json")
    if factor == 1:
        assert parity.check_parity(space, backend, _SETTINGS, calibration) == pytest.approx(1)
        return
    for _ in range(2):  # measured, then cached
        with pytest.raises(ConfigError, match=f"a vector is {factor:.3g} times as long"):
            parity.check_parity(space, backend, _SETTINGS, calibration)


_calls: list[list[bytes]] = []


class RecordingBackend(HashBackend):
    """Records the texts of each call."""

    def forward(self, prepared: list[bytes], rows: Rows, progress: Progress) -> Costs:
        _calls.append(prepared)
        return super().forward(prepared, rows, progress)


@pytest.mark.usefixtures("cache_folder")
def test_first_pass_of_a_worker_has_one_text_and_runs_alone() -> None:
    """Two threads that were the first ones inside OpenVINO waited for each other for ever."""
    settings = BackendSettings(device="cpu", precision="fp32", threads=2)
    load_backend(EncodingSpec("hash://8").resolve(), settings, f"{__name__}:RecordingBackend")
    assert list(map(len, _calls)) == [1]
