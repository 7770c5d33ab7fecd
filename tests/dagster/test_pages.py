"""What the UI's pages look like in a browser, on a real `dagster dev`: pictures for a person, each beside its truth.

The pictures are left in pytest's folder for temporary files (`--basetemp=FOLDER` chooses it), under `pictures`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.browser import NoBrowser, browser_page
from tests.dagster.dev_server import DevServer, dev_server, eventually
from tests.small_catalogs import numbered_rows, write_partition

PARTITIONS, ROWS, HELD = 300, 4, 120
# A blank page of this size is some 5 kB.
_LEAST_BYTES = 25_000
_MILLISECONDS = 120_000


def key(number: int) -> str:
    """Ordinary keys, and some that Dagster shows percent-encoded."""
    return f'Köln, "{number}"' if number % 50 == 7 else f"category {number:03}"


@pytest.fixture
def server(tmp_path: Path, cache_folder: Path) -> Iterator[DevServer]:
    for number in range(PARTITIONS):
        write_partition(tmp_path / "catalog", key(number), numbered_rows(key(number), ROWS))
    held = [("x", f"wait for {tmp_path / 'gate'}"), *numbered_rows(key(HELD), ROWS - 1)]
    write_partition(tmp_path / "catalog", key(HELD), held)
    with dev_server(
        tmp_path,
        source=str(tmp_path / "catalog"),
        output=str(tmp_path / "output"),
        model="hash://16",
        backend="gated_backend:GatedBackend",
        b_min="20",
        b_max="40",
    ) as started:
        yield started


class Camera:
    """Opens pages and takes pictures of them."""

    def __init__(self, page: Any, server: DevServer, folder: Path) -> None:
        self._page = page
        self._url = f"http://127.0.0.1:{server.port}"
        self._folder = folder

    def take(self, name: str, path: str, *shows: str, click: str | None = None) -> None:
        """A picture of a page once it shows these texts.

        Args:
            click: text to be clicked before; `shows` is what comes then.
        """
        self._page.goto(f"{self._url}{path}")
        if click is not None:
            self._page.get_by_text(click).first.click(timeout=_MILLISECONDS)
        for text in shows:
            self._page.get_by_text(text).first.wait_for(timeout=_MILLISECONDS)
        self._page.get_by_text("Loading run logs").first.wait_for(state="hidden", timeout=_MILLISECONDS)
        self._page.wait_for_load_state("networkidle", timeout=_MILLISECONDS)
        broken = self._page.evaluate(
            "[...document.images].filter(image => image.complete && !image.naturalWidth).map(image => image.src)"
        )
        assert not broken, "images that cannot be shown"
        picture = self._page.screenshot(path=self._folder / f"{name}.png")
        assert len(picture) > _LEAST_BYTES, f"{name} is blank"


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_pages_show_what_is_true_while_runs_go_on_fail_and_are_done(server: DevServer, tmp_path: Path) -> None:
    """Takes minutes: a server, two runs, each a process that starts, and a browser."""
    (tmp_path / "pictures").mkdir()
    try:
        with browser_page() as page:
            look_around(server, Camera(page, server, tmp_path / "pictures"), tmp_path)
    except NoBrowser as reason:
        pytest.skip(str(reason))


def look_around(server: DevServer, camera: Camera, folder: Path) -> None:
    chosen = [key(number) for number in range(0, PARTITIONS, 3)] + [key(number) for number in range(1, PARTITIONS, 3)]
    assert len(chosen) == 200
    camera.take("assets", "/locations/surge/asset-groups/surge/lineage", "source_partitions", "superbatches")

    # 200 scattered keys in one run, which the gate holds up on its way.
    run = server.launch("embed_partitions", {"ops": {"embeddings": {"config": {"keys": chosen}}}})
    eventually("the text that holds the run up", (folder / "gate.reached").exists, seconds=120)
    seen = eventually("partitions of a run that goes on", lambda: server.partitions()["materialized"])
    assert len(seen) < 200 and server.run(run)["status"] == "STARTED"
    camera.take("run-in-progress", f"/runs/{run}", "embed_partitions", "Started")
    camera.take("partitions-in-progress", "/assets/embeddings?view=partitions", "200 partitions")
    (folder / "gate").touch()
    assert server.finished(run) == "SUCCESS"
    bar = server.partitions()
    assert len(bar["all"]) == len(bar["materialized"]) == 200 and not bar["failed"]
    camera.take("partitions-done", "/assets/embeddings?view=partitions", "200 partitions")
    camera.take("run-done", f"/runs/{run}", "Success")
    camera.take("assets-done", "/locations/surge/asset-groups/surge/lineage", "200 partitions")

    # One whose data are refused, among others.
    write_partition(folder / "catalog", key(3), [("x", "a text"), ("y", None)], version="v2")
    for number in (4, 6):
        write_partition(folder / "catalog", key(number), numbered_rows(key(number), ROWS, start=1000), version="v2")
    keys = [key(number) for number in (3, 4, 6)]
    failing = server.launch("embed_partitions", {"ops": {"embeddings": {"config": {"keys": keys}}}})
    assert server.finished(failing) == "FAILURE"
    bar = server.partitions()
    assert bar["failed"] == [key(3)] and len(bar["materialized"]) == 199
    assert server.checked() == {"runId": failing, "status": "FAILED"}
    camera.take("run-failed", f"/runs/{failing}", "Failure")
    camera.take("partitions-failed", "/assets/embeddings?view=partitions", "Failed")
    camera.take(
        "checks", "/assets/embeddings?view=checks", "published_partitions_are_valid", "vectors_have_not_drifted"
    )
    camera.take(
        "check-of-a-run",
        "/assets/embeddings?view=checks&checkDetail=published_partitions_are_valid",
        "partitions_written",
    )
    camera.take(
        "table-of-failures",
        "/assets/embeddings?view=checks&checkDetail=published_partitions_are_valid",
        "what to do",
        click="Show Markdown",
    )
    camera.take("superbatches", "/assets/superbatches?view=overview", "texts_per_second")
