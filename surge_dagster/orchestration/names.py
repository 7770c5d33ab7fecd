"""The names of one catalog's assets, jobs, sensors, schedules and resources in Dagster.

Several catalogs fit into one code location because no other module contains a name of theirs:
functions that take a `CatalogNames` make the assets, jobs, sensors and resources. A catalog without
a name has the plain names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import dagster as dg

from surge_dagster.config.nested_settings import RUN_CHECK
from surge_dagster.config.run_setup import RunSetup
from surge_dagster.engine.errors import ConfigError
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.engine.sources import Source
from surge_dagster.resources import CatalogSource, EncoderResource, OutputStore

# Of the grace time, for publishing; the last events are stored in the rest of the time.
_PUBLISH_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class CatalogResources:
    catalog: CatalogSource
    encoder: EncoderResource
    output: OutputStore

    @property
    def events_grace_seconds(self) -> float:
        """How long a stopped run may take to store its last events."""
        return (1 - _PUBLISH_SHARE) * self.encoder.grace_seconds

    def open_source(self, spec: EncodingSpec | None = None) -> Source:
        """Open the catalog with the rows of a spec, or of the encoder's."""
        return self.catalog.open(spec or self.encoder.encoding_spec())

    def run_setup(self, *, force: bool = False) -> RunSetup:
        return RunSetup(
            catalog=self.catalog,
            encoder=self.encoder,
            files=self.output,
            source=self.catalog.url,
            output=self.output.url,
            source_options=self.catalog.cloud_options(),
            output_options=self.output.cloud_options(),
            grace_seconds=_PUBLISH_SHARE * self.encoder.grace_seconds,
            force=force,
        )


_VALID = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


class CatalogNames:
    """Every name of one catalog.

    The catalog's own name is the first part of its asset keys. In front of other names it stands
    with an underscore, or two for ops: jobs and ops share one namespace in Dagster, and a catalog
    named "catalog" would have an op with the name of the plain job.

    Args:
        name: None for the only catalog, or the first one, of a code location.
    """

    def __init__(self, name: str | None = None) -> None:
        if name is not None and not _VALID.fullmatch(name):
            raise ConfigError(
                f"the catalog's name is {name!r}; expected letters, digits and underscores, a "
                "letter first"
            )
        self.name = name
        prefix = f"{name}_" if name else ""
        op_prefix = f"{name}__" if name else ""

        self.source_partitions = self._asset_key("source_partitions")
        self.superbatches = self._asset_key("superbatches")
        self.embeddings = self._asset_key("embeddings")
        self.next_space = self._asset_key("next_space")
        self.current_space = self._asset_key("current_space")
        self.lancedb = self._asset_key("lancedb")
        self.pgvector = self._asset_key("pgvector")
        self.qdrant = self._asset_key("qdrant")
        self.partitions_name = f"{prefix}catalog"  # of the dynamic partitions

        self.embeddings_op = f"{op_prefix}embeddings"  # of the asset, and of the embed job
        self.refresh_op = f"{op_prefix}refresh"
        self.catalog_checks_op = f"{op_prefix}catalog_checks"
        self.current_space_op = f"{op_prefix}current_space"
        self.derive_all_op = f"{op_prefix}derive"
        self.compare_op = f"{op_prefix}compare"

        self._name_automation(prefix)

        self.catalog_resource = f"{prefix}catalog"
        self.encoder_resource = f"{prefix}encoder"
        self.output_resource = f"{prefix}output"
        self.input_resource = f"{prefix}embeddings_input"
        self.changes_resource = f"{prefix}changes"
        self.gcs_resource = f"{prefix}gcs"  # this and the next one if the setting `gcp` is given
        self.bigquery_resource = f"{prefix}bigquery"

    def _name_automation(self, prefix: str) -> None:
        self.refresh_job = f"{prefix}catalog_refresh"
        self.embed_job = f"{prefix}embed_partitions"
        self.check_job = f"{prefix}catalog_check"
        self.switch_job = f"{prefix}switch_current_space"
        self.compare_job = f"{prefix}compare_spaces"
        self.hand_over_job = f"{prefix}hand_over"
        self.derive_job = f"{prefix}derive_embeddings"  # if the settings list derived spaces

        self.sensor = f"{prefix}new_partitions"
        self.hand_over_sensor = f"{prefix}hand_over_changes"
        self.lost_runs = f"{prefix}lost_runs"
        self.alerts = f"{prefix}alerts"
        self.schedule = f"{prefix}nightly_refresh"
        self.check_schedule = f"{prefix}scheduled_check"

    @property
    def group(self) -> str:
        return self.name or "surge"

    @property
    def partitions(self) -> dg.DynamicPartitionsDefinition:
        return dg.DynamicPartitionsDefinition(name=self.partitions_name)

    def derived(self, label: str) -> dg.AssetKey:
        return self._asset_key(f"embeddings_{label}")

    def assets(self, labels: Iterable[str]) -> frozenset[dg.AssetKey]:
        """Return all assets of the catalog, given the labels of its derived spaces."""
        sources = (self.source_partitions, self.superbatches)
        spaces = (self.embeddings, self.next_space, self.current_space)
        tables = (self.lancedb, self.pgvector, self.qdrant)
        return frozenset((*sources, *spaces, *tables, *map(self.derived, labels)))

    @property
    def run_check(self) -> dg.AssetCheckKey:
        return dg.AssetCheckKey(self.embeddings, RUN_CHECK)

    @property
    def jobs(self) -> frozenset[str]:
        """All jobs of the catalog, also those for tables and derived spaces."""
        embedding = (self.refresh_job, self.embed_job, self.check_job, self.switch_job)
        return frozenset((*embedding, self.compare_job, self.hand_over_job, self.derive_job))

    @property
    def resource_keys(self) -> set[str]:
        """Return what an op, a sensor or a schedule requires to call `resources`."""
        return {self.catalog_resource, self.encoder_resource, self.output_resource}

    def resources(self, context: Any) -> CatalogResources:
        """Return this catalog's resources from the context of an op, a sensor or a schedule."""
        given = context.resources
        catalog: CatalogSource = getattr(given, self.catalog_resource)
        return CatalogResources(
            catalog=catalog.within(context),
            encoder=getattr(given, self.encoder_resource),
            output=getattr(given, self.output_resource),
        )

    def _asset_key(self, plain: str) -> dg.AssetKey:
        return dg.AssetKey([self.name, plain] if self.name else [plain])
