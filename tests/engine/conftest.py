"""Shared by the tests of the engine: the demo model, and one pool with it, because starting it is
what costs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.run.change_feed import RowChanges
from surge_dagster.engine.run.old_rows import OldRows
from tests.engine.encoder.conftest import faulty_workers
from tests.engine.encoder.faulty_pools import no_leaks
from tests.engine.priced_pool import priced_pool
from tests.engine.refreshes import Refreshed
from tests.engine.runs import Output

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

__all__ = ["faulty_workers", "no_leaks", "priced_pool"]


@pytest.fixture(scope="session")
def model_pool(cache_folder: Path, demo_folder: Path) -> Iterator[EncoderPool]:
    """The default model in fp32 on the CPU, with whatever backend is the best one installed."""
    with EncoderPool(EncodingSpec(model=str(demo_folder)), devices="cpu") as pool:
        pool.start()
        yield pool


@pytest.fixture
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of this test alone."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("SURGE_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def output(hash_pool: EncoderPool, tmp_path: Path) -> Output:
    """An empty output, `tmp_path / "out"`."""
    return Output(hash_pool, tmp_path / "out")


@pytest.fixture
def refreshed(output: Output) -> Refreshed:
    """A partition of an output that is embedded again and again."""
    return Refreshed(output)


@pytest.fixture
def row_changes(monkeypatch: pytest.MonkeyPatch) -> list[RowChanges | None]:
    """What the runs of a test find out about changed rows, one entry for each reading of an old
    file."""
    noted: list[RowChanges | None] = []
    found_changes = OldRows.changes

    def noting(previous: OldRows) -> Any:
        changes: Any = found_changes(previous)
        noted.append(changes)
        return changes

    monkeypatch.setattr(OldRows, "changes", noting)
    return noted


@pytest.fixture(scope="module")
def reference(demo_folder: Path) -> SentenceTransformer:
    """The default model in sentence-transformers itself."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(demo_folder), device="cpu")
