"""Tables that follow documents in chunks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random

from surge_dagster.consumers.target import Target
from surge_dagster.engine.chunks.source import ChunkedSource
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.feed.changes import changes
from surge_dagster.engine.store import open_store
from tests.consumers.scripts import stored_rows
from tests.engine.chunks.documents import prose, splitter
from tests.engine.chunks.test_chunk_runs import Listed
from tests.engine.runs import finish, make_run
from tests.small_catalogs import partition_of


def test_document_that_got_shorter_loses_its_old_chunks(
    tmp_path: Path, hash_pool: EncoderPool, demo_folder: Path, target: Target
) -> None:
    own = splitter(demo_folder, tokens=64)
    ids: list[set[str]] = []
    for version, sentences in (("v1", 30), ("v2", 9)):
        documents = [("x", prose(Random(1), sentences)), ("y", "A hat.")]
        listed = Listed([partition_of("k", documents, version=version)])
        source = ChunkedSource(listed, lambda: own)
        finish(make_run(hash_pool, source, tmp_path / "out", changes=True))
        target.apply(partial(changes, open_store(tmp_path / "out"), "shop"), None)
        ids.append(set(stored_rows(target)["k"]))

    before, after = ids
    assert before == {"y#0", *(f"x#{number}" for number in range(len(before) - 1))}
    assert after == {"y#0", *(f"x#{number}" for number in range(len(after) - 1))}
    assert len(before) > len(after) > 2
