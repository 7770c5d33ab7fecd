"""After SIGKILL or a restart of Postgres during a hand-over, the next one leaves the table equal to
the files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from surge_dagster.consumers.comparison import compare
from tests.consumers.killed_hand_over import CONSUMER, open_target
from tests.consumers.scripts import Follower
from tests.consumers.test_targets import drop
from tests.engine.feeds import Output

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
POINTS = 40  # about as many as a hand-over passes


def place_of(kind: str, request: pytest.FixtureRequest, folder: Path) -> str:
    if kind == "pgvector":
        return request.getfixturevalue("new_database")()
    pytest.importorskip("lancedb", reason="not installed: the extra 'lancedb'")
    return str(folder / "lance")


def edit(output: Output, chance: Random, keys: Iterable[str] = "abcd") -> None:
    """Change some of these partitions in every way that there is."""
    for key in keys:
        rows = {
            f"id-{chance.randrange(12)}": f"text {chance.randrange(4)}"
            for _ in range(chance.randrange(12))
        }
        if chance.random() < 0.2 and key in output.rows:
            output.remove(key)
        elif chance.random() < 0.8:
            output.write(key, rows, with_changes=chance.random() < 0.8)


def interrupted(
    kind: str,
    place: str,
    output: Output,
    at: int,
    *modes: str,
    act: Callable[[subprocess.Popen[str]], Any] = lambda process: None,
    after_seconds: float = 0,
) -> bool:
    """Hand over in a process that dies at a point, or is ended by `act` when it tells of it;
    whether it was."""
    command = [
        sys.executable,
        "-m",
        "tests.consumers.killed_hand_over",
        kind,
        place,
        str(output.store.root),
        str(at),
    ]
    pipe = subprocess.PIPE
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [*command, *modes], cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True
    ) as process:
        if "told" in modes and process.stdout and process.stdout.readline():
            time.sleep(after_seconds)  # any instant is right
            act(process)
        _, errors = process.communicate()
    expected = "TransientError: the table 'products' of Postgres does not answer: "
    assert process.returncode in (0, -signal.SIGKILL) or expected in errors, errors
    return process.returncode != 0


@pytest.mark.parametrize(("kind", "at"), [("lancedb", 5), ("lancedb", 12), ("pgvector", 9)])
def test_killed_hand_over_is_repeated_by_the_next_one(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, at: int
) -> None:
    """The first load is killed for the point 5, a later hand-over for the others."""
    output = Output(tmp_path / "out")
    chance = Random(at)
    follower = Follower(output, open_target(kind, place_of(kind, request, tmp_path)), CONSUMER)
    place = str(tmp_path / "lance") if kind == "lancedb" else follower.target._dsn  # pyright: ignore[reportAttributeAccessIssue]
    edit(output, chance)
    if at > 5:
        follower.hand_over()
        edit(output, chance)
    assert interrupted(kind, place, output, at)
    edit(output, chance)
    follower.hand_over()
    follower.assert_equal()


@pytest.mark.soak
@pytest.mark.timeout(3600)
# a fifth is removed
@pytest.mark.parametrize("keys", [4, 2_500], ids=["3 partitions", "2,000 partitions"])
@pytest.mark.parametrize("kind", ["lancedb", "pgvector"])
def test_fifty_kills_and_restarts_lose_and_double_nothing(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, keys: int
) -> None:
    """Takes minutes: each is a process of its own, which ends at a point, or up to a tenth of a
    second after it."""
    restart = request.getfixturevalue("restart_postgres") if kind == "pgvector" else None
    place = place_of(kind, request, tmp_path)
    output = Output(tmp_path / "out")
    chance = Random(16)
    endings = Counter[str]()
    loads = True
    follower = Follower(output, open_target(kind, place), CONSUMER)
    names = [f"p{number:04}" for number in range(keys)]
    edit(output, chance, names)
    while endings.total() < 50:
        edit(output, chance, chance.sample(names, min(keys, 100)))
        points = POINTS if keys == 4 else 4 * keys if loads else 400
        modes = [mode for mode in ("writes", "told") if chance.random() < 0.6]
        at = 1 + chance.randrange(8 if "writes" in modes else points)
        after_seconds = chance.random() / 10
        act = (
            restart
            if restart is not None and "told" in modes and chance.random() < 0.6
            else subprocess.Popen.kill
        )
        ended = interrupted(kind, place, output, at, *modes, act=act, after_seconds=after_seconds)
        endings["restarts" if act is restart else "kills"] += ended
        if chance.random() < 0.5:
            edit(output, chance, chance.sample(names, min(keys, 20)))
        if chance.random() < 0.7:
            done = follower.hand_over()
            loads = chance.random() < 0.15
            follower.assert_equal()
            assert compare(done.feed, follower.target).wrong == {}
            if loads:
                drop(follower.target)
    follower.hand_over()
    follower.assert_equal()
    print(
        f"{kind}, {len(output.rows):,} partitions, {sum(map(len, output.rows.values())):,} rows: "
        f"{dict(endings)}"
    )
