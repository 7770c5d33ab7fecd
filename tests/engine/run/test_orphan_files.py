"""Temp files of dead writers are removed from every space, with or without work to do; those of
living ones stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from surge_dagster.engine.errors import TransientError
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.output.spaces import claim_space
from surge_dagster.engine.run.staging import STAGING, sweep_orphan_files
from surge_dagster.engine.store import open_store
from surge_dagster.engine.store.store import Store
from tests.engine.runs import Output
from tests.small_catalogs import numbered_rows, partition_of

DEAD = ".tmp-1-0123456789ab0"


def two_spaces(store: Store) -> list[str]:
    specs = EncodingSpec("hash://8"), EncodingSpec("hash://12")
    return [claim_space(store, spec.resolve()).name for spec in specs]


def leave(root: Path, space: str) -> list[Path]:
    """Create the temp files that a killed writer leaves in a space and in its staging folder."""
    staged = root / STAGING / space / "key" / "version"
    staged.mkdir(parents=True)
    left = [root / space / DEAD, staged / DEAD]
    for path in left:
        path.write_bytes(b"half")
    return left


def test_orphan_files_are_removed_from_every_space_and_its_staged_segments(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    spaces = two_spaces(store)
    left = leave(tmp_path, spaces[0]) + leave(tmp_path, spaces[1])
    with store.create(f"{spaces[0]}/alive.parquet") as upload:
        upload.sink.write(b"x")
        sweep_orphan_files(store)
        assert not any(map(Path.exists, left))
        upload.publish(lambda: None)
    assert (tmp_path / spaces[0] / "alive.parquet").exists()


def test_run_also_removes_orphan_files_of_other_spaces(output: Output) -> None:
    other, _ = two_spaces(output.store)
    left = leave(output.root, other)
    assert output.embed([partition_of("a", numbered_rows("a", 3))]).report.partitions_written
    assert not any(map(Path.exists, left))


def test_orphan_file_that_cannot_be_removed_is_logged_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    first, second = two_spaces(store)
    leave(tmp_path, first)
    left = leave(tmp_path, second)
    sweep: Callable[[str], None] = store.sweep

    def refuse(folder: str) -> None:
        if folder == first:
            raise TransientError("the disk refuses")
        sweep(folder)

    monkeypatch.setattr(store, "sweep", refuse)
    sweep_orphan_files(store)
    assert f"{first} that no run needs could not be removed: the disk refuses" in caplog.text
    assert not any(map(Path.exists, left))
