"""An output that is filled without a run, and the ways to load it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from surge_dagster import Embeddings
from surge_dagster.engine.files.facts import FileFacts, desired_version
from surge_dagster.engine.files.formats import file_name
from surge_dagster.engine.files.parquet import write_file
from surge_dagster.engine.files.rows import schema, table_of
from surge_dagster.engine.model.spec import EncodingSpec, Space
from surge_dagster.engine.output.spaces import claim_space
from surge_dagster.engine.store import open_store
from surge_dagster.engine.store.store import Store, StoredObject


class Output:
    """An output to which tests publish partitions without a run."""

    def __init__(self, root: Path, spec: EncodingSpec, store: Store | None = None) -> None:
        self.root = root
        self.store = store or open_store(root)
        self.space: Space = claim_space(self.store, spec.resolve())
        self.random = np.random.default_rng(5)

    def name(self, key: str) -> str:
        return file_name(self.space.name, key)

    def path(self, key: str) -> Path:
        return self.root / self.name(key)

    def put(
        self,
        key: str,
        rows: int,
        *,
        include_text: bool = True,
        id_type: pa.DataType | None = None,
        space: str | None = None,
        content: str = "0",
        dimension: int | None = None,
        precision: str = "fp32",
        source_version: str = "v1",
        truncated: np.ndarray | None = None,
    ) -> np.ndarray:
        """Publish a partition of random vectors with the ids 0, 1, …; gives the vectors."""
        d = dimension or self.space.dimension
        matrix = self.random.standard_normal((rows, d)).astype(self.space.dtype)
        ids = pa.array([str(row) for row in range(rows)], pa.string()).cast(id_type or pa.string())
        texts = pa.array([f"{key} {row}" for row in range(rows)], pa.large_string())
        named = space or self.space.name
        version = desired_version(content, named)
        columns = schema(ids.type, d, self.space.dtype, include_text=include_text)
        facts = FileFacts(
            key,
            named,
            "m",
            precision,
            source_version,
            content,
            version,
            rows,
            d,
            0,
            rows_version=f"{key} {rows}",
        )
        table = table_of(columns, [ids], texts, matrix, truncated=truncated)
        with self.store.create(self.name(key)) as upload:
            write_file(upload.sink, columns, facts, [table])
            upload.publish(lambda: None)
        return matrix


def publish_two_rows(
    store: Store, key: str, version: str = "v1", *, space: str = "s", place: str | None = None
) -> StoredObject:
    """Publish a small file of the space "s", or one of another space in its place."""
    columns = schema(pa.string(), 4, "float32", include_text=False)
    facts = FileFacts(key, space, "m", "fp32", version, "0" * 32, "1" * 32, 2, 4, 0)
    ids = pa.array(["a", "b"])
    texts = pa.array(["", ""])
    rows = table_of(columns, [ids], texts, np.zeros((2, 4), np.float32))
    with store.create(place or file_name("s", key)) as upload:
        write_file(upload.sink, columns, facts, [rows])
        return upload.publish(lambda: None)


@pytest.fixture
def output(tmp_path: Path) -> Output:
    return Output(tmp_path / "out", EncodingSpec("hash://16"))


def as_lazy(embeddings: Embeddings, partitions: list[str] | None = None) -> pa.Table:
    return embeddings.lazy(partitions).collect().to_arrow()


def as_dataset(embeddings: Embeddings, partitions: list[str] | None = None) -> pa.Table:
    return embeddings.dataset(partitions).to_table()


both_ways = pytest.mark.parametrize("load", [as_lazy, as_dataset])
Load = Callable[..., pa.Table]
