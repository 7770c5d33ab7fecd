"""The names of one catalog's assets, jobs, sensors, schedules and resources in Dagster.

Several catalogs fit into one code location because no other module contains a name of theirs:
functions that take a `CatalogNames` make the assets, jobs, sensors and resources. A catalog without
a name has the plain names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import dagster as dg

from surge_dagster.config.check_policy import RUN_CHECK
from surge_dagster.engine.errors import ConfigError
from surge_dagster.resources import CatalogSource, EncoderResource, OutputStore

LOST_RUNS = "lost_runs"  # the sensor that all catalogs of a code location share
_VALID = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True)
class CatalogResources:
    catalog: CatalogSource
    encoder: EncoderResource
    output: OutputStore


class _Name:
    def __init__(self, plain: str, separator: str = "_") -> None:
        self._plain, self._separator = plain, separator

    def __get__(self, names: CatalogNames, owner: type) -> str:
        return f"{names.name}{self._separator}{self._plain}" if names.name else self._plain


class _Asset:
    def __init__(self, plain: str) -> None:
        self._plain = plain

    def __get__(self, names: CatalogNames, owner: type) -> dg.AssetKey:
        return _asset_key(names.name, self._plain)


@dataclass(frozen=True)
class CatalogNames:
    """Every name of one catalog.

    The catalog's own name is the first part of its asset keys, and stands before all other names
    with an underscore, two for ops, as Dagster does. None is for the only one, or the first one, of
    a code location.
    """

    name: str | None = None

    source_partitions = _Asset("source_partitions")
    superbatches = _Asset("superbatches")
    embeddings = _Asset("embeddings")
    current_space = _Asset("current_space")
    lancedb = _Asset("lancedb")
    pgvector = _Asset("pgvector")
    partitions_name = _Name("catalog")  # of the dynamic partitions

    # Jobs and ops share one namespace in Dagster: with one underscore, a catalog named "catalog"
    # would have an op with the name of the plain job. of the asset, and of the job whose config
    # names partitions
    embeddings_op = _Name("embeddings", "__")
    refresh_op = _Name("refresh", "__")
    compare_op = _Name("compare_catalog_and_output", "__")
    catalog_checks_op = _Name("catalog_checks", "__")
    current_space_op = _Name("current_space", "__")
    derive_all_op = _Name("derive", "__")

    refresh_job = _Name("catalog_refresh")
    embed_job = _Name("embed_partitions")
    check_job = _Name("catalog_check")
    switch_job = _Name("switch_current_space")
    hand_over_job = _Name("hand_over")
    derive_job = _Name("derive_embeddings")  # where the settings list derived spaces

    sensor = _Name("new_partitions")
    hand_over_sensor = _Name("hand_over_changes")
    failure_alerts = _Name("alerts_of_failed_runs")
    check_alerts = _Name("alerts_of_failed_checks")
    tick_alerts = _Name("alerts_of_failed_ticks")
    schedule = _Name("nightly_refresh")
    check_schedule = _Name("scheduled_check")

    catalog_resource = _Name("catalog")
    encoder_resource = _Name("encoder")
    output_resource = _Name("output")
    input_resource = _Name("embeddings_input")
    changes_resource = _Name("changes")
    gcs_resource = _Name("gcs")  # this and the next one where the setting `gcp` is given
    bigquery_resource = _Name("bigquery")

    def __post_init__(self) -> None:
        if self.name is not None and not _VALID.fullmatch(self.name):
            raise ConfigError(
                f"the catalog's name is {self.name!r}; expected letters, digits and underscores, a letter first"
            )

    @property
    def group(self) -> str:
        return self.name or "surge"

    @property
    def partitions(self) -> dg.DynamicPartitionsDefinition:
        return dg.DynamicPartitionsDefinition(name=self.partitions_name)

    def derived(self, label: str) -> dg.AssetKey:
        return _asset_key(self.name, f"embeddings_{label}")

    def derived_op(self, label: str) -> str:
        return f"{self.embeddings_op}_{label}"

    @property
    def run_check(self) -> dg.AssetCheckKey:
        return dg.AssetCheckKey(self.embeddings, RUN_CHECK)

    @property
    def jobs(self) -> frozenset[str]:
        """All jobs of the catalog; those of tables and derived spaces exist where the settings list
        some."""
        embedding = (self.refresh_job, self.embed_job, self.check_job, self.switch_job)
        return frozenset((*embedding, self.hand_over_job, self.derive_job))

    @property
    def resource_keys(self) -> set[str]:
        """The resource keys that an op, a sensor or a schedule declares to call `resources` with
        its context."""
        return {self.catalog_resource, self.encoder_resource, self.output_resource}

    def resources(self, context: Any) -> CatalogResources:
        """This catalog's resources out of those of the context of an op, a sensor or a schedule."""
        given = context.resources
        catalog: CatalogSource = getattr(given, self.catalog_resource)
        return CatalogResources(
            catalog=catalog.within(context),
            encoder=getattr(given, self.encoder_resource),
            output=getattr(given, self.output_resource),
        )


@cache
def _asset_key(*parts: str | None) -> dg.AssetKey:
    return dg.AssetKey([part for part in parts if part])
