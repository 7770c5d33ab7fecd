"""Runs over documents in chunks: every night the files have each document's chunks, and only new
texts are encoded."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from surge_dagster.engine.chunks.source import ChunkedSource
from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.feed.changes import changes
from surge_dagster.engine.plan.catalog_sample import sample_catalog
from surge_dagster.engine.sources.partition import Partition
from surge_dagster.engine.store import open_store
from tests.engine.chunks.documents import prose, sentence, shipped_documents, splitter
from tests.engine.feeds import hand_over
from tests.engine.runs import failures, finish, make_run, receipts
from tests.small_catalogs import assert_hash_vectors, partition_of, read_embedded
from tests.waiting import until

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

Documents = dict[str, str]


@dataclass
class Nights:
    """A catalog of documents that is edited and embedded again and again.

    Attributes:
        documents: by partition and id.
        known: the texts of each partition's chunks after the last night.
    """

    pool: EncoderPool
    folder: Path
    output: Path
    documents: dict[str, Documents]
    known: dict[str, set[str]] = field(default_factory=dict)
    night: int = 0

    def source(self, *, backwards: bool = False) -> ChunkedSource:
        version = f"v{self.night}"
        own = splitter(self.folder, tokens=64)
        partitions = [
            replace(partition_of(key, list(texts.items()), version=version), source_rows=len(texts))
            for key, texts in self.documents.items()
        ]
        listed = Listed(reversed(partitions) if backwards else partitions)
        return ChunkedSource(listed, lambda: own)

    def edit(self, random: Random) -> None:
        """Change, shorten, lengthen, add and remove documents."""
        self.night += 1
        for texts in self.documents.values():
            for name in random.sample(sorted(texts), k=min(3, len(texts))):
                texts[name] = edited(texts[name], random)
            if random.random() < 0.5:
                texts[f"new-{self.night}"] = prose(random, random.randint(0, 40))
            elif len(texts) > 2:
                del texts[random.choice(sorted(texts))]

    def embed(self, *, backwards: bool = False) -> int:
        """Run, check every file against the documents, and return the texts that were encoded."""
        run = make_run(self.pool, self.source(backwards=backwards), self.output, changes=True)
        events = finish(run)
        assert failures(events) == []
        new = 0
        for receipt in receipts(events):
            texts = self.require_file(run.space.name, receipt.key)
            assert receipt.source_rows == len(self.documents[receipt.key])
            new += len(texts - self.known.get(receipt.key, set()))
            self.known[receipt.key] = texts
        assert run.report.texts_encoded <= new
        return run.report.texts_encoded

    def require_file(self, space: str, key: str) -> set[str]:
        """Require that a file has all characters of each document, in order, in its chunks."""
        found = read_embedded(self.output, space, key)
        assert found.texts is not None
        assert_hash_vectors(found.matrix, found.texts)
        rest = iter(zip(found.ids, found.texts, strict=True))
        for name, text in self.documents[key].items():
            number = 0
            position = 0
            while position < len(text) or number == 0:
                chunk_id, chunk = next(rest)
                assert chunk_id == f"{name}#{number}"
                assert text[position : position + len(chunk)] == chunk
                position += len(chunk)
                number += 1
            assert position == len(text)
        assert list(rest) == []
        return set(found.texts)


class Listed(list[Partition]):
    url = "memory"


def edited(text: str, random: Random) -> str:
    """One of the edits that people make."""
    place = random.randint(0, len(text))
    match random.randint(0, 4):
        case 0:
            return text[:place] + sentence(random) + " " + text[place:]
        case 1:
            return text[:place]
        case 2:
            return prose(random, 5) + text
        case 3:
            return text[:place] + text[place + 200 :]
        case _:
            return text + "\n\n" + prose(random, 10)


@pytest.fixture
def nights(hash_pool: EncoderPool, demo_folder: Path, tmp_path: Path) -> Nights:
    random = Random(7)
    documents = {
        key: {f"{key}-{row}": prose(random, random.randint(0, 80)) for row in range(6)}
        for key in ("a", "b", "c")
    }
    return Nights(hash_pool, demo_folder, tmp_path / "out", documents)


@pytest.mark.parametrize("seed", range(3))
def test_ten_nights_of_edits_encode_only_new_chunks(nights: Nights, seed: int) -> None:
    random = Random(seed)
    nights.embed()

    for _ in range(10):
        nights.edit(random)
        nights.embed(backwards=random.random() < 0.5)

    assert nights.embed() == 0


def test_order_of_the_partitions_does_not_matter(nights: Nights, tmp_path: Path) -> None:
    nights.embed()
    backwards = Nights(nights.pool, nights.folder, tmp_path / "backwards", nights.documents)

    backwards.embed(backwards=True)

    assert backwards.known == nights.known
    space = nights.pool.space.name
    for key in nights.documents:
        ids = [read_embedded(each.output, space, key).ids for each in (nights, backwards)]
        assert ids[0] == ids[1]


def test_change_feed_deletes_the_chunks_of_a_document_that_got_shorter(nights: Nights) -> None:
    rows: Any = {}
    nights.documents["a"]["a-3"] = prose(Random(1), 40)
    nights.embed()
    hand_over(changes(open_store(nights.output), "shop"), rows)
    before = set(rows["a"])
    nights.documents["a"]["a-3"] = "One sentence."
    nights.night += 1

    nights.embed()
    hand_over(changes(open_store(nights.output), "shop"), rows)

    assert "a-3#1" in before
    assert {name for name in rows["a"] if name.startswith("a-3#")} == {"a-3#0"}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("count", "characters"),
    [(12, 6000), pytest.param(200, 250_000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])],
)
def test_vectors_of_shipped_documents_after_a_kill_are_the_librarys_own(
    tmp_path: Path, reference: SentenceTransformer, demo_folder: Path, count: int, characters: int
) -> None:
    """Documentation of installed packages, up to a hundred pages each."""
    texts = shipped_documents(count, characters)
    parts = max(3, count // 8)
    for part in range(parts):
        ids = range(part, len(texts), parts)
        table = pa.table({"id": ids, "text": [texts[row] for row in ids]})
        pq.write_table(table, tmp_path / f"part={part}.parquet")
    command = [sys.executable, "-m", "surge_dagster", "embed", f"{tmp_path}/part={{part}}.parquet"]
    options = ["--chunks", "tokens=128,format=markdown", "--model", str(demo_folder), "--b-min=20"]
    whole = [*command, str(tmp_path / "out"), *options]

    killed = subprocess.Popen(whole)
    begun = tmp_path / "out"
    until(lambda: list(begun.glob("*/*.parquet")) or killed.poll() is not None, 50 * count)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    subprocess.run(whole, check=True)

    tables = [pq.read_table(path) for path in sorted((tmp_path / "out").glob("*/*.parquet"))]
    rows = pa.concat_tables(tables)
    pieces: dict[int, str] = {}
    for row in rows.select(["document_id", "text"]).to_pylist():
        pieces[row["document_id"]] = pieces.get(row["document_id"], "") + row["text"]
    assert pieces == dict(enumerate(texts))
    assert not any(rows["truncated"].to_pylist())
    ours = np.stack(rows["embedding"].to_numpy())
    theirs = reference.encode(rows["text"].to_pylist(), normalize_embeddings=True)
    assert np.einsum("ij,ij->i", ours, theirs).min() >= 0.99999


def test_plan_counts_chunks_from_a_sample_of_documents(nights: Nights) -> None:
    nights.embed()
    chunks = sum(len(texts) for texts in nights.known.values())

    sample = sample_catalog(list(nights.source()), lambda texts: np.ones(len(texts)))

    assert sample.rows.sum() == pytest.approx(chunks, rel=0.02)
