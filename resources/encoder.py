"""The encoder pool as a Dagster resource. The op that needs a pool starts it.

A resource that Dagster starts with the run would load a model even when nothing is missing, and every run of a backfill
whose partitions are all fresh would pay for it. So the resource holds the settings, and `start` returns a context
manager that ends the worker processes on every way out, including an interrupt.
"""

from __future__ import annotations

import dagster as dg

from surge_dagster.engine.encoder.pool import EncoderPool
from surge_dagster.engine.model.spec import EncodingSpec
from surge_dagster.settings import EncoderSettings


class Encoder(EncoderSettings, dg.ConfigurableResource):
    """Which vectors are computed, on which devices, in SuperBatches of which size: the settings of the same names."""

    def spec(self) -> EncodingSpec:
        """Everything that shapes a vector."""
        return self.encoding_spec()

    def start(self) -> EncoderPool:
        """Start the worker processes; use `with`, which ends them."""
        return self.start_pool()
