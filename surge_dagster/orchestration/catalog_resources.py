"""The resources of one catalog, and what its runs are made of."""

from __future__ import annotations

from dataclasses import dataclass

from surge_dagster.config.run_setup import RunSetup
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
