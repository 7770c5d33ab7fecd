"""Histories of an output: edits of the catalog, whole runs, runs that are killed at any step, runs
of ranges, and two runs at the same time that read different versions.

After every run that ends by itself the output equals that of one uninterrupted run: each partition
has its one file with its present rows and their vectors, nothing else is left, and a consumer of
the change feed has the same rows. A run encodes no text that the partition's last file has, and
after a kill at most what was in flight is encoded again. Of two writers the newer source wins.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.feed.changes import changes
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.run.staging import STAGING
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.sources.partition import Partition, PartitionRange
from surge_dagster.engine.tables.opening import open_source
from tests.engine.edits import EDITS, edited
from tests.engine.feeds import Applied, hand_over, rows_of
from tests.engine.killed_run import Ended, MortalRuns, open_output
from tests.engine.runs import Output, failures, finish, make_run, receipts
from tests.small_catalogs import (
    DIMENSION,
    Rows,
    keys_of,
    numbered_rows,
    texts_of,
    write_partition,
)

if TYPE_CHECKING:
    from tests.engine.store.object_server import ObjectServer

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

SIZES = {"a": 30, "b": 0, "c": 70, "split": 300, "d": 49, "longer": 130}
KEYS = st.sampled_from([*SIZES])
STEPS = st.integers(1, 150)  # a run of the whole catalog has some more
SECONDS = 60
HALF = 100


class Door:
    """Holds the first thread that calls it until the test opens it."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    def __call__(self) -> None:
        if not self.reached.is_set():
            self.reached.set()
            assert self._open.wait(SECONDS)

    def open(self) -> None:
        self._open.set()


class History(RuleBasedStateMachine):
    """A catalog on disk, its output, and a consumer of the output.

    Attributes:
        published: rows of each partition as the last run that ended by itself published them.
        has_killed_runs: whether runs were killed since then.
        new: texts that had to be encoded when the first of these began; None if the catalog was
            edited after it.
        encoded, lost: texts that the killed runs encoded, and that were in flight when they died.
    """

    def __init__(
        self,
        pools: tuple[EncoderPool, EncoderPool],
        mortal: MortalRuns,
        server: ObjectServer | None,
    ) -> None:
        super().__init__()
        self.pools = pools
        self.mortal = mortal
        self.server = server
        self.folder = Path(mkdtemp(prefix="surge-history-"))
        self.catalog = self.folder / "catalog"
        self.space = pools[0].space.name
        self.url = str(self.folder / "out")
        if server is not None:
            server.reset()
            self.url = "s3://vectors/out"
        self.endpoint = server.url if server is not None else ""
        self.rows: dict[str, Rows] = {}
        self.versions: dict[str, str] = {}
        self.published: dict[str, Rows] = {}
        self.target: Applied = {}
        self.has_killed_runs = False
        self.new: int | None = None
        self.encoded = 0
        self.lost = 0

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @initialize()
    def begin(self) -> None:
        for key, size in SIZES.items():
            self._write(key, numbered_rows(key, size))

    @rule(key=KEYS, edits=st.lists(st.sampled_from(EDITS), max_size=12), seed=st.integers(0, 99))
    def edit(self, key: str, edits: list[str], seed: int) -> None:
        """Also an empty list of edits, after which only the version differs."""
        self._write(key, edited(self.rows[key], edits, Random(seed)))

    @rule(b_min=st.integers(1, 60), b_max=st.integers(60, 400))
    def run(self, b_min: int, b_max: int) -> None:
        new = self._new_texts()
        run = make_run(
            self.pools[0], open_source(self.catalog), self._open(), Thresholds(b_min, b_max)
        )
        events = finish(run)
        assert failures(events) == []
        assert run.report.texts_encoded <= new
        if self.new is not None:
            assert self.encoded + run.report.texts_encoded <= self.new + self.lost
        self._check()

    @rule(step=STEPS)
    def killed_run(self, step: int) -> None:
        self._begin_to_count()
        ended = self.mortal.run(self.catalog, self.url, self.endpoint, step)
        self._count(ended)
        state = OutputState(self._open(), self.space)
        for partition in open_source(self.catalog):
            if partition.key in ended.receipts:
                assert state.freshness(partition).file, "a partition with a receipt has its file"

    @rule(step=STEPS)
    def killed_run_of_ranges(self, step: int) -> None:
        """Two halves of a split partition, the second one by a run that is killed."""
        self._begin_to_count()
        stop = len(self.rows["split"])
        if stop <= HALF:
            return
        partition = self._partition("split")
        first = PartitionRange("split", partition.source_version, 0, HALF)
        run = make_run(self.pools[0], [partition], self._open(), ranges=[first])
        assert failures(finish(run)) == []
        self.encoded += run.report.texts_encoded
        only_split = self.folder / "only"
        shutil.rmtree(only_split, ignore_errors=True)
        self._write_into(only_split, "split")
        ended = self.mortal.run(only_split, self.url, self.endpoint, step, f"{HALF}-{stop}")
        self._count(ended)

    @rule(key=KEYS, has_checked=st.booleans())
    def overtaken_run(self, key: str, has_checked: bool) -> None:
        """A run of one partition is held at its last check of the source, before or after it.
        Another run publishes a newer version in the meantime."""
        self._add_row(key)
        door = Door()
        with ThreadPoolExecutor(1) as thread:
            late = make_run(self.pools[1], [self._behind(door, key, has_checked)], self._open())
            events = thread.submit(lambda: list(late.events()))
            assert door.reached.wait(SECONDS)
            self._add_row(key)
            newer = make_run(self.pools[0], open_source(self.catalog), self._open())
            found = list(newer.events())
            door.open()
            lost = events.result(SECONDS)

        assert failures(found) == []
        assert keys_of(failures(lost)) == [key]
        assert failures(lost)[0].transient
        assert key not in keys_of(receipts(lost, "encoded"))
        self._check()

    def _behind(self, door: Door, key: str, has_checked: bool) -> Partition:
        def look(current: Callable[[], str | None]) -> str | None:
            if not has_checked:
                door()
            version = current()
            door()
            return version

        partition = self._partition(key)
        current = partition.current_source_version
        return replace(partition, current_source_version=partial(look, current))

    def _partition(self, key: str) -> Partition:
        return next(each for each in open_source(self.catalog) if each.key == key)

    def _add_row(self, key: str) -> None:
        version = self.versions[key]
        self._write(key, [*self.rows[key], (f"after {version}", f"{key} after {version}")])

    def _write(self, key: str, rows: Rows) -> None:
        self.versions[key] = f"v{int(self.versions.get(key, 'v0')[1:]) + 1}"
        self.rows[key] = rows
        self._write_into(self.catalog, key)
        if self.has_killed_runs:
            self.new = None

    def _write_into(self, catalog: Path, key: str) -> None:
        rows = self.rows[key]
        write_partition(catalog, key, rows, version=self.versions[key], row_group_size=60)

    def _open(self) -> Any:
        return open_output(self.url, self.endpoint)

    def _new_texts(self) -> int:
        """Rows whose texts the last published file does not have. What killed runs published has
        no other ones."""
        new = 0
        for key, rows in self.rows.items():
            known = set(texts_of(self.published.get(key, ())))
            new += sum(text not in known for text in texts_of(rows))
        return new

    def _begin_to_count(self) -> None:
        if not self.has_killed_runs:
            self.has_killed_runs = True
            self.new = self._new_texts()

    def _count(self, ended: Ended) -> None:
        self.encoded += ended.encoded
        self.lost += ended.in_flight

    def _check(self) -> None:
        """The output is that of an uninterrupted run."""
        output = Output(self.pools[0], self._copied())
        assert not (output.root / STAGING).exists()
        assert output.keys() == self.rows.keys()
        for key, rows in self.rows.items():
            assert output.check(key, rows).source_version == self.versions[key]
        hand_over(changes(self._open(), "shop"), self.target)
        assert self.target == rows_of(self.rows)
        self.published = dict(self.rows)
        self.has_killed_runs = False
        self.new = None
        self.encoded = 0
        self.lost = 0

    def _copied(self) -> Path:
        """A folder with the present objects of the output."""
        if self.server is None:
            return Path(self.url)
        copy = self.folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        for key in self.server.objects():
            path = copy / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.server.content(key))
        return copy / "out"


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MortalRuns]:
    runs = MortalRuns(tmp_path_factory.mktemp("logs"))
    yield runs
    runs.close()


@pytest.fixture(scope="module")
def pools(hash_pool: EncoderPool) -> Iterator[tuple[EncoderPool, EncoderPool]]:
    with EncoderPool(EncodingSpec(model=f"hash://{DIMENSION}")) as another:
        yield hash_pool, another


@pytest.mark.parametrize(
    ("where", "examples"),
    [
        ("disk", 15),
        ("bucket", 4),
        pytest.param("disk", 150, marks=pytest.mark.soak),
        pytest.param("bucket", 40, marks=pytest.mark.soak),
    ],
)
def test_output_equals_that_of_one_uninterrupted_run(
    request: pytest.FixtureRequest,
    pools: tuple[EncoderPool, EncoderPool],
    mortal: MortalRuns,
    where: str,
    examples: int,
) -> None:
    server = request.getfixturevalue("object_server") if where == "bucket" else None
    history: Any = partial(History, pools, mortal, server)
    run_state_machine_as_test(
        history,
        settings=settings(
            max_examples=examples,
            stateful_step_count=8,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
