"""Tests of what the UI shows during runs, on a real `dagster dev`.

One server serves all tests of this file, because starting it takes 10 s; the tests run in the
file's order, each on the state after the earlier ones. Most of the time is Dagster's: a run takes a
few seconds to start, and the daemons poll.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.dagster.browser import NoBrowser, browser_page
from tests.dagster.conftest import numbered_keys
from tests.dagster.dev_server import DevServer, dev_server, eventually
from tests.small_catalogs import numbered_rows, write_partition

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.processes

ROWS = 20
KEYS = numbered_keys(12)
PLOTTED = ("texts_per_second", "duty_cycle", "overlap_ratio", "upload_seconds")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("project")


@pytest.fixture(scope="module")
def server(folder: Path, cache_folder: Path) -> Iterator[DevServer]:
    """A server with a catalog of twelve partitions; the seventh blocks its run until the gate is
    open."""
    for key in KEYS:
        write(folder, key)
    write_partition(
        folder / "catalog",
        "p06",
        [("x", f"wait for {folder / 'gate'}"), *numbered_rows("p06", ROWS - 1)],
    )
    with dev_server(folder, b_min=str(ROWS), b_max=str(ROWS)) as started:
        yield started


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two questions
        return False


def run_held_up(server: DevServer, folder: Path, letter: str, *before: str) -> tuple[str, Path]:
    """A run whose last partition waits for a gate, after Dagster has all others: its first and
    those `before` it."""
    (folder / "gate").touch()
    gate = folder / f"gate of {letter}"
    write(folder, f"{letter}00")
    write_partition(folder / "catalog", f"{letter}01", [("x", f"wait for {gate}")])
    run_id = server.launch("catalog_refresh")
    published = {f"{letter}00", *before}
    eventually(
        "the partitions before the gate",
        lambda: published <= set(server.partitions()["materialized"]),
    )
    return run_id, gate


def write(folder: Path, key: str, rows: int = ROWS, version: str = "v1") -> None:
    write_partition(folder / "catalog", key, numbered_rows(key, rows), version=version)


@contextmanager
def camera_on(server: DevServer, folder: Path) -> Iterator[Callable[..., None]]:
    """Give what saves a screenshot of a page in a folder; without a browser the test is skipped."""
    try:
        with browser_page() as page:
            yield partial(take, page, f"http://127.0.0.1:{server.port}", folder)
    except NoBrowser as reason:
        pytest.skip(str(reason))


def take(
    page: Page, url: str, folder: Path, name: str, path: str, *shows: str, click: str | None = None
) -> None:
    """Take a screenshot when the page shows these texts, after a click on the text `click`."""
    page.set_default_timeout(120_000)
    page.goto(f"{url}{path}")
    if click is not None:
        page.get_by_text(click, exact=True).first.click()
    for text in shows:
        page.get_by_text(text).first.wait_for()
    page.get_by_text("Loading run logs").first.wait_for(state="hidden")
    page.wait_for_load_state("networkidle")
    broken = page.evaluate(
        "[...document.images].filter(image => image.complete && !image.naturalWidth)"
        ".map(image => image.src)"
    )
    assert not broken, "images that cannot be shown"
    screenshot = page.screenshot(path=folder / f"{name}.png", animations="disabled")
    assert len(screenshot) > 25_000, f"{name} is blank"


@pytest.mark.timeout(120)
def test_sensor_starts_a_run_whose_partitions_appear_one_by_one(
    server: DevServer, folder: Path
) -> None:
    server.start_sensor()

    [run] = eventually("the sensor's run", server.runs)

    assert run["jobName"] == "embed_partitions"

    run_id = run["runId"]

    seen = eventually("the first partitions", lambda: server.partitions()["materialized"])

    assert server.status(run_id) == "STARTED"
    assert set(KEYS[:6]).issuperset(seen), "the seventh is still held up"

    (folder / "gate").touch()
    assert server.finished(run_id) == "SUCCESS"

    server.stop_sensor()
    assert len(server.runs()) == 1
    assert server.partitions()["materialized"] == KEYS
    assert server.checked() == {"runId": run_id, "status": "SUCCEEDED"}


@pytest.mark.timeout(120)
def test_pages_in_a_browser_show_the_finished_run(server: DevServer, folder: Path) -> None:
    """Takes ten seconds, most of them Chromium's. The pictures lie in pytest's temporary folder."""
    (folder / "gate").touch()
    if len(server.partitions()["materialized"]) < 12:  # when this test is run by itself
        assert server.finished(server.launch("catalog_refresh")) == "SUCCESS"

    with camera_on(server, folder) as take:
        take("partitions", "/assets/embeddings?view=partitions", "12 partitions", "p00")
        take("plots", "/assets/superbatches?view=overview", *PLOTTED, click="Plots")
        take("checks", "/assets/embeddings?view=checks", "published_partitions_are_valid")


@pytest.mark.timeout(120)
def test_terminated_run_leaves_no_process_and_no_partition_in_progress(
    server: DevServer, folder: Path
) -> None:
    run_id, gate = run_held_up(server, folder, "q")

    assert server.encoder_workers()

    process = server.process(run_id)

    server.terminate(run_id)

    assert server.finished(run_id) == "CANCELED"

    eventually(
        "the end of all its processes",
        lambda: not server.encoder_workers() and not alive(process),
        seconds=20,
    )
    last = server.logged(run_id)[-1]

    assert last.startswith("Terminated. ")
    assert "1 not reached" in last
    assert "Launch catalog_refresh" in last

    bar = server.partitions()
    assert "q00" in bar["materialized"]
    assert bar["failed"] == bar["in progress"] == []

    gate.touch()


@pytest.mark.timeout(300)
def test_killed_run_frees_its_slot_and_is_finished_by_a_retry(
    server: DevServer, folder: Path
) -> None:
    """Neither encodes what the run before it has published."""
    run_id, gate = run_held_up(server, folder, "r", "q01")

    server.process(run_id).kill()

    assert server.finished(run_id) == "FAILURE"

    bar = server.partitions()
    assert "r00" in bar["materialized"]
    assert bar["failed"] == bar["in progress"] == []
    assert sorted(server.embedded(run_id)) == ["q01", "r00"]

    gate.touch()

    retry = server.retry_of(run_id)

    assert server.finished(retry) == "SUCCESS", "it got the only slot there is"
    assert server.encoded(retry) == 1
    assert server.embedded(retry) == ["r01"]


@pytest.mark.timeout(150)
def test_backfill_is_one_run_that_encodes_what_is_missing(server: DevServer, folder: Path) -> None:
    (folder / "gate").touch()
    write(folder, "p03", ROWS + 1, version="v2")
    write(folder, "t,0")
    server.register_partitions()  # new keys, which no run has embedded
    bar = server.partitions()
    missing = set(bar["all"]) - set(bar["materialized"])

    assert "t%2C0" in missing

    ended = server.backfill(server.launch_backfill(bar["all"]))
    assert ended["status"] == "COMPLETED_SUCCESS"

    [run] = ended["runs"]
    assert sorted(server.embedded(run["runId"])) == sorted(bar["all"])

    events = [event for event in server.events(run["runId"]) if event["asset"] == "embeddings"]
    encoded = {event["partition"] for event in events if event["action"] != "fresh"}

    assert encoded == {"p03", *missing}


def test_server_that_a_script_starts_heeds_sigint_and_sigterm(server: DevServer) -> None:
    [dev] = [process for process in server.processes() if "dev" in process.cmdline()]
    status = Path(f"/proc/{dev.pid}/status").read_text()
    [ignored] = re.findall(r"^SigIgn:\s+(\w+)$", status, re.MULTILINE)

    assert not int(ignored, 16) & (1 << signal.SIGINT - 1 | 1 << signal.SIGTERM - 1)
