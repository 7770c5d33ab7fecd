"""Shared by the tests of the encoder: models, faulty workers, and texts through a pool."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from surge_dagster.engine.encoder.arena import Slot
from surge_dagster.engine.encoder.pool import EncoderPool

HERE = Path(__file__).parent

# Read and not imported: see `tiny_model`.
_MAKERS = ast.parse((HERE / "tiny_models.py").read_text()).body
TINY_MODELS = [
    one.name for one in _MAKERS if isinstance(one, ast.FunctionDef) and not one.name.startswith("_")
]


def tiny_model(architecture: str, folder: Path) -> Path:
    """The folder of a model of `tiny_models`, always with the same weights."""
    # Ten seconds, which each process that collects tests would take; few of them run the tests that
    # need it.
    import torch

    from tests.engine.encoder import tiny_models

    torch.manual_seed(3)
    return getattr(tiny_models, architecture)(folder)


@pytest.fixture
def faulty_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets workers find the backend of `faults.py`; see there which texts do what."""
    monkeypatch.setenv("PYTHONPATH", str(HERE))


def column(texts: list[str]) -> pa.LargeStringArray:
    """Texts as the sources deliver them."""
    return pa.array(texts, pa.large_string())


@contextlib.contextmanager
def filled_slot(pool: EncoderPool, texts: list[str]) -> Iterator[Slot]:
    """The only slot of an arena, of just these texts."""
    size = sum(len(text.encode()) for text in texts)
    with pool.arena(slots=1, max_texts=len(texts), max_bytes=max(1, size)) as arena:
        slot = arena.acquire()
        slot.append(column(texts))
        yield slot


def encode(pool: EncoderPool, texts: list[str]) -> np.ndarray:
    with filled_slot(pool, texts) as slot:
        pool.encode(slot)
        return slot.matrix(0, len(texts)).copy()
