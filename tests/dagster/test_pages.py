"""Tests of the UI's pages in a browser, on a real `dagster dev`: a screenshot and a comparison with the API of each.

The screenshots are in pytest's folder for temporary files (`--basetemp=FOLDER` chooses it), under `pictures`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from surge_dagster.orchestration.names import CatalogNames
from surge_dagster.orchestration.partition_keys import from_partition_key, to_partition_key
from tests.dagster.camera import Camera, camera_on
from tests.dagster.dev_server import DevServer, dev_server, eventually
from tests.small_catalogs import numbered_rows, write_partition

PARTITIONS, HELD = 300, 120
_DRAW = random.Random(0)
ROWS = [1 + int(_DRAW.lognormvariate(2.0, 1.0)) for _ in range(PARTITIONS)]
_CHECK = "/assets/embeddings?view=checks&checkDetail=published_partitions_are_valid"
_TALL = 3200
_SUPERBATCHES = "/assets/superbatches?view=overview"
_PLOTTED = (
    "texts_per_second",
    "overlap_ratio",
    "duty_cycle",
    "padding_ratio",
    "fill_ratio",
    "peak_resident_bytes",
)


def key(number: int) -> str:
    """Ordinary keys, and some that Dagster shows percent-encoded."""
    return f'Köln, "{number}"' if number % 50 == 7 else f"category {number:03}"


@pytest.fixture
def server(tmp_path: Path, cache_folder: Path) -> Iterator[DevServer]:
    for number in range(PARTITIONS):
        write_partition(tmp_path / "catalog", key(number), numbered_rows(key(number), ROWS[number]))
    held = [("x", f"wait for {tmp_path / 'gate'}"), *numbered_rows(key(HELD), ROWS[HELD])]
    write_partition(tmp_path / "catalog", key(HELD), held)
    with dev_server(tmp_path, 1, True, b_min="60", b_max="120") as started:
        yield started


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_pages_show_the_state_during_and_after_runs_and_failures(
    server: DevServer, tmp_path: Path
) -> None:
    """Takes minutes: a server, eight runs, each a process that starts, and a browser."""
    with camera_on(server, tmp_path / "pictures") as camera:
        see_scattered_keys(server, camera, tmp_path)
        see_a_refusal(server, camera, tmp_path)
        see_a_refresh(server, camera, tmp_path)
        see_a_backfill(server, camera, tmp_path)
        see_metrics(server, camera)


def see_scattered_keys(server: DevServer, camera: Camera, folder: Path) -> None:
    """One run of 200 of 300 known partitions, stopped by the gate on its way."""
    chosen = [key(number) for number in range(0, PARTITIONS, 3)] + [
        key(number) for number in range(1, PARTITIONS, 3)
    ]
    assert len(chosen) == 200
    with dg.DagsterInstance.from_config(str(folder / "home")) as instance:
        known = [to_partition_key(key(number)) for number in range(PARTITIONS)]
        instance.add_dynamic_partitions(CatalogNames().partitions_name, known)
    camera.take(
        "assets", "/locations/surge/asset-groups/surge/lineage", "source_partitions", "superbatches"
    )
    run = server.launch("embed_partitions", {"ops": {"embeddings": {"config": {"keys": chosen}}}})
    eventually("the text that holds the run up", (folder / "gate.reached").exists, seconds=120)
    seen = eventually(
        "partitions of a run that goes on", lambda: server.partitions()["materialized"]
    )
    assert len(seen) < 200 and server.run(run)["status"] == "STARTED"
    camera.take("run-in-progress", f"/runs/{run}", "embed_partitions", "Started")
    camera.take("partitions-in-progress", "/assets/embeddings?view=partitions", "300 partitions")
    (folder / "gate").touch()
    assert server.finished(run) == "SUCCESS"
    bar = server.partitions()
    assert len(bar["all"]) == PARTITIONS and not bar["failed"]
    assert set(bar["materialized"]) == {to_partition_key(one) for one in chosen}
    assert len(server.runs()) == 1
    camera.take("partitions-done", "/assets/embeddings?view=partitions", "300 partitions")
    camera.take("run-done", f"/runs/{run}", "Success")
    camera.take("assets-done", "/locations/surge/asset-groups/surge/lineage", "300 partitions")


def see_a_refusal(server: DevServer, camera: Camera, folder: Path) -> None:
    """A run with one partition whose data is refused."""
    write_partition(folder / "catalog", key(3), [("x", "a text"), ("y", None)], version="v2")
    for number in (4, 6):
        rows = numbered_rows(key(number), ROWS[number], start=1000)
        write_partition(folder / "catalog", key(number), rows, version="v2")
    keys = [key(number) for number in (3, 4, 6)]
    failing = server.launch("embed_partitions", {"ops": {"embeddings": {"config": {"keys": keys}}}})
    assert server.finished(failing) == "FAILURE"
    bar = server.partitions()
    assert bar["failed"] == [key(3)] and len(bar["materialized"]) == 199
    assert server.checked() == {"runId": failing, "status": "FAILED"}
    camera.take("run-failed", f"/runs/{failing}", "Failure")
    camera.take("partitions-failed", "/assets/embeddings?view=partitions", "Failed")
    camera.take(
        "partition-failed",
        "/assets/embeddings?view=partitions&partition=category%20003",
        "every row needs one",
    )
    camera.take(
        "checks",
        "/assets/embeddings?view=checks",
        "published_partitions_are_valid",
        "vectors_have_not_drifted",
    )
    camera.take("check-of-a-run", _CHECK, "partitions_written")
    camera.take_entry("table-of-failures", _CHECK, "failed", "what to do")


def see_a_refresh(server: DevServer, camera: Camera, folder: Path) -> None:
    """A run of the remaining partitions, with the refused one, which was fixed."""
    write_partition(folder / "catalog", key(3), numbered_rows(key(3), ROWS[3]), version="v3")
    run = server.launch("catalog_refresh")
    assert server.finished(run) == "SUCCESS"
    bar = server.partitions()
    assert len(bar["all"]) == len(bar["materialized"]) == PARTITIONS and not bar["failed"]
    files = [event for event in server.events(run) if event["asset"] == "embeddings"]
    assert len(files) == PARTITIONS - 200 + 1
    camera.take("check-passed", _CHECK, "partitions_written", height=_TALL)
    for entry in ("timeline", "throughput", "partition_sizes", "rows_of_last_runs"):
        camera.take_chart(entry, _SUPERBATCHES, entry)
    camera.take(
        "partition", "/assets/embeddings?view=partitions&partition=category%20003", "row_count"
    )
    assert not [line for line in camera.lines() if "did not materialize" in line], (
        "another run has fixed it since"
    )


def see_a_backfill(server: DevServer, camera: Camera, folder: Path) -> None:
    """Five scattered partitions, launched like the UI's button: one run for each contiguous range."""
    known = server.partitions()["all"]
    chosen, changed = [known[place] for place in (10, 70, 130, 190, 250)], known[130]
    original = from_partition_key(changed)
    write_partition(folder / "catalog", original, numbered_rows(original, 40), version="v4")
    backfill = server.launch_backfill(chosen)
    ended = server.backfill(backfill, seconds=300)
    assert ended["status"] == "COMPLETED_SUCCESS"
    assert [run["status"] for run in ended["runs"]] == ["SUCCESS"] * 5
    files = [
        e
        for run in ended["runs"]
        for e in server.events(run["runId"])
        if e["asset"] == "embeddings"
    ]
    assert sorted(event["partition"] for event in files) == sorted(chosen)
    assert [event["partition"] for event in files if not event.get("reused")] == [changed]
    assert len(server.partitions()["materialized"]) == PARTITIONS
    camera.take("backfill", f"/runs/b/{backfill}", "embeddings")
    camera.take("backfill-runs", f"/runs/b/{backfill}?tab=runs", "Success")
    camera.take("runs", "/runs", "catalog_refresh")
    assert not [line for line in camera.lines() if "surge/" in line], (
        "bookkeeping, which is cut off there"
    )


def see_metrics(server: DevServer, camera: Camera) -> None:
    """The metrics of all SuperBatches so far, in a table and in charts."""
    camera.take("superbatches", _SUPERBATCHES, "texts_encoded", height=_TALL)
    camera.take("superbatches-plots", _SUPERBATCHES, *_PLOTTED, click="Plots", height=_TALL)
    assert set(_PLOTTED) <= camera.lines()
