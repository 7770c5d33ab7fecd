"""Promise 3: after SIGKILL at any step, the next run finishes, encodes again at most what was in
flight, and its result equals that of an uninterrupted run. Takes most of a minute: every case is
two runs, one of them in a process to kill.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import psutil
import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.run.staging import STAGING
from surge_dagster.engine.run.thresholds import Thresholds
from surge_dagster.engine.store.store import Store
from surge_dagster.engine.tables.opening import open_source
from tests.engine.killed_run import (
    ENCODING,
    PART_POINTS,
    POINTS,
    SPLIT_POINTS,
    THRESHOLDS,
    open_output,
)
from tests.engine.runs import completed, finish, make_run, receipts
from tests.small_catalogs import (
    Rows,
    assert_embedded,
    keys_of,
    numbered_rows,
    published_files,
    write_catalog,
)

pytestmark = pytest.mark.processes

if TYPE_CHECKING:
    from tests.engine.store.object_server import ObjectServer

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "tests.engine.killed_run"]
SIZES = [30, 25, 0, 70, 300, 100, 1, 49, 130, 20, 350, 60, 0, 90]
CATALOG: dict[str, Rows] = {
    f"p{n:02d}": numbered_rows(f"p{n}", size) for n, size in enumerate(SIZES)
}
TEXTS = sum(SIZES)
STEPS = 231  # of an uninterrupted run to a disk; a run to a bucket has about sixty more
# Two kills, in either order; the later one leaves enough steps for both to happen.
KILLED_WITHIN = (STEPS - 60, 40)
SUPERBATCHES = 10  # at least; for kills while one of them is being encoded
# Where each point is passed for the n-th time: early, inside the split partitions, and late. Two
# are split, into three and four segments.
INSTANTS = [
    ("disk", point, count)
    for point in POINTS
    for count in ((2, 9) if point in ("encode", "publish") else (5,))
]
INSTANTS += [("disk", ENCODING, 4)]
# the description of the space, the first file
INSTANTS += [("disk", "published", 1), ("disk", "published", 2)]
INSTANTS += [
    ("disk", *at)
    for at in (("stage", 3), ("staged", 3), ("kept", 6), ("assemble", 2), ("assembled", 1))
]
INSTANTS += [("disk", *at) for at in (("remove", 2), ("removed", 6))]
# Steps that only buckets have, and steps that may leave segments and files behind, in parts and
# whole.
INSTANTS += [("s3", *at) for at in (("begun", 3), ("part", 13), ("complete", 2), ("completed", 5))]
INSTANTS += [("s3", *at) for at in (("kept", 6), ("assembled", 1))]


@dataclass(frozen=True, slots=True)
class Output:
    """A folder, or a bucket whose objects are copied into a folder before a test examines them."""

    url: str
    folder: Path
    server: ObjectServer | None

    @property
    def endpoint(self) -> str:
        return self.server.url if self.server else ""

    def open(self) -> Store:
        return open_output(self.url, self.endpoint)

    def look(self) -> Path:
        """A folder with the present objects of the output."""
        if self.server is None:
            return self.folder
        shutil.rmtree(self.folder, ignore_errors=True)
        for key in self.server.objects():
            path = self.folder / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.server.content(key))
        return self.folder / "out"


@pytest.fixture
def output(request: pytest.FixtureRequest, tmp_path: Path, where: str) -> Output:
    if where.startswith("disk"):
        return Output(str(tmp_path / "out"), tmp_path / "out", None)
    server: ObjectServer = request.getfixturevalue("object_server")
    return Output("s3://vectors/out", tmp_path / "copy", server)


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_catalog(tmp_path_factory.mktemp("killed") / "catalog", CATALOG)


@pytest.fixture(scope="module")
def uninterrupted(
    tmp_path_factory: pytest.TempPathFactory, catalog: Path, hash_pool: EncoderPool
) -> Path:
    output = tmp_path_factory.mktemp("uninterrupted")
    run = completed(make_run(hash_pool, open_source(catalog), output, THRESHOLDS))
    assert run.report.texts_encoded == TEXTS
    return output


Mortal = Callable[..., tuple[int, list[list[str]]]]


@pytest.fixture(scope="module")
def mortal_run(tmp_path_factory: pytest.TempPathFactory, catalog: Path) -> Iterator[Mortal]:
    """Runs each in its own process and returns the exit status and the lines of its log."""
    logs = tmp_path_factory.mktemp("logs")
    with subprocess.Popen(
        COMMAND, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as forking:
        assert forking.stdin
        assert forking.stdout
        runs = 0

        def run(output: Output, point: str, count: int) -> tuple[int, list[list[str]]]:
            nonlocal runs
            runs += 1
            log = logs / str(runs)
            arguments = [str(catalog), output.url, output.endpoint, str(log), point, str(count)]
            print(json.dumps(arguments), file=forking.stdin, flush=True)
            status = int(forking.stdout.readline())  # pyright: ignore[reportOptionalMemberAccess]
            return status, [line.split(" ") for line in log.read_text().splitlines()]

        yield run
        forking.stdin.close()


def texts_encoded(lines: list[list[str]]) -> int:
    return sum(int(line[1]) for line in lines if line[0] == "encoded")


def in_flight(lines: list[list[str]]) -> int:
    """The largest number of texts in flight in a run that died."""
    [died] = [line for line in lines if line[0] == "died"]
    return int(died[-1])


@pytest.mark.parametrize(("where", "point", "count"), INSTANTS, ids=lambda value: str(value))
def test_run_after_a_kill_encodes_at_most_what_was_in_flight(
    hash_pool: EncoderPool,
    output: Output,
    mortal_run: Mortal,
    catalog: Path,
    uninterrupted: Path,
    point: str,
    count: int,
) -> None:
    space = hash_pool.space.name
    status, lines = mortal_run(output, point, count)
    assert status == -signal.SIGKILL
    said = [line[1] for line in lines if line[0] == "receipt"]
    state = OutputState(output.open(), space)
    published = {each.key for each in open_source(catalog) if state.freshness(each).file}
    staged = staged_rows(output.look(), CATALOG.keys() - published)
    assert set(said) <= published, "each partition with a receipt has its file"

    run = make_run(hash_pool, open_source(catalog), output.open(), THRESHOLDS)
    events = finish(run)
    assert keys_of(receipts(events, "fresh")) == sorted(published), (
        "published partitions are not encoded again"
    )
    assert keys_of(receipts(events, "encoded")) == sorted(CATALOG.keys() - published)
    assert run.report.texts_reused == staged, "staged rows are not encoded again"
    assert run.report.texts_encoded == TEXTS - sum(len(CATALOG[key]) for key in published) - staged
    assert texts_encoded(lines) + run.report.texts_encoded - TEXTS <= in_flight(lines), (
        "encoded twice"
    )
    found = output.look()
    files = published_files(uninterrupted, space)
    assert published_files(found, space) == files, "no temp file is left"
    assert not (found / STAGING).exists()
    for key, rows in CATALOG.items():
        one, other = (assert_embedded(place, space, key, rows) for place in (found, uninterrupted))
        of_the_run = {name: getattr(other, name) for name in ("rows_version", "oldest_encoded_at")}
        assert replace(one, **of_the_run) == other
    [workers] = [[int(pid) for pid in line[1:]] for line in lines if line[0] == "workers"]
    assert all_gone(workers)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("where", "seed"), [(where, seed) for where in ("disk", "s3") for seed in range(50)]
)
def test_run_with_other_thresholds_completes_a_killed_run(
    hash_pool: EncoderPool, output: Output, mortal_run: Mortal, catalog: Path, seed: int
) -> None:
    """Takes a quarter of an hour: 100 kills on a disk and 100 in a bucket, at seeded steps, the
    second one of each pair while the second run resumes the work; with every fifth seed the first
    kill comes while a worker encodes.
    """
    random = Random(seed)
    space = hash_pool.space.name
    kills = [("any", random.randint(1, steps)) for steps in random.sample(KILLED_WITHIN, 2)]
    if seed % 5 == 0:
        kills[0] = (ENCODING, random.randint(1, SUPERBATCHES // 2))
        kills[1] = ("any", random.randint(1, min(KILLED_WITHIN)))
    encoded = lost = 0
    for kill in kills:
        status, lines = mortal_run(output, *kill)
        assert status == -signal.SIGKILL, "the run is killed each time"
        encoded += texts_encoded(lines)
        lost += in_flight(lines)
    left = OutputState(output.open(), space)
    missing = {each.key for each in open_source(catalog) if not left.freshness(each).file}
    staged = staged_rows(output.look(), missing)
    thresholds = Thresholds(b_min=random.randint(1, 40), b_max=random.randint(40, 400))
    run = completed(make_run(hash_pool, open_source(catalog), output.open(), thresholds))
    assert run.report.texts_reused == staged
    assert run.report.texts_encoded == sum(len(CATALOG[key]) for key in missing) - staged
    assert encoded + run.report.texts_encoded - TEXTS <= lost
    found = output.look()
    assert published_files(found, space) == {f"{key}.parquet" for key in CATALOG}
    assert not (found / STAGING).exists()
    for key, rows in CATALOG.items():
        assert_embedded(found, space, key, rows)


def staged_rows(output: Path, keys: Collection[str]) -> int:
    """Rows of the complete staged segments of these partitions."""
    names = [path for path in (output / STAGING).glob("*/*/*/*.parquet") if path.parts[-3] in keys]
    return sum(int(path.stem.split("-")[1]) - int(path.stem.split("-")[0]) for path in names)


def test_kills_cover_every_step_of_split_partitions_and_uploads() -> None:
    assert {point for where, point, _ in INSTANTS if where == "disk"} == {
        *POINTS,
        *SPLIT_POINTS,
        ENCODING,
    }
    assert {point for where, point, _ in INSTANTS if where == "s3"} > set(PART_POINTS)


def all_gone(pids: list[int]) -> bool:
    """Whether the processes end by themselves; a zombie has ended."""
    _, alive = psutil.wait_procs(
        [process for pid in pids for process in worker_with(pid)], timeout=30
    )
    return not [process for process in alive if still_runs(process)]


def still_runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def worker_with(pid: int) -> list[psutil.Process]:
    """The worker with this pid, if it still runs: it may end at any moment, and another process may
    get its pid."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        if "surge_dagster.engine.encoder.worker.main" in process.cmdline():
            return [process]
    return []


@pytest.mark.parametrize("where", ["disk"])
def test_run_that_is_killed_repeatedly_is_completed(
    hash_pool: EncoderPool, output: Output, mortal_run: Mortal, catalog: Path, uninterrupted: Path
) -> None:
    space = hash_pool.space.name
    for number in range(3):
        assert mortal_run(output, "receipt", 3 * number + 2)[0] == -signal.SIGKILL
    files = published_files(output.look(), space)
    assert len([name for name in files if name.endswith(".parquet")]) >= 8
    finish(make_run(hash_pool, open_source(catalog), output.open(), THRESHOLDS))
    assert published_files(output.look(), space) == published_files(uninterrupted, space)
    for key, rows in CATALOG.items():
        assert_embedded(output.look(), space, key, rows)


def test_run_that_is_not_killed_passes_every_step(tmp_path: Path, catalog: Path) -> None:
    arguments = [str(catalog), str(tmp_path / "o"), "", str(tmp_path / "log"), "receipt", "1000"]
    ran = subprocess.run(
        [*COMMAND, *arguments], cwd=ROOT, timeout=100, capture_output=True, text=True
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    lines = [line.split(" ") for line in (tmp_path / "log").read_text().splitlines()]
    assert len([line for line in lines if line[0] == "receipt"]) == len(CATALOG)
    assert texts_encoded(lines) == TEXTS
    assert [line for line in lines if line[0] == "passed"] == [["passed", str(STEPS)]], (
        "the kills cover the whole run"
    )
