"""What a run is told when it is launched.

A run that the sensor starts covers a range of dynamic partitions, because Dagster knows nothing finer, and names
exactly the ones it shall touch in its config. A run started by hand has the range alone.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import dagster as dg
from dagster._core.launcher import DefaultRunLauncher
from dagster._core.storage.dagster_run import NOT_FINISHED_STATUSES
from pydantic import Field, field_validator

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import Space
from surge_dagster.orchestration.selection import Select, read_keys

_INLINE_KEYS = 500
_KEY_FILES_KEPT = 200
_KEY_FILE_SECONDS = 3600
_KEY_FILE_FOLDER = "partition_keys"

REQUEST_TAG = "surge/request"
SHARD_TAG = "surge/shard"


class LaunchConfig(dg.Config):
    """Options of a run; a launch by hand needs none of them."""

    force: bool = Field(False, description="encode partitions that are up to date too")
    keys: list[str] | None = Field(
        None, description="touch these partition keys and no others, written as in the catalog or as Dagster shows them"
    )
    keys_file: str | None = Field(None, description="the same, as a file: a JSON list, or a key in each line")
    select: Select = Field(
        Select.all,
        description=(
            "of these, those that are missing, stale, or failed in their last run; all is whatever needs it, and with "
            "force everything"
        ),
    )
    unattended: bool = Field(False, description="set by sensor and schedule: refuse to begin another vector space")
    expected_space: str | None = Field(None, description="refuse any vector space but this one")

    @field_validator("select", mode="before")
    @classmethod
    def _all_when_left_empty(cls, value: Any) -> Any:
        return Select.all.value if value is None else value  # `select:` in the launchpad, which Dagster lets through

    @property
    def is_typed(self) -> bool:
        """Whether a person named partition keys: sensor and schedule know them, and a person may be mistaken."""
        return not self.unattended and (self.keys is not None or self.keys_file is not None)

    def named_keys(self) -> list[str] | None:
        """The partition keys that the config names in either way, None when it names none.

        Raises:
            ConfigError: the file that holds them cannot be read, or a person named them and there are none.
        """
        named = keys_of(self.keys, self.keys_file)
        if self.is_typed and not named:
            place = "keys" if self.keys_file is None else f"keys_file {self.keys_file!r}"
            raise ConfigError(
                f"{place} holds no partition key, so that there is nothing to do. Name at least one, or leave keys and "
                "keys_file out for everything that the run was launched for."
            )
        return named


def name_keys(instance: dg.DagsterInstance, keys: Sequence[str]) -> dict[str, Any]:
    """The part of a run's config that names its partition keys: the list itself, or a file when it is long."""
    if len(keys) <= _INLINE_KEYS or not isinstance(instance.run_launcher, DefaultRunLauncher):
        return {"keys": list(keys)}  # another launcher may start the run where this machine's files are not
    document = json.dumps(list(keys))
    folder = Path(instance.root_directory) / _KEY_FILE_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{hashlib.sha256(document.encode()).hexdigest()[:24]}.json"
    path.write_text(document)
    return {"keys_file": str(path)}


def remove_old_key_files(instance: dg.DagsterInstance) -> None:
    """Remove lists of partition keys that were written long ago and that no run which is not over will read.

    The newest stay, so that a run that has ended can be executed again, and so do those of runs that are being asked
    for and that Dagster has no record of yet.
    """
    folder = Path(instance.root_directory) / _KEY_FILE_FOLDER
    written: dict[Path, float] = {}
    for file in folder.glob("*.json"):
        with suppress(FileNotFoundError):  # another catalog's tick removes them too
            written[file] = file.stat().st_mtime
    newest_first = sorted(written, key=written.__getitem__, reverse=True)
    old = [file for file in newest_first[_KEY_FILES_KEPT:] if time.time() - written[file] > _KEY_FILE_SECONDS]
    if not old:
        return
    waiting = instance.get_runs(filters=dg.RunsFilter(statuses=NOT_FINISHED_STATUSES))
    named = "\n".join(str(run.run_config) for run in waiting)
    for file in old:
        if file.name not in named:
            file.unlink(missing_ok=True)


def unattended_config(op_name: str, space: Space | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Config of an unattended run: it may fill the space that is there, or begin the first one of an empty output."""
    expected = {"expected_space": space.name} if space else {}
    return {"ops": {op_name: {"config": {"unattended": True, **expected, **options}}}}


def shard_requests(
    op_name: str, instance: dg.DagsterInstance, space: Space | None, shards: Sequence[tuple[str, Sequence[str]]]
) -> list[dg.RunRequest]:
    """A run for each shard, which names its keys and is tagged with their range, its place and the request's id.

    Args:
        op_name: the op that reads the config.
        instance: where the runs are recorded.
        space: that all of them must write to, None where it is still to be begun.
        shards: of a request each, its id and the keys in Dagster's order.
    """
    remove_old_key_files(instance)
    return [
        dg.RunRequest(
            run_config=unattended_config(op_name, space, name_keys(instance, keys)),
            tags={
                "dagster/asset_partition_range_start": keys[0],
                "dagster/asset_partition_range_end": keys[-1],
                REQUEST_TAG: request,
                **({SHARD_TAG: f"{number} of {len(shards)}"} if len(shards) > 1 else {}),
            },
        )
        for number, (request, keys) in enumerate(shards, 1)
    ]


def keys_of(keys: list[str] | None, keys_file: str | None) -> list[str] | None:
    """Partition keys that a config names in either way, None when it names none.

    Raises:
        ConfigError: the file that holds them cannot be read.
    """
    return keys if keys_file is None else [*(keys or ()), *read_keys(keys_file)]
