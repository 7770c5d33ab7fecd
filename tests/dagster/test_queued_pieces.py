"""A refresh that the sensor divides, launched by a real daemon: its queue spreads the runs over
processes.

Which runs go on at once is never a matter of time here: a text of each piece waits at a gate of its
own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

import pytest

from tests.dagster.dev_server import DevServer, RunRecord, dev_server, eventually, most_concurrent
from tests.small_catalogs import Rows, assert_embedded, numbered_rows, write_partition

SLOTS, PIECES = 3, 6
REFUSED = "p20"


def gate_of(folder: Path, key: str) -> Path:
    return folder / "gates" / key


@pytest.fixture
def rows(tmp_path: Path) -> dict[str, Rows]:
    """By key, what the catalog holds: 24 partitions, one that is refused."""
    (tmp_path / "gates").mkdir()
    found: dict[str, Rows] = {}
    for number in range(24):
        key = f"p{number:02}"
        gated = ("waits", f"wait for {gate_of(tmp_path, key)}")
        found[key] = [gated, *numbered_rows(key, 4 + number % 3)]
        write_partition(tmp_path / "catalog", key, [("x", None)] if key == REFUSED else found[key])
    return found


def waiting(server: DevServer, run: RunRecord) -> bool:
    return any(gate_of(server.folder, key).with_suffix(".reached").exists() for key in run.keys)


def going_on(server: DevServer, count: int) -> list[RunRecord] | None:
    """The runs that stand at gates, when there are so many."""
    found = [run for run in server.records() if run.status == "STARTED" and waiting(server, run)]
    return found if len(found) == count else None


def let_through(folder: Path, keys: Sequence[str]) -> None:
    for key in keys:
        gate_of(folder, key).touch()


def assert_no_key_in_two_active_runs(runs: Sequence[RunRecord]) -> None:
    for one, other in combinations(runs, 2):
        assert one.ended and other.ended
        if one.created < other.ended and other.created < one.ended:
            assert not set(one.keys) & set(other.keys), (one.id, other.id)


def assert_embedded_once(
    server: DevServer, rows: Mapping[str, Rows], runs: Sequence[RunRecord]
) -> None:
    """Every file is right, the partition bar says the same as the files do, and no event came
    twice."""
    output = server.folder / "output"
    [space] = [folder for folder in output.iterdir() if (folder / "space.json").exists()]
    good = [key for key in rows if key != REFUSED]
    for key in good:
        assert_embedded(output, space.name, key, rows[key])
    assert [path.stem for path in sorted(space.glob("*.parquet"))] == good
    assert server.partitions() == {
        "all": list(rows),
        "materialized": good,
        "failed": [REFUSED],
        "in progress": [],
    }
    events = [
        event["partition"]
        for run in runs
        for event in server.events(run.id)
        if event["asset"] == "embeddings"
    ]
    assert sorted(events) == good


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_queued_pieces_run_in_several_processes_and_survive_a_kill(
    rows: dict[str, Rows], tmp_path: Path, cache_folder: Path
) -> None:
    """Takes a minute or two: seven runs, each a process that starts, three at a time on whatever
    the machine has."""
    with dev_server(tmp_path, SLOTS, True, max_runs=str(PIECES), b_min="4", b_max="1000") as server:
        server.sensor(on=True)
        first = eventually(
            "as many runs as there are slots, at their gates",
            lambda: going_on(server, SLOTS),
            seconds=150,
        )
        asked = server.records()
        assert len(asked) == PIECES and sorted(key for run in asked for key in run.keys) == list(
            rows
        )
        assert [run.tags["surge/piece"] for run in asked] == [
            f"{number} of {PIECES}" for number in range(1, PIECES + 1)
        ]
        assert all(run.keys for run in asked)
        assert {run.id for run in first} == {run.id for run in asked[:SLOTS]}
        assert (
            sorted(run.status for run in asked)
            == ["QUEUED"] * (PIECES - SLOTS) + ["STARTED"] * SLOTS
        )
        processes = {run.id: server.process(run.id) for run in first}
        assert {worker.ppid() for worker in server.encoder_workers()} == {
            each.pid for each in processes.values()
        }
        assert server.keys_of_a_tick() == [], "all of them are held by runs that wait or go on"

        # One that is killed leaves its slot to a run that waits, and its keys to the one that is
        # launched in its place.
        killed, slow, third = first
        processes[killed.id].kill()
        assert server.finished(killed.id) == "FAILURE"
        eventually(
            "a run in the slot of the one that was killed",
            lambda: {slow.id, third.id} < {run.id for run in going_on(server, SLOTS) or ()},
            seconds=100,
        )
        retry = server.retry_of(killed.id)
        assert server.keys_of_a_tick() == []

        # While one is held up, the others take whatever waits.
        let_through(tmp_path, [key for key in rows if key not in slow.keys])
        others = [run.id for run in server.records() if run.id not in (killed.id, slow.id)]
        assert len(others) == PIECES - 1 and retry in others
        refusing = next(
            run.id for run in server.records() if REFUSED in run.keys and run.id != killed.id
        )
        for run in others:
            assert server.finished(run) == ("FAILURE" if run == refusing else "SUCCESS")
        assert server.run(slow.id)["status"] == "STARTED"
        let_through(tmp_path, slow.keys)
        assert server.finished(slow.id) == "SUCCESS"
        server.sensor(on=False)

        runs = server.records()
        assert len(runs) == PIECES + 1, "nothing was asked for twice"
        [again] = [run for run in runs if run.id == retry]
        assert again.started
        assert most_concurrent(runs) == SLOTS
        assert_no_key_in_two_active_runs(runs)
        assert_embedded_once(server, rows, runs)
        eventually("the end of all encoder processes", lambda: not server.encoder_workers())
    eventually("the end of every process", lambda: not server.processes())
