"""text-embeddings-inference: its stored vectors of all-MiniLM-L6-v2 are those of the pool."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.support.cosines import cosines
from tests.engine.conftest import model_pool

__all__ = ["model_pool"]
pytestmark = pytest.mark.timeout(400)
# not normalized, rounded to three digits behind the point
STORED: dict[str, list[float]] = json.loads(
    (Path(__file__).parent / "data" / "tei_minilm.json").read_text()
)


def test_vectors_are_those_that_text_embeddings_inference_stored(model_pool: EncoderPool) -> None:
    found = model_pool.vectors(pa.array(list(STORED), pa.large_string()))
    assert cosines(found, np.array(list(STORED.values()))).min() > 0.99999
