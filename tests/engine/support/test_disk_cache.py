"""The disk cache, shared by several processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from surge_dagster.engine.support import disk_cache

_HOLDER = """
import sys
from surge_dagster.engine.support import disk_cache
with disk_cache.lock("made/.lock") as locked:
    print(locked, flush=True)
    sys.stdin.read()
"""


def test_lock_is_given_up_after_the_patience_and_free_once_its_holder_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SURGE_CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-c", _HOLDER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        with disk_cache.lock("made/.lock", patience_seconds=0.1) as locked:
            assert not locked
        assert f"cannot lock {tmp_path / 'made' / '.lock'}" in caplog.text
        holder.kill()
    with disk_cache.lock("made/.lock") as locked:
        assert locked
