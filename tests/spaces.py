"""A catalog in three complete spaces, for tests of switching."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec, Space
from surge_dagster.engine.output.current_space import CURRENT_FILE
from surge_dagster.engine.output.spaces import find_space
from surge_dagster.engine.run.embedding_run import EmbeddingRun
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources.partition import Source
from surge_dagster.engine.store import open_store
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.tables.opening import open_source
from tests.small_catalogs import numbered_rows, write_catalog

KEYS = ("a", "b", "c")
ROWS = 40
MODELS = ("hash://16", "hash://24", "hash://8")


@dataclass(frozen=True, slots=True)
class Spaces:
    """A folder with `catalog` and `output`."""

    root: Path

    @property
    def source(self) -> Source:
        return open_source(self.root / "catalog")

    @property
    def store(self) -> Store:
        return open_store(self.root / "output")

    @property
    def pointer(self) -> Path:
        return self.root / "output" / CURRENT_FILE

    def of(self, model: str) -> Space:
        """The space of a model."""
        space = find_space(self.store, EncodingSpec(model))
        assert space is not None
        return space

    def names(self) -> list[str]:
        """The three spaces in the order of `MODELS`."""
        return [self.of(model).name for model in MODELS]

    def file(self, model: str, key: str) -> Path:
        return self.root / "output" / self.of(model).name / f"{key}.parquet"

    def copy_to(self, root: Path, models: tuple[str, ...] = MODELS) -> Spaces:
        """Return a copy with only these spaces; none of them is current."""
        shutil.copytree(self.root / "catalog", root / "catalog")
        for model in models:
            name = self.of(model).name
            shutil.copytree(self.root / "output" / name, root / "output" / name)
        return Spaces(root)


def embed_into_three_spaces(root: Path, hash_pool: EncoderPool) -> Spaces:
    """Write the catalog and embed it with each of `MODELS`."""
    write_catalog(root / "catalog", {key: numbered_rows(key, ROWS) for key in KEYS})
    made = Spaces(root)
    finish(made, hash_pool)
    for model in MODELS[1:]:
        with EncoderPool(EncodingSpec(model)) as pool:
            finish(made, pool)
    return made


def finish(made: Spaces, pool: EncoderPool) -> None:
    run = EmbeddingRun(made.source, made.store, pool, Thresholds(50, 100))
    assert len(list(run)) == len(KEYS)
