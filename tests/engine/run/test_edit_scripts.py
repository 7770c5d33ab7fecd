"""Random edits of real files, run after run: each refresh gives what a fresh full run would give, in which
`verify --reencode all` finds nothing, and encodes no row whose vector the old file has. `make soak` tries a thousand
scripts.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.feed.row_comparison import RowChanges
from surge_dagster.engine.files.formats import FileFormat
from surge_dagster.engine.run import previous_rows
from surge_dagster.engine.run.staging import STAGING
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.store import open_store
from surge_dagster.engine.tables.opening import open_source
from surge_dagster.engine.verify.verification import Violation, verify
from tests.engine.edits import EDITS, edited
from tests.engine.feeds import note_changes
from tests.engine.refreshes import CountingPool
from tests.engine.runs import failures, finish, make_run, receipts
from tests.small_catalogs import Rows, assert_embedded, numbered_rows, write_partition

_STEPS = st.lists(
    st.dictionaries(
        st.sampled_from(["a", "b", "split"]),
        st.lists(st.sampled_from(EDITS), max_size=12) | st.sampled_from(["revert", "other id type", "cast"]),
        min_size=1,
    ),
    min_size=1,
    max_size=4,
)


class Refreshed:
    """A catalog on disk and its output, refreshed after each step of a script."""

    def __init__(self, pool: EncoderPool, root: Path, random: Random, file_format: FileFormat) -> None:
        self.catalog, self.output = root / "catalog", root / "out"
        self.hashes, self.pool = pool, CountingPool(pool)
        self.random = random
        self.file_format = file_format
        self.rows: dict[str, Rows] = {"a": numbered_rows("a", 20), "b": [], "split": numbered_rows("split", 170)}
        self.first = dict(self.rows)
        self.id_types: dict[str, pa.DataType] = {}
        self.changes: dict[str, RowChanges | None] = {}
        self.number = 0

    def refresh(self, step: dict[str, Any]) -> None:
        """Apply a step, run, and check what was written and what was encoded."""
        self.number += 1
        before = self.rows if self.number > 1 else dict.fromkeys(self.rows, ())
        old = {key: [(str(row_id), text) for row_id, text in rows] for key, rows in before.items()}
        for key, edit in step.items():
            self.apply(key, edit)
        self.pool.rows = 0
        thresholds = Thresholds(b_min=self.random.randint(1, 60), b_max=self.random.randint(60, 120))
        run = make_run(
            self.pool, open_source(self.catalog), self.output, thresholds, file_format=self.file_format, changes=True
        )
        self.changes.clear()
        events = finish(run)
        assert failures(events) == [] and not (self.output / STAGING).exists()
        compared = 0
        for receipt in receipts(events, "encoded"):
            known = {text for _, text in old[receipt.key]}
            new = [text for _, text in self.rows[receipt.key] if text not in known]
            assert (receipt.rows_encoded, receipt.rows_reused + len(new)) == (len(new), receipt.rows)
            compared += receipt.compared_rows
            self.compare(self.changes.get(receipt.key), old[receipt.key], self.rows[receipt.key])
        assert self.pool.rows == run.report.texts_encoded - run.report.costs.texts_deduplicated + compared
        for key, rows in self.rows.items():
            facts = assert_embedded(self.output, run.space.name, key, rows)
            assert facts.truncated == sum(1 + len(text.encode()) // 4 > 256 for _, text in rows)
        found = verify(open_source(self.catalog), open_store(self.output), run.space, pool=self.hashes, reencode=None)
        assert not [each for each in found if isinstance(each, Violation)]

    def apply(self, key: str, edit: Any) -> None:
        rows = self.first[key] if edit == "revert" else self.rows[key]
        if edit == "other id type":
            is_number = self.id_types.get(key) == pa.int64()
            self.id_types[key] = pa.string() if is_number else pa.int64()
            rows = [(f"id-{n}" if is_number else n, text) for n, (_, text) in enumerate(rows)]
        elif edit == "revert":
            self.id_types.pop(key, None)
        elif edit != "cast":
            kind = self.id_types.get(key, pa.string())
            rows = edited(rows, edit, self.random)
            if kind == pa.int64():  # new ids are words
                rows = [(n, text) for n, (_, text) in enumerate(rows)]
        text_type = pa.large_string() if edit == "cast" else pa.string()
        self.rows[key] = rows
        write_partition(
            self.catalog, key, rows, version=f"v{self.number}", id_type=self.id_types.get(key), text_type=text_type
        )

    def compare(self, changes: RowChanges | None, old: Rows, new: Rows) -> None:
        """What a change feed would say leads from the old rows to the new ones."""
        if changes is None:
            return  # consumers take the whole partition
        before, after = dict(old), [(str(row_id), text) for row_id, text in new]
        expected = [0 if before.get(row_id) == text else 2 if row_id in before else 1 for row_id, text in after]
        assert changes.operations.tolist() == expected
        assert {*map(str, changes.deleted.to_pylist())} == {*before} - {row_id for row_id, _ in after}


@contextmanager
def refreshed(pool: EncoderPool, random: Random, file_format: FileFormat) -> Iterator[Refreshed]:
    root = Path(mkdtemp())
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("surge_dagster.engine.files.rows.MAX_ROW_GROUP_ROWS", 16)
            patch.setattr(previous_rows, "_PIECE_BYTES", 4096)
            catalog = Refreshed(pool, root, random, file_format)
            note_changes(patch, catalog.changes.__setitem__)
            yield catalog
    finally:
        shutil.rmtree(root)


def follow(pool: EncoderPool, script: list[dict[str, Any]], random: Random, file_format: FileFormat) -> None:
    with refreshed(pool, random, file_format) as catalog:
        catalog.refresh(dict.fromkeys(catalog.rows, "cast"))
        for step in script:
            catalog.refresh(step)


_SOAK = (pytest.mark.soak, pytest.mark.timeout(3600))
_SCRIPTS = _STEPS, st.randoms(use_true_random=False), st.sampled_from(["parquet", "arrow"])


@pytest.mark.parametrize(("part", "examples"), [(0, 20), *(pytest.param(part, 100, marks=_SOAK) for part in range(10))])
def test_refresh_after_edits_equals_a_full_run(hash_pool: EncoderPool, part: int, examples: int) -> None:
    @seed(part)
    @settings(max_examples=examples, database=None)
    @given(*_SCRIPTS)
    def follow_all(script: list[dict[str, Any]], random: Random, file_format: FileFormat) -> None:
        follow(hash_pool, script, random, file_format)

    follow_all()
