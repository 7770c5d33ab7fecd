"""After SIGKILL during a hand-over, the next one leaves the table equal to the files, with nothing doubled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from tests.consumers.killed_hand_over import CONSUMER, open_target
from tests.consumers.scripts import Follower
from tests.engine.feeds import Output

ROOT = Path(__file__).parents[2]
POINTS = 40  # about as many as a hand-over passes


def place_of(kind: str, request: pytest.FixtureRequest, folder: Path) -> str:
    if kind == "pgvector":
        return request.getfixturevalue("new_database")()
    pytest.importorskip("lancedb", reason="not installed: the extra 'lancedb'")
    return str(folder / "lance")


def edit(output: Output, chance: Random) -> None:
    """Change some partitions in every way that there is."""
    for key in ("a", "b", "c", "d"):
        rows = {f"id-{chance.randrange(12)}": f"text {chance.randrange(4)}" for _ in range(chance.randrange(12))}
        if chance.random() < 0.2 and key in output.rows:
            output.remove(key)
        elif chance.random() < 0.8:
            output.write(key, rows, with_changes=chance.random() < 0.8)


def killed(kind: str, place: str, output: Output, at: int) -> bool:
    """Hand over in a process that dies at a point; whether it came that far."""
    command = [sys.executable, "-m", "tests.consumers.killed_hand_over", kind, place, str(output.store.root), str(at)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode != 0


@pytest.mark.parametrize(("kind", "at"), [("lancedb", 5), ("lancedb", 12), ("pgvector", 9)])
def test_killed_hand_over_is_repeated_by_the_next_one(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, at: int
) -> None:
    """The first load is killed for the point 5, a later hand-over for the others."""
    output, chance = Output(tmp_path / "out"), Random(at)
    follower = Follower(output, open_target(kind, place_of(kind, request, tmp_path)), CONSUMER)
    place = str(tmp_path / "lance") if kind == "lancedb" else follower.target._dsn  # pyright: ignore[reportAttributeAccessIssue]
    edit(output, chance)
    if at > 5:
        follower.hand_over()
        edit(output, chance)
    assert killed(kind, place, output, at)
    edit(output, chance)
    follower.hand_over()
    follower.assert_equal()


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["lancedb", "pgvector"])
def test_fifty_killed_hand_overs(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> None:
    """Takes minutes: each is a process of its own."""
    output, chance, kills = Output(tmp_path / "out"), Random(16), 0
    place = place_of(kind, request, tmp_path)
    follower = Follower(output, open_target(kind, place), CONSUMER)
    while kills < 50:
        edit(output, chance)
        kills += killed(kind, place, output, 1 + chance.randrange(POINTS))
        if chance.random() < 0.5:
            edit(output, chance)
        if chance.random() < 0.7:
            follower.hand_over()
            follower.assert_equal()
