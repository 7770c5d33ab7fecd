"""Chunks of a document count as one row."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import pyarrow as pa

from surge_dagster.engine.chunks.splitting import splitter_digest
from surge_dagster.engine.compare.comparison import compare
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.files.facts import FileFacts
from surge_dagster.engine.files.formats import file_name
from surge_dagster.engine.files.parquet import write_file
from surge_dagster.engine.files.rows import carried_columns, in_words, schema, table_of
from surge_dagster.engine.model.chunk_rule import ChunkRule
from surge_dagster.engine.model.spec import EncodingSpec, Space
from surge_dagster.engine.output.spaces import claim_space
from surge_dagster.engine.store import open_store
from surge_dagster.engine.store.store import Store

DOCUMENTS = 6
CHUNKS = 3


def write_chunks(store: Store, space: Space) -> None:
    """Write a partition of documents whose chunks have nearly equal vectors."""
    draw = np.random.default_rng(2)
    topics = draw.standard_normal((DOCUMENTS, space.dimension)).repeat(CHUNKS, axis=0)
    vectors = (topics + 0.1 * draw.standard_normal(topics.shape)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    documents = [f"d{row // CHUNKS}" for row in range(len(vectors))]
    ids = pa.array([f"{name}#{row}" for row, name in enumerate(documents)], pa.string())
    carried = pa.record_batch({"document_id": pa.array(documents, pa.string())})
    columns = schema(
        pa.string(), space.dimension, "float32", include_text=True, carried=carried.schema
    )
    facts = FileFacts(
        *("a", space.name, "m", "fp32", "v1", "digest", "version"),
        rows=len(vectors),
        dimension=space.dimension,
        truncated=0,
        carried_columns=in_words(carried_columns(columns)),
    )
    texts = pa.array([f"text {row}" for row in range(len(vectors))], pa.large_string())
    with store.create(file_name(space.name, "a")) as upload:
        table = table_of(columns, [ids], texts, vectors, [carried])
        write_file(upload.sink, columns, facts, [table])
        upload.publish(lambda: None)


def test_chunks_of_a_document_are_one_row(tmp_path: Path, demo_folder: Path) -> None:
    rule = ChunkRule(tokens=64, splitter=splitter_digest())
    store = open_store(tmp_path / "out")
    space = claim_space(store, EncodingSpec(str(demo_folder), chunks=rule).resolve())
    write_chunks(store, space)

    def no_pool(space: Space) -> AbstractContextManager[EncoderPool]:
        raise AssertionError("no model is needed")

    found = compare(store, space, space, DOCUMENTS * CHUNKS, no_pool)

    assert found.rows == DOCUMENTS * CHUNKS
    for query in found.differing:
        documents = [line.split()[2].partition("#")[0] for line in query.first]
        assert len(set(documents)) == len(documents) == 3
