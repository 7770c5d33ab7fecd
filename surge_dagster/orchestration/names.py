"""The names of one catalog's assets, jobs, sensors, schedules and resources in Dagster.

Several catalogs fit into one code location because no other module contains a name: functions that take a
`CatalogNames` make the assets, jobs, sensors and resources. A catalog without a name has the plain names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import dagster as dg

from surge_dagster.check_policy import RUN_CHECK
from surge_dagster.engine.errors import ConfigError
from surge_dagster.resources import CatalogSource, Encoder, OutputStore

_GROUP = "surge"
_VALID = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class CatalogResources:
    """What a run, a tick or a check of one catalog works with."""

    catalog: CatalogSource
    encoder: Encoder
    output: OutputStore


@dataclass(frozen=True, slots=True)
class CatalogNames:
    """Every name of one catalog.

    Attributes:
        name: of the catalog within its code location; the first part of its asset keys, and put before all other names
            with an underscore, two for ops, as Dagster does. None is for the only one, or the first one, of a code
            location.

    Raises:
        ConfigError: the name is not made of letters, digits and underscores, or does not begin with a letter.
    """

    name: str | None = None

    def __post_init__(self) -> None:
        if self.name is not None and not _VALID.fullmatch(self.name):
            raise ConfigError(
                f"the catalog's name is {self.name!r}; expected letters, digits and underscores, a letter first"
            )

    @property
    def source_partitions(self) -> dg.AssetKey:
        """The external asset with the source partitions."""
        return self._key("source_partitions")

    @property
    def superbatches(self) -> dg.AssetKey:
        """The asset with an event per encode call."""
        return self._key("superbatches")

    @property
    def embeddings(self) -> dg.AssetKey:
        """The asset with a file per partition."""
        return self._key("embeddings")

    @property
    def current_space(self) -> dg.AssetKey:
        """The asset that says which space readers use."""
        return self._key("current_space")

    @property
    def group(self) -> str:
        """The group of the four."""
        return self.name or _GROUP

    @property
    def partitions(self) -> dg.DynamicPartitionsDefinition:
        """The dynamic partitions that hold the catalog's keys."""
        return dg.DynamicPartitionsDefinition(name=self.partitions_name)

    @property
    def partitions_name(self) -> str:
        """The name under which Dagster stores the catalog's keys."""
        return self._prefixed("catalog")

    @property
    def run_check(self) -> dg.AssetCheckKey:
        """The check that ends every run."""
        return dg.AssetCheckKey(self.embeddings, RUN_CHECK)

    @property
    def embeddings_op(self) -> str:
        """The op of the asset `embeddings`, and of the job whose config names partitions."""
        return self._op("embeddings")

    @property
    def refresh_op(self) -> str:
        """The op of the refresh job."""
        return self._op("refresh")

    @property
    def compare_op(self) -> str:
        """The op that reads everything and evaluates the catalog's checks."""
        return self._op("compare_catalog_and_output")

    @property
    def current_space_op(self) -> str:
        """The op of the asset `current_space`."""
        return self._op("current_space")

    @property
    def refresh_job(self) -> str:
        """The job that brings everything up to date."""
        return self._prefixed("catalog_refresh")

    @property
    def embed_job(self) -> str:
        """The job whose config names partitions; the sensor and operators launch it."""
        return self._prefixed("embed_partitions")

    @property
    def check_job(self) -> str:
        """The job that compares the catalog with the output."""
        return self._prefixed("catalog_check")

    @property
    def switch_job(self) -> str:
        """The job that makes another space the current one."""
        return self._prefixed("switch_current_space")

    @property
    def jobs(self) -> frozenset[str]:
        """All jobs of the catalog."""
        return frozenset((self.refresh_job, self.embed_job, self.check_job, self.switch_job))

    @property
    def sensor(self) -> str:
        """The sensor that requests runs for new partitions."""
        return self._prefixed("new_partitions")

    @property
    def schedule(self) -> str:
        """The schedule of the refresh."""
        return self._prefixed("nightly_refresh")

    @property
    def failure_alerts(self) -> str:
        """The sensor that posts alerts of failed runs, where the settings name a webhook."""
        return self._prefixed("alerts_of_failed_runs")

    @property
    def lost_runs_sensor(self) -> str:
        """The sensor that declares runs failed whose process has ended."""
        return self._prefixed("lost_runs")

    @property
    def check_schedule(self) -> str:
        """The schedule of the check job, where the settings have one."""
        return self._prefixed("scheduled_check")

    @property
    def catalog_resource(self) -> str:
        """Key of the catalog's source."""
        return self._prefixed("catalog")

    @property
    def encoder_resource(self) -> str:
        """Key of the encoder's settings."""
        return self._prefixed("encoder")

    @property
    def output_resource(self) -> str:
        """Key of the output."""
        return self._prefixed("output")

    @property
    def input_resource(self) -> str:
        """Key of the input manager that loads embeddings into other assets."""
        return self._prefixed("embeddings_input")

    @property
    def resource_keys(self) -> set[str]:
        """The resource keys that an op, a sensor or a schedule declares to call `resources` with its context."""
        return {self.catalog_resource, self.encoder_resource, self.output_resource}

    def resources(self, given: Any) -> CatalogResources:
        """This catalog's resources out of those of a Dagster context."""
        return CatalogResources(
            catalog=getattr(given, self.catalog_resource),
            encoder=getattr(given, self.encoder_resource),
            output=getattr(given, self.output_resource),
        )

    def _key(self, name: str) -> dg.AssetKey:
        return _asset_key(self.name, name)

    def _prefixed(self, name: str) -> str:
        return f"{self.name}_{name}" if self.name else name

    def _op(self, name: str) -> str:
        # Jobs and ops share one namespace in Dagster: with one underscore, a catalog named "catalog" would have an op
        # with the name of the plain job.
        return f"{self.name}__{name}" if self.name else name


@cache
def _asset_key(*parts: str | None) -> dg.AssetKey:
    return dg.AssetKey([part for part in parts if part])
