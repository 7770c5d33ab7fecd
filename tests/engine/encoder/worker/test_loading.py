"""The start of a worker."""

from __future__ import annotations

import pytest

from surge_dagster.engine.encoder.metrics import Costs
from surge_dagster.engine.encoder.worker.backends import (
    BackendSettings,
    HashBackend,
    Progress,
    Rows,
)
from surge_dagster.engine.encoder.worker.loading import load_backend
from surge_dagster.engine.model.spec import EncodingSpec

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
