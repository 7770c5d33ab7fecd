"""How runs are launched: their config, the tags of the jobs, and the pool in which they wait.

Dagster launches one range of dynamic partitions per run, so scattered partitions would become a run each. A run whose
config selects its partitions covers any set of them.

Where run retries are on, Dagster launches every failed run again unless its tags say otherwise, and would read bad data
three times. A run retries transient errors itself, so only a run whose process died should be launched again: the tags
of the jobs say so. Runs of an asset follow the instance: `run_retries: {retry_on_asset_or_op_failure: false}`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Self

import dagster as dg
from pydantic import Field, field_validator

from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import Space
from surge_dagster.engine.output.freshness import Status
from surge_dagster.engine.sources.partition import PartitionRange
from surge_dagster.engine.support.counts import counted, named
from surge_dagster.orchestration.names import CatalogNames, CatalogResources
from surge_dagster.orchestration.partition_keys import to_partition_key

POOL = "gpu"
RUN_TAGS = {"dagster/retry_on_asset_or_op_failure": "false"}
# Dagster's UI leaves out tags with this prefix, and Dagster copies them to a run that takes another one's place.
_UNATTENDED_TAG = ".dagster/surge_unattended"
_LONGEST = 128  # characters of a setting in a tag


class Select(Enum):
    """The state that partitions of a launch are in; Dagster's config uses the members' names."""

    all = "all"
    missing = "missing"
    stale = "stale"
    failed = "failed"

    def takes(self, status: Status, has_failed: bool) -> bool:
        if self is Select.failed:
            return has_failed
        return self is Select.all or status == self.value


@dataclass(frozen=True, slots=True)
class Unattended:
    """What a run keeps to that a sensor or a schedule requested; a launch by hand has none of it.

    It is a tag of the run, so that no operator finds it among the options of a launch.

    Attributes:
        expected_space: it refuses any other one, and where this is None, any that is not the first of its output.
        expected_settings: it refuses others, see `settings_of_vectors`; None where they could not be known.
        removed_partitions: what it does about partitions removed from the source; None leaves them.
        shards: machines that share the work, and with it the database of Dagster.
        part: of the only partition, the rows that it encodes; None for all.
    """

    expected_space: str | None = None
    expected_settings: str | None = None
    removed_partitions: Literal["report", "delete"] | None = None
    shards: int = 1
    part: PartitionRange | None = None

    @classmethod
    def of(cls, tags: Mapping[str, str]) -> Self | None:
        if _UNATTENDED_TAG not in tags:
            return None
        values = json.loads(tags[_UNATTENDED_TAG])
        part = values.get("part")
        return cls(**values | {"part": PartitionRange(**part) if part else None})

    @property
    def tags(self) -> dict[str, str]:
        return {_UNATTENDED_TAG: json.dumps(asdict(self))}


class MistypedKeys(ConfigError):
    """The partition keys of a launch are an operator's mistake, which says nothing about the catalog."""


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

    @field_validator("select", mode="before")
    @classmethod
    def _all_when_left_empty(cls, value: Any) -> Any:
        return Select.all.value if value is None else value  # `select:` in the launchpad, which Dagster lets through

    def is_typed(self, tags: Mapping[str, str]) -> bool:
        """Whether an operator typed the partition keys, and may have made a mistake; sensor and schedule do not."""
        return Unattended.of(tags) is None and (self.keys is not None or self.keys_file is not None)

    def named_keys(self, tags: Mapping[str, str]) -> list[str] | None:
        """The partition keys in `keys` and in `keys_file`, None when neither is given; an operator must name one."""
        named = keys_of(self.keys, self.keys_file)
        if self.is_typed(tags) and not named:
            place = "keys" if self.keys_file is None else f"keys_file {self.keys_file!r}"
            raise MistypedKeys(
                f"{place} holds no partition key, so that there is nothing to do. Name at least one, or leave keys and "
                "keys_file out for everything that the run was launched for."
            )
        return named


def keys_of(keys: list[str] | None, keys_file: str | None) -> list[str] | None:
    return keys if keys_file is None else [*(keys or ()), *read_keys(keys_file)]


def read_keys(path: str) -> list[str]:
    """Partition keys of a file: a JSON list, or one key per line."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        if not text.lstrip().startswith("["):
            return [line for line in text.splitlines() if line.strip()]
        return [str(key) for key in json.loads(text)]
    except (OSError, ValueError) as error:
        raise MistypedKeys(
            f"the list of partition keys {path!r} cannot be read ({error}). Such a file holds a JSON list, or a key "
            "in each line, the first without a bracket before it. Correct or replace the file, then launch a new run."
        ) from error


def catalog_keys(typed: Iterable[str], known: Collection[str], catalog: str) -> list[str]:
    """The known catalog keys that an operator typed, each in the catalog's spelling or in Dagster's."""
    shown = {to_partition_key(key): key for key in known}
    selected: dict[str, None] = {}
    unknown, unclear = list[str](), list[str]()
    for key in typed:
        escaped = shown.get(key, key)
        if key not in known and key not in shown:
            unknown.append(repr(key))
        elif key in known and escaped != key:
            escaped_key = to_partition_key(key)
            unclear.append(
                f"{key!r} is a key of the catalog (Dagster's {escaped_key!r}) and Dagster's form of {escaped!r}"
            )
        else:
            selected[escaped] = None
    if unknown:
        raise MistypedKeys(
            f"the catalog {catalog!r} does not have {counted(len(unknown), 'key')}: {named(unknown)}. Nothing was "
            "encoded. Correct them or take them out, and launch again; the asset source_partitions shows all keys."
        )
    if unclear:
        raise MistypedKeys(f"partition keys are unclear: {named(unclear)}. Nothing was encoded. Give the other form.")
    return list(selected)


def job_of(
    name: str,
    op: dg.OpDefinition | dg.PendingNodeInvocation,
    description: str,
    resources: Mapping[str, Any] | None = None,
) -> dg.JobDefinition:
    """A job of one op, in the run's own process.

    Args:
        resources: of a job that is given to a sensor: where Dagster has to bind them, it makes the sensor anew, with a
            warning about a parameter that is in beta.
    """

    @dg.job(
        name=name,
        executor_def=dg.in_process_executor,
        run_tags=RUN_TAGS,
        description=description,
        resource_defs=resources,
    )
    def compose() -> None:
        op()

    return compose


def unattended(
    resources: CatalogResources,
    space: Space | None,
    shards: int = 1,
    removed_partitions: Literal["report", "delete"] | None = None,
) -> Unattended:
    """What a run keeps to that is requested now: it fills this space, or begins the first one of an empty output."""
    settings = None
    with suppress(ConfigError):  # the run fails with the same error, which is alerted
        settings = settings_of_vectors(resources)
    return Unattended(space.name if space else None, settings, removed_partitions, shards)


def config_of(op_name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The run config with these options of a `LaunchConfig`."""
    return {"ops": {op_name: {"config": dict(options)}}}


def settings_of_vectors(resources: CatalogResources) -> str:
    """The settings that decide which vectors a run makes, from which columns, as JSON."""
    spec = {name: value for name, value in resources.encoder.encoding_spec().as_dict().items() if value is not None}
    folder = Path(str(spec["model"])).expanduser()
    if folder.is_absolute() or folder.is_dir():
        spec["model"] = "a folder"  # on another machine it may have another path
    columns = resources.catalog.model_dump(include={"id", "text", "missing_text", "columns", "encoding"})
    return json.dumps({name: _short(value) for name, value in (columns | spec).items()}, sort_keys=True)


def _short(value: Any) -> Any:
    """A digest in the place of a long value: Postgres takes no tag of more than 2.7 kB."""
    text = json.dumps(value)
    return value if len(text) <= _LONGEST else f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def is_by_operator(tags: Mapping[str, str]) -> bool:
    """Whether somebody executes a run again; Dagster copies the tags of the first one."""
    return "dagster/parent_run_id" in tags and "dagster/retry_number" not in tags


def require_expected_settings(tags: Mapping[str, str], resources: CatalogResources) -> None:
    """Refuse to encode with other settings than the run was requested with.

    A run in a container of its own may get other variables than the code server, and would begin another space or fill
    the space with vectors of other texts. A launch by an operator expects nothing, and one who executes a run again may
    have fixed a setting, so that run is not refused.
    """
    requested = Unattended.of(tags)
    expected = requested.expected_settings if requested else None
    here = settings_of_vectors(resources)
    if expected is not None and expected != here and not is_by_operator(tags):
        was, now = json.loads(expected), json.loads(here)
        differing = [name for name in sorted(was.keys() | now.keys()) if was.get(name) != now.get(name)]
        values = [f"{name} is {now.get(name)!r} and was {was.get(name)!r}" for name in differing]
        raise ConfigError(
            f"where the run is executed, other settings hold than it was requested with: {', '.join(values)}. Nothing "
            "was encoded. The code server and the machine or container of a run need the same SURGE_ variables. If "
            "they were changed while the run waited, the next tick uses the new ones, as does a run that you launch by "
            "hand."
        )


def differing_settings(names: CatalogNames, context: dg.OpExecutionContext) -> list[str]:
    """The settings in a run's config with another value than in the code location, such as `encoder.model`.

    Dagster's launchpad keeps an edited tab with the whole config of the resources: a run that is launched from it weeks
    later has the settings of that day. Only names are returned: a value may be secret.
    """
    given: Mapping[str, Any] = context.run_config.get("resources") or {}  # pyright: ignore[reportAssignmentType]
    differing = list[str]()
    for resource in sorted(names.resource_keys & given.keys()):
        schema = context.job_def.resource_defs[resource].config_schema
        own = schema.default_value if schema.default_provided else {}
        config = (given[resource] or {}).get("config") or {}
        differing += [f"{resource}.{name}" for name, value in config.items() if name in own and own[name] != value]
    return differing


def record_pool_limit(instance: dg.DagsterInstance) -> bool:
    """Record the pool with the limit of the instance's settings, unless it is recorded; returns whether it has one.

    Dagster records a pool's limit when its queue first meets the pool, and starts every run that waits at that moment:
    on a new instance a refresh in eight shards would start eight encoder pools. So the sensors record it beforehand.
    """
    storage = instance.event_log_storage
    if POOL in storage.get_concurrency_keys():
        return True
    if instance.global_op_concurrency_default_limit is None:
        return False
    with suppress(Exception):  # of two concurrent calls, one fails on Postgres
        storage.initialize_concurrency_limit_to_default(POOL)
    return POOL in storage.get_concurrency_keys()
