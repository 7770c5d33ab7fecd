"""Random edits of real files, run after run: each refresh gives what a fresh full run would give,
in which `verify --reencode all` finds nothing, and encodes no row whose vector the old file has.
`make soak` tries a thousand scripts, and three hundred with a real model, whose vectors are
compared with those of sentence-transformers.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.feed.row_comparison import RowChanges
from surge_dagster.engine.run import previous_rows
from surge_dagster.engine.run.staging import STAGING
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.store import open_store
from surge_dagster.engine.support.cosines import LOWEST_COSINE, cosines
from surge_dagster.engine.tables.opening import open_source
from surge_dagster.engine.verify.verification import Violation, verify
from tests.engine.edits import EDITS, edited
from tests.engine.feeds import note_changes
from tests.engine.odd_texts import odd_texts
from tests.engine.refreshes import CountingPool
from tests.engine.runs import failures, finish, make_run, receipts
from tests.small_catalogs import (
    Rows,
    assert_embedded,
    assert_hash_vectors,
    numbered_rows,
    partition_folder,
    write_partition,
)

_STEPS = st.lists(
    st.dictionaries(
        st.sampled_from(["a", "b", "split", "new"]),
        st.lists(st.sampled_from(EDITS), max_size=12)
        | st.sampled_from(["revert", "other id type", "cast", "remove", "rename"]),
        min_size=1,
    ),
    min_size=1,
    max_size=4,
)


@dataclass(slots=True)
class Model:
    """A model, and what its output has to be.

    Attributes:
        unit: rows, of which a SuperBatch may have six to twelve and the largest partition
            seventeen.
        texts: from which those of the rows are drawn; empty: each row has one of its own.
        reencoded: rows of each partition that are encoded again after each step; None is all.
    """

    pool: EncoderPool
    unit: int
    texts: Sequence[str]
    reencoded: int | None
    assert_vectors: Callable[[np.ndarray, list[str]], None]
    is_truncated: Callable[[str], bool]


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Model:
    if request.param == "hash":
        pool = request.getfixturevalue("hash_pool")
        return Model(
            pool, 10, (), None, assert_hash_vectors, lambda text: 1 + len(text.encode()) // 4 > 256
        )
    pool, reference = map(request.getfixturevalue, ("model_pool", "reference"))
    texts = odd_texts()
    vectors = dict(zip(texts, reference.encode(texts), strict=True))
    lengths = dict(
        zip(texts, map(len, reference.tokenizer(texts, truncation=False)["input_ids"]), strict=True)
    )

    def assert_vectors(matrix: np.ndarray, stored: list[str]) -> None:
        if stored:
            assert (
                cosines(matrix, np.stack([vectors[text] for text in stored])).min()
                >= LOWEST_COSINE["fp32"]
            )

    return Model(pool, 2, texts, 1, assert_vectors, lambda text: lengths[text] > 256)


class Refreshed:
    """A catalog on disk and its output, refreshed after each step of a script."""

    def __init__(self, model: Model, root: Path, random: Random) -> None:
        self.catalog, self.output = root / "catalog", root / "out"
        self.model, self.pool = model, CountingPool(model.pool)
        self.random = random
        self.rows: dict[str, Rows] = {
            key: self.new_rows(key, size) for key, size in (("a", 2), ("b", 0), ("split", 17))
        }
        self.first = dict(self.rows)
        self.published: dict[str, Rows] = {}  # of removed partitions, too
        self.id_types: dict[str, pa.DataType] = {}
        self.changes: dict[str, RowChanges | None] = {}
        self.number = 0

    def refresh(self, step: dict[str, Any]) -> None:
        """Apply a step, run, and check what was written and what was encoded."""
        self.number += 1
        for key, edit in step.items():
            self.apply(key, edit)
        before = {key: self.published.get(key, ()) for key in self.rows}
        old = {key: [(str(row_id), text) for row_id, text in rows] for key, rows in before.items()}
        self.pool.rows, unit = 0, self.model.unit
        thresholds = Thresholds(
            b_min=self.random.randint(1, 6 * unit), b_max=self.random.randint(6 * unit, 12 * unit)
        )
        run = make_run(self.pool, open_source(self.catalog), self.output, thresholds, changes=True)
        self.changes.clear()
        events = finish(run)
        assert failures(events) == [] and not (self.output / STAGING).exists()
        for receipt in receipts(events, "encoded"):
            known = self.reusable(old[receipt.key])
            new = [text for _, text in self.rows[receipt.key] if text not in known]
            assert (receipt.rows_encoded, receipt.rows_reused + len(new)) == (
                len(new),
                receipt.rows,
            )
            self.compare(
                self.changes.get(receipt.key), old[receipt.key], self.rows[receipt.key], known
            )
        assert self.pool.rows == run.report.texts_encoded - run.report.costs.texts_deduplicated
        for key, rows in self.rows.items():
            facts = assert_embedded(
                self.output, run.space.name, key, rows, self.model.assert_vectors
            )
            assert facts.truncated == sum(self.model.is_truncated(text) for _, text in rows)
        self.published |= self.rows
        source, store, again = (
            open_source(self.catalog),
            open_store(self.output),
            self.model.reencoded,
        )
        found = verify(source, store, run.space, pool=self.model.pool, reencode=again)
        violations = {each.key: each.kind for each in found if isinstance(each, Violation)}
        assert violations == dict.fromkeys(self.published.keys() - self.rows.keys(), "orphan")

    def reusable(self, old: Rows) -> set[str]:
        """Texts of an old file of which their length says whether they were truncated."""
        sizes: dict[bool, dict[str, int]] = {True: {}, False: {}}
        for _, text in old:
            sizes[self.model.is_truncated(text)][text] = len(text.encode())
        shortest, longest = (
            min(sizes[True].values(), default=math.inf),
            max(sizes[False].values(), default=-1),
        )
        return {
            text
            for text, size in (sizes[True] | sizes[False]).items()
            if size < shortest or size > longest
        }

    def apply(self, key: str, edit: Any) -> None:
        rows = self.first.get(key, ()) if edit == "revert" else self.rows.get(key, ())
        if edit in ("remove", "rename"):
            if key in self.rows and (edit == "rename" or len(self.rows) > 1):
                shutil.rmtree(partition_folder(self.catalog, key))
                del self.rows[key]
                if edit == "rename":
                    self.write(f"{key}'s", rows, self.id_types.get(key))
                self.id_types.pop(key, None)
            return
        if edit == "other id type":
            is_number = self.id_types.get(key) == pa.int64()
            self.id_types[key] = pa.string() if is_number else pa.int64()
            rows = [(f"id-{n}" if is_number else n, text) for n, (_, text) in enumerate(rows)]
        elif edit == "revert":
            self.id_types.pop(key, None)
        elif edit != "cast":
            kind = self.id_types.get(key, pa.string())
            rows = edited(rows, edit, self.random, self.model.texts)
            if kind == pa.int64():  # new ids are words
                rows = [(n, text) for n, (_, text) in enumerate(rows)]
        self.write(
            key, rows, self.id_types.get(key), pa.large_string() if edit == "cast" else pa.string()
        )

    def write(
        self,
        key: str,
        rows: Rows,
        id_type: pa.DataType | None,
        text_type: pa.DataType | None = None,
    ) -> None:
        self.rows[key] = rows
        write_partition(
            self.catalog, key, rows, version=f"v{self.number}", id_type=id_type, text_type=text_type
        )

    def new_rows(self, key: str, units: int) -> Rows:
        rows, texts = numbered_rows(key, units * self.model.unit), self.model.texts
        return [(row_id, self.random.choice(texts)) for row_id, _ in rows] if texts else rows

    def compare(self, changes: RowChanges | None, old: Rows, new: Rows, known: set[str]) -> None:
        """What a change feed would say leads from the old rows to the new ones: vectors that are
        not known change."""
        if changes is None:
            return  # consumers take the whole partition
        before, after = dict(old), [(str(row_id), text) for row_id, text in new]
        same = {row_id for row_id, text in after if before.get(row_id) == text and text in known}
        expected = [0 if row_id in same else 2 if row_id in before else 1 for row_id, _ in after]
        assert changes.operations.tolist() == expected
        assert {*map(str, changes.deleted.to_pylist())} == {*before} - {
            row_id for row_id, _ in after
        }


@contextmanager
def refreshed(model: Model, random: Random) -> Iterator[Refreshed]:
    root = Path(mkdtemp())
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("surge_dagster.engine.files.rows.MAX_ROW_GROUP_ROWS", 16)
            patch.setattr(previous_rows, "_PIECE_BYTES", 4096)
            catalog = Refreshed(model, root, random)
            note_changes(patch, catalog.changes.__setitem__)
            yield catalog
    finally:
        shutil.rmtree(root)


def follow(model: Model, script: list[dict[str, Any]], random: Random) -> int:
    with refreshed(model, random) as catalog:
        catalog.refresh(dict.fromkeys(catalog.rows, "cast"))
        for step in script:
            catalog.refresh(step)
        return catalog.number


_SOAK = (pytest.mark.soak, pytest.mark.timeout(3600))
_SCRIPTS = _STEPS, st.randoms(use_true_random=False)


@pytest.mark.parametrize(
    ("model", "part", "examples"),
    [
        ("hash", 0, 20),
        *(pytest.param("hash", part, 100, marks=_SOAK) for part in range(10)),
        *(pytest.param("MiniLM", part, 100, marks=_SOAK) for part in range(3)),
    ],
    indirect=["model"],
)
def test_refresh_after_edits_equals_a_full_run(model: Model, part: int, examples: int) -> None:
    nights = []

    @seed(part)
    @settings(max_examples=examples, database=None)
    @given(*_SCRIPTS)
    def follow_all(script: list[dict[str, Any]], random: Random) -> None:
        nights.append(follow(model, script, random))

    follow_all()
    print(f"{len(nights)} scripts, {sum(nights)} nightly runs")
