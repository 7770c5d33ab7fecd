"""After SIGKILL during a hand-over, the next one leaves the table equal to the files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from random import Random

import pytest

from tests.consumers.killed_hand_over import CONSUMER, open_target
from tests.consumers.scripts import Follower
from tests.engine.feeds import Output

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]


def place_of(kind: str, request: pytest.FixtureRequest, folder: Path) -> str:
    if kind == "pgvector":
        return request.getfixturevalue("new_database")()
    if kind == "qdrant":
        pytest.importorskip("qdrant_client", reason="not installed: the extra 'qdrant'")
    else:
        pytest.importorskip("lancedb", reason="not installed: the extra 'lancedb'")
    return str(folder / kind)


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


def kill(kind: str, place: str, output: Output, at: int) -> None:
    """Hand over in a process that dies at its n-th point."""
    command = [sys.executable, "-m", "tests.consumers.killed_hand_over"]
    command += [kind, place, str(output.store.root), str(at)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    killed = subprocess.run(command, cwd=ROOT, env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL


@pytest.mark.parametrize("at", [2, 5, 9, 12])
@pytest.mark.parametrize("kind", ["lancedb", "pgvector", "qdrant"])
def test_killed_hand_over_is_repeated_by_the_next_one(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, at: int
) -> None:
    """The first load is killed at the points 2 and 5, a later hand-over at the others."""
    output = Output(tmp_path / "out")
    chance = Random(at)
    place = place_of(kind, request, tmp_path)
    follower = Follower(output, open_target(kind, place), CONSUMER)
    edit(output, chance)
    if at > 5:
        follower.hand_over()
        edit(output, chance)

    kill(kind, place, output, at)

    edit(output, chance)
    follower.hand_over()
    follower.assert_equal()
