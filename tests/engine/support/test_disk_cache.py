"""The disk cache, shared by several processes."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.support import disk_cache

_HOLDER = """
import sys
from surge_dagster.engine.support import disk_cache
with disk_cache.lock("made/.lock") as locked:
    print(locked, flush=True)
    sys.stdin.read()
"""


def test_lock_is_given_up_and_is_free_once_its_holder_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SURGE_CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-c", _HOLDER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        with disk_cache.lock("made/.lock", patience_seconds=0.1) as locked:
            assert not locked
        assert f"cannot lock {tmp_path / 'made' / '.lock'}" in caplog.text
        holder.kill()
    with disk_cache.lock("made/.lock") as locked:
        assert locked


def test_folders_are_made_for_this_user_alone_whatever_the_umask_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SURGE_CACHE_DIR", str(tmp_path / "cache"))
    before = os.umask(0)
    try:
        disk_cache.write_json("tables/digests/a.json", {"kept": 1})
        disk_cache.make_folder(disk_cache.place("frames/rows/b").parent)
    finally:
        os.umask(before)
    assert disk_cache.read_json("tables/digests/a.json") == {"kept": 1}
    for folder in (
        tmp_path / "cache" / name
        for name in (".", "tables", "tables/digests", "frames", "frames/rows")
    ):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("folder", ["cache", "cache/calibration"])
@pytest.mark.parametrize("mode", [0o707, 0o757, 0o1777])
def test_folder_that_others_can_write_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str, mode: int
) -> None:
    monkeypatch.setenv("SURGE_CACHE_DIR", str(tmp_path / "cache"))
    disk_cache.write_json("calibration/a.json", {})
    (tmp_path / folder).chmod(mode)
    refusal = rf"{folder}' can be written by all users \(its mode is {mode:o}\).*`chmod o-w`"
    for use in (
        lambda: disk_cache.read_json("calibration/a.json"),
        lambda: disk_cache.write_json("calibration/b", {}),
    ):
        with pytest.raises(ConfigError, match=refusal):
            use()


def test_folder_of_another_user_is_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SURGE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    if tmp_path.stat().st_uid == 0:
        assert disk_cache.read_json("a") is None, "root may write everywhere anyway"
        os.chown(tmp_path, 12_345, -1)
    with pytest.raises(
        ConfigError, match=r"belongs to another user \(uid \d+; .*Set SURGE_CACHE_DIR to"
    ):
        disk_cache.read_json("a")
