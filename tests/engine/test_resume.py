"""Promise 3: after SIGKILL at any step, the next run finishes, encodes again at most what was in flight, and the result
is that of a run that nobody interrupted. Takes most of a minute: every case is two runs, one of them in a process to
kill.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from random import Random

import psutil
import pytest

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.output import open_store
from surge_dagster.engine.output.freshness import OutputState
from surge_dagster.engine.output.staging import STAGING
from surge_dagster.engine.sources import open_source
from surge_dagster.engine.superbatch import Thresholds
from tests.engine.killed_run import POINTS, SPLIT_POINTS, THRESHOLDS
from tests.engine.runs import finish, make_run, receipts
from tests.small_catalogs import Rows, assert_embedded, keys_of, numbered_rows, published_files, write_catalog

ROOT = Path(__file__).parents[2]
SIZES = [30, 25, 0, 70, 300, 100, 1, 49, 130, 20, 350, 60, 0, 90]
CATALOG: dict[str, Rows] = {f"p{n:02d}": numbered_rows(f"p{n}", size) for n, size in enumerate(SIZES)}
TEXTS = sum(SIZES)
# Where each point is passed for the n-th time: early, inside the split partitions, and late. Two are split, into
# three and four segments.
INSTANTS = [(point, count) for point in POINTS for count in ((2, 9) if point in ("encode", "publish") else (5,))]
INSTANTS += [("stage", 3), ("staged", 3), ("kept", 6), ("assemble", 2), ("assembled", 1), ("remove", 2), ("removed", 6)]


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_catalog(tmp_path_factory.mktemp("killed") / "catalog", CATALOG)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, catalog: Path, hash_pool: EncoderPool) -> Path:
    output = tmp_path_factory.mktemp("uninterrupted")
    run = make_run(hash_pool, open_source(catalog), output, THRESHOLDS)
    finish(run)
    assert run.report.texts_encoded == TEXTS
    return output


def run_until_killed(catalog: Path, output: Path, log: Path, point: str, count: int) -> list[list[str]]:
    command = [sys.executable, "-m", "tests.engine.killed_run", *map(str, (catalog, output, log)), point, str(count)]
    ran = subprocess.run(command, cwd=ROOT, timeout=100, capture_output=True, text=True)
    assert ran.returncode == -signal.SIGKILL, ran.stderr
    return [line.split(" ") for line in log.read_text().splitlines()]


@pytest.mark.parametrize(("point", "count"), INSTANTS, ids=lambda value: str(value))
def test_a_killed_run_is_taken_up_where_it_was(
    hash_pool: EncoderPool, tmp_path: Path, catalog: Path, uninterrupted: Path, point: str, count: int
) -> None:
    output, space = tmp_path / "out", hash_pool.space.name
    lines = run_until_killed(catalog, output, tmp_path / "log", point, count)
    said = [line[1] for line in lines if line[0] == "receipt"]
    encoded = sum(int(line[1]) for line in lines if line[0] == "encoded")
    [in_flight] = [int(line[-1]) for line in lines if line[0] == "died"]
    state = OutputState(open_store(output), space)
    on_disk = {key for key in CATALOG if state.facts(key)}
    staged = staged_rows(output, CATALOG.keys() - on_disk)
    assert set(said) <= on_disk, "what has a receipt is on disk"

    run = make_run(hash_pool, open_source(catalog), output, THRESHOLDS)
    events = finish(run)
    assert keys_of(receipts(events, "fresh")) == sorted(on_disk), "what was published is not encoded again"
    assert keys_of(receipts(events, "encoded")) == sorted(CATALOG.keys() - on_disk)
    assert run.report.texts_reused == staged, "nor is what was staged"
    assert run.report.texts_encoded == TEXTS - sum(len(CATALOG[key]) for key in on_disk) - staged
    assert encoded + run.report.texts_encoded - TEXTS <= in_flight, "encoded twice"
    assert published_files(output, space) == published_files(uninterrupted, space), "nor is a temp file left"
    assert not (output / STAGING).exists()
    for key, rows in CATALOG.items():
        assert assert_embedded(output, space, key, rows) == assert_embedded(uninterrupted, space, key, rows)
    [workers] = [[int(pid) for pid in line[1:]] for line in lines if line[0] == "workers"]
    assert all_gone(workers)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(30))
def test_wherever_a_run_is_killed_a_run_with_other_thresholds_finishes_it(
    hash_pool: EncoderPool, tmp_path: Path, catalog: Path, seed: int
) -> None:
    """Takes minutes: two kills at steps drawn from all of them, the second while the first one's work is taken up."""
    random = Random(seed)
    output, space = tmp_path / "out", hash_pool.space.name
    for number in range(2):
        point = random.choice((*POINTS, *SPLIT_POINTS))
        log = tmp_path / f"log{number}"
        command = [sys.executable, "-m", "tests.engine.killed_run", *map(str, (catalog, output, log)), point]
        ran = subprocess.run([*command, str(random.randint(1, 8))], cwd=ROOT, timeout=100, capture_output=True)
        assert ran.returncode in (0, -signal.SIGKILL)
    left = OutputState(open_store(output), space)
    missing = {key for key in CATALOG if not left.facts(key)}
    staged = staged_rows(output, missing)
    thresholds = Thresholds(b_min=random.randint(1, 40), b_max=random.randint(40, 400))
    run = make_run(hash_pool, open_source(catalog), output, thresholds)
    finish(run)
    assert run.report.texts_reused == staged
    assert run.report.texts_encoded == sum(len(CATALOG[key]) for key in missing) - staged
    assert published_files(output, space) == {f"{key}.parquet" for key in CATALOG}
    assert not (output / STAGING).exists()
    for key, rows in CATALOG.items():
        assert_embedded(output, space, key, rows)


def staged_rows(output: Path, keys: Collection[str]) -> int:
    """Rows of the complete segments that lie staged for these partitions."""
    names = [path for path in (output / STAGING).glob("*/*/*/*.parquet") if path.parts[-3] in keys]
    return sum(int(path.stem.split("-")[1]) - int(path.stem.split("-")[0]) for path in names)


def test_every_step_of_a_split_partition_is_among_those_at_which_runs_are_killed() -> None:
    assert {point for point, _ in INSTANTS} == {*POINTS, *SPLIT_POINTS}


def all_gone(pids: list[int]) -> bool:
    """Whether the processes end, of themselves; a zombie whose parent has not looked yet has ended."""
    found = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs([process for process in found if is_ours(process)], timeout=30)
    return not [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def is_ours(process: psutil.Process) -> bool:
    try:
        return "surge_dagster.engine.encoder.worker" in process.cmdline()
    except psutil.Error:
        return False


def test_a_run_that_is_killed_again_and_again_still_gets_done(
    hash_pool: EncoderPool, tmp_path: Path, catalog: Path, uninterrupted: Path
) -> None:
    output, space = tmp_path / "out", hash_pool.space.name
    for number in range(3):
        run_until_killed(catalog, output, tmp_path / f"log{number}", "receipt", 3 * number + 2)
    files = published_files(output, space)
    assert len([name for name in files if name.endswith(".parquet")]) >= 8
    finish(make_run(hash_pool, open_source(catalog), output, THRESHOLDS))
    assert published_files(output, space) == published_files(uninterrupted, space)
    for key, rows in CATALOG.items():
        assert_embedded(output, space, key, rows)


def test_a_run_that_nobody_kills_dies_of_nothing(tmp_path: Path, catalog: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "tests.engine.killed_run",
        str(catalog),
        str(tmp_path / "o"),
        str(tmp_path / "log"),
    ]
    ran = subprocess.run([*command, "receipt", "1000"], cwd=ROOT, timeout=100, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    lines = (tmp_path / "log").read_text().splitlines()
    assert len([line for line in lines if line.startswith("receipt")]) == len(CATALOG)
    assert sum(int(line.split()[1]) for line in lines if line.startswith("encoded")) == TEXTS
